"""JSON whose numbers stay as they were written: 1.50, 1e400, -0, numbers of any length.

Python's own reader keeps whole numbers and makes 64-bit floats of all others. Here a number that a
float would write differently is a float that remembers its text. Knows neither schemas nor
templates.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping
from decimal import Decimal, InvalidOperation
from typing import Any

Separators = tuple[str, str]  # after an item and after a key
_MAX_DIGITS = 4000  # Python makes no int of more than 4300
_new_float = float.__new__


class ExactNumber(float):
    """A number as it was written; to whom does not care, the float nearest to it."""

    __slots__ = ("text",)
    text: str

    def __repr__(self) -> str:
        return self.text

    __str__ = __repr__


class NegativeZero(int):
    """-0 as a whole number, which is 0 to whom does not care."""

    text = "-0"

    def __repr__(self) -> str:
        return self.text

    __str__ = __repr__


class Written:
    """JSON text in a value that is written: it is taken over as it is."""

    def __init__(self, text: str) -> None:
        self.text = text


class Inserts:
    """What `json.dumps` asks of a value it does not know: `Written` ones get a place.

    `fill` puts their texts there; a text of the client's cannot know the name of a place.
    """

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}

    def __call__(self, value: Any) -> str:
        if not isinstance(value, Written):
            raise TypeError(f"{type(value).__name__} is no value of JSON")
        place = secrets.token_hex(16)
        self._texts[place] = value.text
        return place

    def fill(self, text: str) -> str:
        for place, written in self._texts.items():
            text = text.replace(f'"{place}"', written, 1)
        return text


def read(text: str | bytes) -> Any:
    """The value of JSON text; raises what `json.loads` raises."""
    if isinstance(text, bytes):
        text = text.decode(json.detect_encoding(text), "surrogatepass")
    # a function for every whole number takes time, and only these need it
    integer = _integer if "-0" in text else None
    try:
        return json.loads(text, parse_float=_number, parse_int=integer)
    except ValueError as error:
        if isinstance(error, json.JSONDecodeError):
            raise
    return json.loads(text, parse_float=_number, parse_int=_integer)  # more digits than Python has


def write(
    value: Any,
    separators: Separators | None = None,
    ensure_ascii: bool = False,
    *,
    indent: int | str | None = None,
    sort_keys: bool = False,
    allow_nan: bool = False,
) -> str:
    """What `json.dumps` writes with these options, numbers as they were written.

    Raises ValueError for NaN and infinities, which JSON has not. May go down a value's depth.
    """
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii,
        allow_nan=allow_nan,
        separators=separators,
        indent=indent,
        sort_keys=sort_keys,
    )
    return _Writer(encoder).write(value, 0) if _has_numbers(value) else encoder.encode(value)


def repeated(value: Any) -> Any:
    """What a client sent, for an answer that repeats it: its numbers as they were written."""
    if not _has_numbers(value):
        return value
    try:
        return Written(write(value))
    except ValueError:  # NaN, which answers have their own way with
        return value


def _has_numbers(value: Any) -> bool:
    return any(
        isinstance(one, ExactNumber | NegativeZero) for level in levels(value) for one in level
    )


def number_text(value: float) -> str:
    """A number as it was written."""
    return value.text if isinstance(value, ExactNumber | NegativeZero) else json.dumps(value)


def exact(value: Any) -> Decimal | None:
    """The number that was written, no digit lost; None for what is no number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        found = Decimal(value if isinstance(value, int) else number_text(value))
    except InvalidOperation:  # an exponent of nineteen digits or more, or NaN
        return None
    return found if found.is_finite() else None


def levels(value: Any) -> Iterator[list[Any]]:
    """The values at every depth, beginning with the outermost one.

    Level by level: recursion on a client's data could be made to fail.
    """
    level = [value]
    while level:
        yield level
        inner = [
            one.values() if isinstance(one, Mapping) else one
            for one in level
            if isinstance(one, Mapping | list | tuple)
        ]
        level = [child for children in inner for child in children]


def _number(text: str) -> float:
    value = float(text)
    if repr(value) == text:
        return value
    number = _new_float(ExactNumber, text)
    number.text = text
    return number


def _integer(text: str) -> int | float:
    if text == NegativeZero.text:
        return NegativeZero()
    return int(text) if len(text) <= _MAX_DIGITS else _number(text)


class _Writer:
    """The library's encoder asks nobody about a subclass of float: this one has its spacing."""

    def __init__(self, encoder: json.JSONEncoder) -> None:
        self._encoder = encoder
        indent = encoder.indent
        self._unit = " " * indent if isinstance(indent, int) else indent

    def write(self, value: Any, depth: int) -> str:
        if isinstance(value, ExactNumber | NegativeZero):
            return value.text
        if isinstance(value, Mapping):
            items = sorted(value.items()) if self._encoder.sort_keys else value.items()
            colon = self._encoder.key_separator
            pairs = [self._key(key) + colon + self.write(item, depth + 1) for key, item in items]
            return self._enclose("{", pairs, "}", depth)
        if isinstance(value, list | tuple):
            return self._enclose("[", [self.write(item, depth + 1) for item in value], "]", depth)
        return self._encoder.encode(value)

    def _key(self, key: Any) -> str:
        if isinstance(key, str):
            return self._encoder.encode(key)
        if key is None or isinstance(key, int | float):
            return f'"{self.write(key, 0)}"'
        raise TypeError(f"keys must be str, int, float, bool or None, not {type(key).__name__}")

    def _enclose(self, opening: str, inner: list[str], closing: str, depth: int) -> str:
        comma = self._encoder.item_separator
        if self._unit is None or not inner:
            return opening + comma.join(inner) + closing
        line = "\n" + self._unit * depth
        between = comma + line + self._unit
        return opening + line + self._unit + between.join(inner) + line + closing
