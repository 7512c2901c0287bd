"""A call's arguments as JSON text, written as they are read, with types as the tool's schema wants.

What was written never changes: a value whose form is not decided yet is held back whole.
The rule of types: a bare value stays what it is (number, true, false, null) if the schema allows
it or says nothing; a bare value where only a string is allowed becomes a string, null excepted; a
string where the schema allows no string becomes the number, boolean, null, object or array that it
spells, and stays a string if it spells none.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from flashdraft.chat.schema.reading import Shape
from flashdraft.text.exact_json import read, write

_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_DIGITS = "[0-9]+(?:_[0-9]+)*"
_LENIENT = re.compile(
    rf"(?P<sign>[+-]?)(?P<whole>(?:{_DIGITS})?)(?:\.(?P<part>(?:{_DIGITS})?))?"
    r"(?P<exponent>[eE][+-]?[0-9]+)?"
)
_MAX_NUMBER = 300  # characters; JSON readers refuse integers of thousands of digits
_WORDS = {"true": "true", "false": "false", "True": "true", "False": "false"}
NULLS = ("null", "None")


@dataclass
class _OpenBracket:
    bracket: str
    shape: Shape
    count: int = 0


class JsonWriter:
    """A `Sink` that writes JSON text; `take` hands over what was written since the last time."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self._written: list[str] = []
        self._frames: list[_OpenBracket] = []
        self._key: str | None = None  # not written before its value begins
        self._held: list[str] | None = None  # a string that must not be one

    def take(self) -> str:
        text = "".join(self._written)
        self._written.clear()
        return text

    def whole(self, value: Any) -> None:
        """Write a value that is known at once."""
        self._written.append(write(value))

    def open(self, bracket: str) -> None:
        shape = self._place()
        self._begin_value()
        self._written.append(bracket)
        self._frames.append(_OpenBracket(bracket, shape))

    def close(self) -> None:
        self._key = None
        self._written.append("}" if self._frames.pop().bracket == "{" else "]")

    def key(self, text: str) -> None:
        self._key = text

    def begin_string(self) -> None:
        types = self._place().types
        if types is not None and "string" not in types:
            self._held = []
        else:
            self._begin_value()
            self._written.append('"')

    def text(self, text: str) -> None:
        if self._held is not None:
            self._held.append(text)
        else:
            self._written.append(_quoted(text)[1:-1])

    def end_string(self) -> None:
        if self._held is None:
            self._written.append('"')
            return
        text, self._held = "".join(self._held), None
        types = self._place().types
        self._begin_value()
        self._written.append(_unquoted(text, types or frozenset()))

    def bare(self, text: str) -> None:
        types = self._place().types
        self._begin_value()
        self._written.append(bare_value(text, types))

    def _place(self) -> Shape:
        if not self._frames:
            return self._shape
        frame = self._frames[-1]
        if frame.bracket == "{":
            return frame.shape.property(self._key or "")
        return frame.shape.item(frame.count)

    def _begin_value(self) -> None:
        if not self._frames:
            return
        frame = self._frames[-1]
        if frame.count:
            self._written.append(", ")
        frame.count += 1
        if frame.bracket == "{":
            self._written.append(_quoted(self._key or "") + ": ")
            self._key = None


def bare_value(text: str, types: frozenset[str] | None) -> str:
    """The JSON text of a value that stood without quotes."""
    if text in NULLS:
        return "null"
    wants_string = types is not None and "string" in types
    if text in _WORDS:
        keeps = not wants_string or (types is not None and "boolean" in types)
        return _WORDS[text] if keeps else _quoted(text)
    if _is_number(text):
        is_allowed = types is None or bool(types & {"number", "integer"})
        return _number(text, types) if is_allowed or not wants_string else _quoted(text)
    if types is not None and types & {"number", "integer"} and not wants_string:
        return _lenient_number(text) or _quoted(text)
    return _quoted(text)


def _unquoted(text: str, types: frozenset[str]) -> str:
    """The JSON text of a string where the schema allows none."""
    word = text.strip()
    if types & {"number", "integer"} and _is_number(word):
        return _number(word, types)
    if "boolean" in types and word in _WORDS:
        return _WORDS[word]
    if "null" in types and word in NULLS:
        return "null"
    if types & {"object", "array"}:
        value = read_json(word)
        is_object = isinstance(value, dict) and "object" in types
        if is_object or (isinstance(value, list) and "array" in types):
            return write(value)
    return _quoted(text)


def read_json(text: str) -> Any:
    """The value of strict JSON text; None where it is not."""
    try:
        value = read(text)
        write(value).encode()  # NaN or a lone surrogate could not be sent
    except (ValueError, RecursionError):
        return None
    return value


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _is_number(text: str) -> bool:
    return len(text) <= _MAX_NUMBER and _NUMBER.fullmatch(text) is not None


def _number(text: str, types: frozenset[str] | None) -> str:
    """The number as written; 3.0 becomes 3 where only integers are allowed."""
    wants_integer = types is not None and "integer" in types and "number" not in types
    if wants_integer and re.fullmatch(r"-?[0-9]+\.0+", text):
        return text.partition(".")[0]
    return text


def _lenient_number(text: str) -> str | None:
    """`.5`, `5.`, `+3`, `1_000`: what a program would read as a number, digit for digit."""
    found = _LENIENT.fullmatch(text.strip())
    if found is None or not any(map(str.isdigit, found["whole"] + (found["part"] or ""))):
        return None
    whole = found["whole"].replace("_", "").lstrip("0") or "0"
    part = (found["part"] or "").replace("_", "")
    sign = found["sign"].replace("+", "")
    number = f"{sign}{whole}{'.' if part else ''}{part}{found['exponent'] or ''}"
    return number if _is_number(number) else None
