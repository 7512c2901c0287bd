"""One parameter's value where values stand bare: the schema alone tells a string from the rest.

A value is a string where the schema takes strings or says nothing, and it streams as it comes. A
schema that takes strings and other types too gets the other type where the text spells one: it is
held back until that is decided. Without strings, objects and arrays are read loosely as they come,
and anything else as a bare word at its end.
"""

from __future__ import annotations

import re

from flashdraft.chat.answers.arguments import JsonWriter, read_json
from flashdraft.chat.answers.loose_json import LooseScanner
from flashdraft.chat.schema.reading import Shape

# What spells a value that is no string, beside strings; brackets must hold JSON as well.
SPELLED = {
    "null": "null|None",
    "boolean": "true|false|True|False",
    "integer": r"-?(?:0|[1-9][0-9]*)(?:\.0+)?",
    "number": r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+\-]?[0-9]+)?",
    "object": r"\{(?s:.*)",
    "array": r"\[(?s:.*)",
}
_BRACKETS = {"{": "object", "[": "array"}
_DIGITS = re.compile(r"[-+0-9.eE]+")
_MAX_WORD = 300  # characters of a number


class ParameterValue:
    """Writes one value, whose key the writer has got already."""

    def __init__(self, writer: JsonWriter, types: frozenset[str] | None) -> None:
        self._writer = writer
        self._types = types or frozenset({"string"})
        self._held: list[str] | None = []  # None: it is decided what the value is
        self._scanner: LooseScanner | None = None  # of an object or an array
        self._is_trial = False  # the scanner only tells where strings stand
        if self._types == {"string"}:
            self._decide_string()

    @property
    def in_json_string(self) -> bool:
        """Whether the text is inside a string of an object or an array."""
        return self._scanner is not None and self._scanner.in_string

    def text(self, text: str) -> None:
        if self._held is not None:
            self._hold(text)
        elif self._scanner is not None:
            _scan(self._scanner, text)
        elif text:
            self._writer.text(text)

    def end(self) -> None:
        if self._held is None:
            if self._scanner is not None:
                self._scanner.finish()
            else:
                self._writer.end_string()
            return
        text = "".join(self._held)
        if "string" not in self._types:
            self._writer.bare(text.strip())
        elif not self._spells_other(text):
            self._decide_string()
            self._writer.end_string()
        elif self._is_trial:
            _scan(LooseScanner(self._writer), text)
        else:
            self._writer.bare(text)

    def _hold(self, text: str) -> None:
        assert self._held is not None
        self._held.append(text)
        if self._is_trial:
            assert self._scanner is not None
            _scan(self._scanner, text)
            return
        is_mixed = "string" in self._types
        if len(self._held) > 1 and not is_mixed:
            return  # its first character has told
        held = "".join(self._held)
        first = held[:1] if is_mixed else held.lstrip()[:1]
        if not first:
            self._held = []
        elif _BRACKETS.get(first) in self._types:
            self._is_trial = is_mixed
            self._scanner = LooseScanner(JsonWriter(Shape.of(None)) if is_mixed else self._writer)
            _scan(self._scanner, held)
            self._held = [held] if is_mixed else None
        elif is_mixed and not self._may_be_word(held):
            self._decide_string()
        else:
            self._held = [held]

    def _decide_string(self) -> None:
        held, self._held, self._scanner = self._held or [], None, None
        self._writer.begin_string()
        self._writer.text("".join(held))

    def _spells_other(self, text: str) -> bool:
        """Whether the text is a value of a type beside strings that the schema names."""
        if self._is_trial:
            value = read_json(text)
            is_object = isinstance(value, dict) and "object" in self._types
            return is_object or (isinstance(value, list) and "array" in self._types)
        return len(text) <= _MAX_WORD and any(
            re.fullmatch(pattern, text)
            for kind, pattern in SPELLED.items()
            if kind in self._types and kind not in _BRACKETS.values()
        )

    def _may_be_word(self, text: str) -> bool:
        """Whether a number, a boolean or null may begin like this."""
        if self._types & {"number", "integer"} and _DIGITS.fullmatch(text):
            return len(text) <= _MAX_WORD
        return any(
            word.startswith(text)
            for kind in ("null", "boolean")
            if kind in self._types
            for word in SPELLED[kind].split("|")
        )


def _scan(scanner: LooseScanner, text: str) -> None:
    position = 0
    while position < len(text) and not scanner.done:
        position = scanner.feed(text, position)
