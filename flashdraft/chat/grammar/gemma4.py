"""How Gemma 4 writes calls and their arguments, as a grammar.

Strings stand between quote tokens, without escapes; names have no quotes; there is no white space.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from flashdraft.chat.answers.gemma4 import SPELLINGS, TOOL_RESPONSE
from flashdraft.chat.answers.marks import MarkKind
from flashdraft.chat.schema.pattern import full_pattern
from flashdraft.chat.schema.rules import SchemaRules, counts, lark_text
from flashdraft.errors import RequestError
from flashdraft.models.tokenizer import Tokenizer
from flashdraft.text.exact_json import write

_KEY = re.compile(r'[^:,{}\[\]"]+')  # names that can stand without quotes
_TERMINALS = (
    r"INTEGER: /-?(0|[1-9][0-9]*)/",
    r"NUMBER: /-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?/",
    r"KEY: /[A-Za-z_][A-Za-z0-9_.\-]*/",
    r"STRING: /(?s:.+)/",
)


class GemmaCallGrammar:
    """A `CallGrammar` of special tokens and `call:name{…}`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        ids = {mark: tokenizer.token_id(text) for mark, text in SPELLINGS.items()}
        self._tokens = {mark: f"<[{index}]>" for mark, index in ids.items()}
        end = tokenizer.token_id(TOOL_RESPONSE)
        # after several calls it asks for their results; without the token it would call again
        self._after_calls = "" if end is None else f" <[{end}]>?"

    def text(
        self,
        functions: Mapping[str, Any],
        *,
        is_free: bool,
        parallel: bool,
        is_open: bool,
        thinking: bool,
    ) -> str:
        tokens = self._tokens
        rules = SchemaRules(GemmaSyntax(tokens[MarkKind.QUOTE]))
        calls = [
            f"{lark_text(name)} {_arguments_rule(rules, name, schema)}"
            for name, schema in functions.items()
        ]
        rest = f"TEXT? {tokens[MarkKind.END_THINK]} " if is_open else ""
        must_call = "thought? calls" if thinking else "calls"
        start = "TEXT? (thought TEXT?)* calls?" if is_free else must_call
        begin, end = tokens[MarkKind.CALL], tokens[MarkKind.END_CALL]
        return "\n".join(
            [
                f"start: {rest}{start}",
                f"thought: {tokens[MarkKind.THINK]} TEXT? {tokens[MarkKind.END_THINK]}",
                f"calls: call+{self._after_calls}" if parallel else "calls: call",
                f'call: {begin} "call:" ({" | ".join(calls)}) {end}',
                *rules.lines,
                *_TERMINALS,
                "TEXT: /(?s:.+)/",
            ]
        )


def _arguments_rule(rules: SchemaRules, name: str, schema: Any) -> str:
    """The rule of a tool's arguments; no schema means any arguments."""
    if schema is None or schema is True or schema == {}:
        return rules.add(rules.map(True, "", 0))
    where = f"the parameters of the tool {name!r}"
    if not isinstance(schema, Mapping):
        raise RequestError(f"{where} are {schema!r:.60}; they must be a JSON schema.")
    if schema.get("type", "object") != "object":
        raise RequestError(f"{where} have the type {schema['type']!r:.60}; it must be 'object'.")
    return rules.of(schema, where)


class GemmaSyntax:
    """Gemma's `Syntax`."""

    comma = '","'
    gap = ""
    knows_nullable = True
    remedy = "or do not force the call (tool_choice, strict)"

    def __init__(self, quote: str) -> None:
        """`quote` is the quote token in the grammar's syntax."""
        self._quote = quote
        self._generic: str | None = None

    def whole(self, rules: SchemaRules, schema: Mapping[str, Any]) -> str | None:
        return None

    def anything(self, rules: SchemaRules) -> str:
        if self._generic is None:
            name, place = rules.reserve()
            self._generic = name
            pair = rules.add(f'KEY ":" {name}')
            rules.lines[place] = (
                f'{name}: NUMBER | "true" | "false" | "null" | {self._quote} STRING? {self._quote}'
                f' | "[" ({name} ("," {name})*)? "]" | "{{" ({pair} ("," {pair})*)? "}}"'
            )
        return self._generic

    def string(self, rules: SchemaRules, schema: Mapping[str, Any], where: str) -> str:
        least, most = counts(schema, "minLength", "maxLength", where)
        pattern = schema.get("pattern")
        if pattern is None and least == 0 and most is None:
            return f"{self._quote} STRING? {self._quote}"
        if most == 0:
            return f"{self._quote} {self._quote}"
        terms = []
        may_be_empty = least == 0
        if pattern is not None:
            body, matches_empty = full_pattern(pattern, where)
            terms.append(f"/{body}/")
            may_be_empty &= matches_empty
        terms.append(f"/(?s:.{{{max(least, 1)},{'' if most is None else most}}})/")
        name = f"STRING_{len(rules.lines)}"
        rules.lines.append(f"{name}: {' & '.join(terms)}")
        return f"{self._quote} {name}{'?' if may_be_empty else ''} {self._quote}"

    def number(self, rules: SchemaRules, schema: Mapping[str, Any]) -> str:
        if schema.keys() == {"type"}:
            return str(schema["type"]).upper()
        return rules.add(f"%json {write(schema)}")

    def text(self, text: str) -> str:
        return f"{self._quote} {lark_text(text) if text else ''} {self._quote}"

    def key(self, name: Any, where: str) -> str:
        if not isinstance(name, str) or name != name.strip() or not _KEY.fullmatch(name):
            raise RequestError(
                f"{where} has the property {name!r:.60}; Gemma writes names without quotes, so a "
                "name cannot have brackets, quotes, commas, colons or white space around it."
            )
        return lark_text(f"{name}:")

    def any_key(self, rules: SchemaRules) -> str:
        return 'KEY ":"'
