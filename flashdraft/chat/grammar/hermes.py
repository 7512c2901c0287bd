"""How Qwen3 and other ChatML models write calls, as a grammar: `<tool_call>{json}</tool_call>`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from flashdraft.chat.answers.marks import MarkKind
from flashdraft.chat.grammar.marked import Call, MarkedAnswers
from flashdraft.chat.schema.json_rule import FIXED, JsonGrammar
from flashdraft.chat.schema.rules import lark_text
from flashdraft.errors import RequestError
from flashdraft.models.tokenizer import Tokenizer


class HermesCallGrammar:
    """A `CallGrammar` of JSON between marks."""

    def __init__(
        self, tokenizer: Tokenizer, spellings: Mapping[MarkKind, str], reads_bare: bool = False
    ) -> None:
        """`spellings` are the marks that the model knows, those of calls among them.

        `reads_bare`: calls without marks are read too; free text must not look like one.
        """
        self._answers = MarkedAnswers(tokenizer, spellings, reads_bare)

    def text(
        self,
        functions: Mapping[str, Any],
        *,
        is_free: bool,
        parallel: bool,
        is_open: bool,
        thinking: bool,
    ) -> str:
        rules, lines = arguments_rules(functions)
        calls = []
        for name, rule in rules.items():
            head = json.dumps({"name": name}, ensure_ascii=False)[:-1] + ', "arguments": '
            calls.append(f"{lark_text(head)} {rule}")
        call = Call(f'({" | ".join(calls)}) "}}"', lines)
        return self._answers.text(
            call, is_free=is_free, parallel=parallel, is_open=is_open, thinking=thinking
        )


def arguments_rules(functions: Mapping[str, Any]) -> tuple[dict[str, str], list[str]]:
    """The rule of every function's arguments as JSON, by the function's name; and all lines."""
    grammar, names, lines = JsonGrammar(FIXED), {}, []
    for number, (name, schema) in enumerate(functions.items()):
        names[name] = f"arguments{number}"
        where = f"the parameters of the tool {name!r:.60}"
        lines.append(f"{names[name]}: {grammar.body(arguments_schema(name, schema), where)}")
    return names, [*lines, *grammar.lines]


def arguments_schema(name: str, schema: Any) -> dict[str, Any]:
    """The schema of an object."""
    if schema is None:
        return {"type": "object"}
    if not isinstance(schema, Mapping) or schema.get("type", "object") != "object":
        raise RequestError(
            f"The parameters of the tool {name!r:.60} are {schema!r:.60}; they must be the JSON "
            "schema of an object."
        )
    return {"type": "object", **schema}
