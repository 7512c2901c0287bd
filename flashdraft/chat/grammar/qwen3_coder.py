"""How Qwen3-Coder, Qwen3.5 and later Qwen models write calls, as a grammar: tags and bare values.

Parameters stand in declared order, each once; those that are required must come.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flashdraft.chat.answers.marks import MarkKind
from flashdraft.chat.answers.qwen3_coder import END_FUNCTION, FUNCTION, PARAMETER
from flashdraft.chat.grammar.hermes import arguments_schema
from flashdraft.chat.grammar.marked import Call, MarkedAnswers
from flashdraft.chat.grammar.parameters import REMEDY, ParameterRules
from flashdraft.chat.schema.rules import lark_text, other_words
from flashdraft.errors import RequestError, quoted
from flashdraft.models.tokenizer import Tokenizer

_WORDS = {"properties", "required", "additionalProperties"}
_NAME = r"NAME: /[A-Za-z_][A-Za-z0-9_.\-]*/"


class QwenCallGrammar:
    """A `CallGrammar` of `<function=…>` and `<parameter=…>` between Hermes' marks."""

    def __init__(self, tokenizer: Tokenizer, spellings: Mapping[MarkKind, str]) -> None:
        self._answers = MarkedAnswers(tokenizer, spellings)

    def text(
        self,
        functions: Mapping[str, Any],
        *,
        is_free: bool,
        parallel: bool,
        is_open: bool,
        thinking: bool,
    ) -> str:
        rules = ParameterRules()
        lines = []
        bodies = []
        for number, (name, schema) in enumerate(functions.items()):
            head = _tagged(name, "The tool")
            bodies.append(f"{lark_text(head)} arguments{number}")
            where = f"the parameters of the tool {name!r:.60}"
            body = _arguments(rules, arguments_schema(name, schema), where)
            lines.append(f"arguments{number}: {body}")
        lines.append(f'function: ({" | ".join(bodies)}) "{END_FUNCTION}"')
        call = Call(
            f'"{FUNCTION}" function', [*lines, *rules.lines, _NAME], unmarked=(FUNCTION, "function")
        )
        return self._answers.text(
            call, is_free=is_free, parallel=parallel, is_open=is_open, thinking=thinking
        )


def _arguments(rules: ParameterRules, schema: Mapping[str, Any], where: str) -> str:
    """The body of a rule of all parameters."""
    unknown = other_words(schema, _WORDS)
    if unknown:
        raise RequestError(
            f"{where} use {', '.join(unknown)}, which a grammar cannot follow here; leave it out, "
            f"{REMEDY}."
        )
    properties = schema.get("properties") or {}
    required = schema.get("required") or []
    is_list = isinstance(required, list) and all(isinstance(name, str) for name in required)
    if not isinstance(properties, Mapping) or not is_list:
        raise RequestError(f"{where}: properties must be an object and required a list of names.")
    missing = [name for name in required if name not in properties]
    if missing:
        raise RequestError(f"{where} require {missing[0]!r:.60}, which they do not declare.")
    if not properties:
        more = schema.get("additionalProperties", "properties" not in schema)
        if more is False:
            return '""'
        value = rules.value(more, schema, f"{where}, additionalProperties")
        return f'("{PARAMETER}" NAME ">\\n" ({value}) "\\n")*'
    needed = set(required)
    parts = []
    for name, inner in properties.items():
        head = PARAMETER + _tagged(name, f"{where}: the parameter")
        value = rules.value(inner, schema, f"{where}, {name!r:.60}")
        parts.append(f'({lark_text(head)} ({value}) "\\n"){"" if name in needed else "?"}')
    return " ".join(parts)


def _tagged(name: Any, what: str) -> str:
    """A name with the end of its tag."""
    if not isinstance(name, str) or not name or name != name.strip() or {">", "\n"} & set(name):
        raise RequestError(
            f"{what} {quoted(name)} cannot be called by this model: it writes names into tags, so "
            "a name must have no '>', no new line and no white space around it."
        )
    return f"{name}>\n"
