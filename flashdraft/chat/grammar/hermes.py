"""How Qwen3 and other ChatML models write calls, as a grammar: `<tool_call>{json}</tool_call>`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from flashdraft.chat.answers.marks import MarkKind
from flashdraft.chat.grammar.tools import NO_BARE_CALL
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
        self._reads_bare = reads_bare
        self._spellings = spellings
        self._ids = {mark: tokenizer.token_id(text) for mark, text in spellings.items()}

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
        lines.append(f'call: "\\n" ({" | ".join(calls)}) "}}\\n" {self._mark(MarkKind.END_CALL)}')
        start = ""
        if MarkKind.THINK in self._spellings:
            lines.append(f"thought: {self._mark(MarkKind.THINK)} thoughts")
            lines.append(self._until("thoughts", MarkKind.END_THINK))
            start = "thoughts " if is_open else "thought? " if thinking or is_free else ""
        begin = self._mark(MarkKind.CALL)
        more = f'("\\n" {begin} call)*' if parallel else ""
        if is_free:
            text = NO_BARE_CALL if self._reads_bare else "(?s:.+)"
            lines.append(self._until("lead", MarkKind.CALL, text))
            lines.append(f"rest: /{text}/?")
            body = "(lead call)* rest" if parallel else "(lead call | rest)"
        else:
            body = f"SPACE? {begin} call {more}"
            lines.append("SPACE: /\\n{1,4}/")
        return "\n".join([f"start: {start}{body}", *lines])

    def _mark(self, mark: MarkKind) -> str:
        """A mark as the token that it is, special or not, else as text."""
        index = self._ids[mark]
        return json.dumps(self._spellings[mark]) if index is None else f"<[{index}]>"

    def _until(self, rule: str, mark: MarkKind, text: str = "(?s:.+)") -> str:
        """A rule for free text up to a mark, the mark included."""
        if self._ids[mark] is None:
            return f"{rule}[lazy]: /(?:{text})?{self._spellings[mark].replace('/', chr(92) + '/')}/"
        return f"{rule}: /{text}/? {self._mark(mark)}"


def arguments_rules(functions: Mapping[str, Any]) -> tuple[dict[str, str], list[str]]:
    """The rule of every function's arguments as JSON, by the function's name; and all lines."""
    grammar, names, lines = JsonGrammar(FIXED), {}, []
    for number, (name, schema) in enumerate(functions.items()):
        names[name] = f"arguments{number}"
        where = f"the parameters of the tool {name!r:.60}"
        lines.append(f"{names[name]}: {grammar.body(_arguments_schema(name, schema), where)}")
    return names, [*lines, *grammar.lines]


def _arguments_schema(name: str, schema: Any) -> dict[str, Any]:
    """The schema of an object."""
    if schema is None:
        return {"type": "object"}
    if not isinstance(schema, Mapping) or schema.get("type", "object") != "object":
        raise RequestError(
            f"The parameters of the tool {name!r:.60} are {schema!r:.60}; they must be the JSON "
            "schema of an object."
        )
    return {"type": "object", **schema}
