"""Which numbers of a JSON schema the grammar's library keeps, and what is written for the others.

llguidance reads numbers as 64-bit floats: a whole number beyond 2^53 or a long decimal would become
another one. Such values are written out as text; bounds of whole numbers become a regular
expression. Other bounds that would change are refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from typing import Any

from flashdraft.errors import RequestError, quoted
from flashdraft.text.exact_json import ExactNumber, NegativeZero, exact, levels, number_text

BOUNDS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
_COUNTS = (
    *("minLength", "maxLength", "minItems", "maxItems"),
    *("minProperties", "maxProperties", "minContains", "maxContains"),
)
_LIMITS = {*BOUNDS, *_COUNTS, "multipleOf"}
MAX_WHOLE = 2**53 - 1  # up to it floats hold all whole numbers and the next ones
MAX_DECIMALS = 60  # digits after the point that llguidance makes a pattern of
MAX_DIGITS = 60  # of a bound that is made a pattern here; 128 bits have 39
MAX_COUNT = 2**64 - 1


def is_kept(value: Any) -> bool:
    """Whether a reader with 64-bit floats has the same number."""
    number = exact(value)
    if number is None or number.copy_abs() > MAX_WHOLE:
        return False
    exponent = number.as_tuple().exponent
    has_decimals = isinstance(exponent, int) and exponent < -MAX_DECIMALS
    return not has_decimals and number == Decimal(repr(float(value)))


def is_literal_kept(value: Any) -> bool:
    """Whether llguidance writes all the numbers of a const or enum as the client did."""
    return all(_is_written_alike(one) for level in levels(value) for one in level)


def is_value_kept(value: Any) -> bool:
    """Whether all numbers of a const or enum are at least equal to those of the client."""
    return all(exact(one) is None or is_kept(one) for level in levels(value) for one in level)


def are_limits_kept(schema: Mapping[str, Any]) -> bool:
    """Whether the numbers that limit a value at this place, and only this, are kept."""
    return not any(_is_lost(name, schema[name]) for name in _LIMITS & schema.keys())


def are_all_limits_kept(schema: Any) -> bool:
    """Whether nothing anywhere in a schema can be a limit that would change."""
    return all(
        are_limits_kept(one)
        for level in levels(schema)
        for one in level
        if isinstance(one, Mapping)
    )


def _is_lost(name: str, value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False  # no limit at all
    if name in _COUNTS:
        return isinstance(value, float) or not 0 <= value <= MAX_COUNT
    return not is_kept(value)


def _is_written_alike(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return True
    if isinstance(value, int):
        return abs(value) <= MAX_WHOLE and not isinstance(value, NegativeZero)
    text = repr(value)  # llguidance writes 1.0 as 1 and never an exponent
    is_plain = "e" not in text and not text.endswith(".0")
    return not isinstance(value, ExactNumber) and is_plain and abs(value) <= MAX_WHOLE


def check_kept(schema: Mapping[str, Any], where: str) -> None:
    """Refuse numbers that limit a value and would become others."""
    for name in sorted(_LIMITS & schema.keys()):
        value = schema[name]
        if not _is_lost(name, value):
            continue
        text = f"{where}: {name} is {number_text(value):.60}, "
        if name in _COUNTS:
            raise RequestError(f"{text}which must be a whole number from 0 to {MAX_COUNT}.")
        raise RequestError(
            f"{text}which cannot be kept exactly: such a number is at most {MAX_WHOLE} in size, "
            f"with 15 digits in all and {MAX_DECIMALS} after the point. Round it or leave it out; "
            'minimum and maximum of {"type": "integer"} without multipleOf may be larger.'
        )


def values_within(schema: Mapping[str, Any], values: Iterable[Any]) -> list[Any]:
    """The values that keep the type and the bounds beside them; exact for every number."""
    named = schema.get("type")
    kinds = {
        kind if isinstance(kind, str) else None
        for kind in (named if isinstance(named, list) else [named])
    }
    bounds = {name: exact(schema[name]) for name in BOUNDS & schema.keys()}
    return [
        value
        for value in values
        if (None in kinds or any(_is_of_type(value, kind) for kind in kinds))
        and _is_within(bounds, value)
    ]


def _is_within(bounds: Mapping[str, Decimal | None], value: Any) -> bool:
    if not bounds or isinstance(value, bool) or not isinstance(value, int | float):
        return True
    number = exact(value)
    if number is None:  # its exponent is beyond all comparison
        return False
    low, high = bounds.get("minimum"), bounds.get("maximum")
    above, below = bounds.get("exclusiveMinimum"), bounds.get("exclusiveMaximum")
    return (
        (low is None or number >= low)
        and (high is None or number <= high)
        and (above is None or number > above)
        and (below is None or number < below)
    )


def _is_of_type(value: Any, kind: Any) -> bool:
    if kind in ("integer", "number"):
        number = exact(value)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if kind == "number" or number is None:
            return is_number
        return number == number.to_integral_value()
    types: dict[Any, type | tuple[type, ...]] = {
        "string": str,
        "boolean": bool,
        "null": type(None),
        "array": (list, tuple),
        "object": Mapping,
    }
    return isinstance(value, types.get(kind, object))


def integer_pattern(schema: Mapping[str, Any], where: str) -> str:
    """The regular expression of the whole numbers within bounds of any size."""
    if "multipleOf" in schema:
        check_kept(schema, where)
    lows = [_whole(schema, "minimum", where), _whole(schema, "exclusiveMinimum", where)]
    highs = [_whole(schema, "maximum", where), _whole(schema, "exclusiveMaximum", where)]
    low = max((bound for bound in lows if bound is not None), default=None)
    high = min((bound for bound in highs if bound is not None), default=None)
    if low is not None and high is not None and low > high:
        raise RequestError(f"{where}: no whole number is from {low:d} to {high:d}.")
    parts = []
    if low is None or low < 0:
        smallest = 1 if high is None or high >= 0 else -high
        parts.append("-" + _magnitudes(smallest, None if low is None else -low))
    if high is None or high >= 0:
        parts.append(_magnitudes(max(low or 0, 0), high))
    return f"(?:{'|'.join(parts)})"


def _whole(schema: Mapping[str, Any], name: str, where: str) -> int | None:
    """The outermost whole number that a bound allows."""
    if name not in schema:
        return None
    bound = exact(schema[name])
    if bound is None or max(abs(bound.adjusted()), len(bound.as_tuple().digits)) > MAX_DIGITS:
        raise RequestError(
            f"{where}: {name} is {quoted(schema[name])}; it must be a number of at most "
            f"{MAX_DIGITS} digits. Round it or leave it out."
        )
    is_low = name in ("minimum", "exclusiveMinimum")
    whole = int(bound.to_integral_value(ROUND_CEILING if is_low else ROUND_FLOOR))
    if name.startswith("exclusive") and whole == bound:
        whole += 1 if is_low else -1
    return whole


def _magnitudes(low: int, high: int | None) -> str:
    """Whole numbers from a low one on, which is not negative, without a sign."""
    first = str(low)
    if high is None:
        same = _same_length(first, "9" * len(first))
        return f"(?:{same}|[1-9][0-9]{{{len(first)},}})"
    last = str(high)
    if len(first) == len(last):
        return f"(?:{_same_length(first, last)})"
    parts = [_same_length(first, "9" * len(first))]
    if len(last) - len(first) > 1:
        parts.append(f"[1-9][0-9]{{{len(first)},{len(last) - 2}}}")
    parts.append(_same_length("1" + "0" * (len(last) - 1), last))
    return f"(?:{'|'.join(parts)})"


def _same_length(first: str, last: str) -> str:
    """Digits from one text to another of the same length, beginning with what they share."""
    shared = next((n for n in range(len(first)) if first[n] != last[n]), len(first))
    head, first, last = first[:shared], first[shared:], last[shared:]
    if not first:
        return head
    rest = len(first) - 1
    if set(first[1:]) <= {"0"} and set(last[1:]) <= {"9"}:
        return f"{head}[{first[0]}-{last[0]}]{_any_digits(rest)}"
    parts = [_beside(first, is_low=True), _beside(last, is_low=False)]
    if int(last[0]) - int(first[0]) > 1:
        between = f"[{int(first[0]) + 1}-{int(last[0]) - 1}]"
        parts.append(between + _any_digits(rest))
    return f"{head}(?:{'|'.join(parts)})"


def _beside(edge: str, *, is_low: bool) -> str:
    """The texts that begin with the edge's first digit and are not less, or not more, than it."""
    parts = [edge]
    for place in range(1, len(edge)):
        digit = int(edge[place])
        first, last = (digit + 1, 9) if is_low else (0, digit - 1)
        if first <= last:
            rest = _any_digits(len(edge) - place - 1)
            parts.append(f"{edge[:place]}[{first}-{last}]{rest}")
    return "|".join(parts)


def _any_digits(count: int) -> str:
    return f"[0-9]{{{count}}}" if count else ""
