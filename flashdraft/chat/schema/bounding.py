"""An end for values that have none: a small model writes them on until its tokens are used up.

What is decided here is written into the schema, where it is silent: so many characters of a text,
items of a list, and digits of a number.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flashdraft.chat.schema.closing import with_inner
from flashdraft.chat.schema.numbers import MAX_WHOLE

TOKENS_PER_ITEM = 64  # of a list without an end
TOKENS_PER_CHARACTER = 2  # of texts that a small tokenizer knows little of
FEWEST_CHARACTERS = 32  # of a text, however many there are
MOST_CHARACTERS = 4096  # more are not counted: a grammar that counts has states for each of them
LARGEST = MAX_WHOLE  # of numbers: times in milliseconds have 13 digits, many ids 16; and
SMALLEST_PART = 1e-6  # what they are made of
_FEWEST_PARTS = 1000  # of a number between bounds; where there are fewer, it is left as it is
_TELLING = ("const", "enum", "pattern", "format")  # words that say what a value is
_CHOICES = ("anyOf", "oneOf")
_PAIRS = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
_COMBINING = (*_CHOICES, "allOf", "$ref")


def bound_values(schema: Any, max_tokens: int) -> Any:
    """The schema with an end for everything, so that a value should take no more tokens."""
    most_items = max(1, max_tokens // TOKENS_PER_ITEM)
    num_texts = max(1, _count_texts(schema, most_items))
    most_characters = max(FEWEST_CHARACTERS, max_tokens // (TOKENS_PER_CHARACTER * num_texts))
    is_counted = most_characters <= MOST_CHARACTERS
    return _bound(schema, most_characters if is_counted else None, most_items)


def _count_texts(schema: Any, most_items: int) -> int:
    """Texts without an end that a value may have; what is referred to counts as none."""
    if not isinstance(schema, Mapping):
        return 0
    inner = schema.get("properties")
    parts = inner.values() if isinstance(inner, Mapping) else ()
    count = sum(_count_texts(one, most_items) for one in parts)
    for word in _CHOICES:
        branches = schema.get(word)
        if isinstance(branches, list):
            count += max((_count_texts(one, most_items) for one in branches), default=0)
    if "items" in schema:
        most = schema.get("maxItems", most_items)
        each = _count_texts(schema["items"], most_items)
        count += each * (most if isinstance(most, int) else most_items)
    is_free = not any(word in schema for word in (*_TELLING, "maxLength"))
    return count + ("string" in _kinds(schema) and is_free)


def _kinds(schema: Mapping[str, Any]) -> list[Any]:
    kinds = schema.get("type")
    return kinds if isinstance(kinds, list) else [kinds]


def _bound(schema: Any, most_characters: int | None, most_items: int) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    made = with_inner(schema, lambda word, inner: _inner(word, inner, most_characters, most_items))
    return made | _ends(schema, most_characters, most_items)


def _inner(word: str, schema: Any, most_characters: int | None, most_items: int) -> Any:
    made = _bound(schema, most_characters, most_items)
    if word != "allOf" or not isinstance(schema, Mapping):
        return made
    # another of them may ask for more than an end here would leave
    return {name: made[name] for name in schema}


def _ends(
    schema: Mapping[str, Any], most_characters: int | None, most_items: int
) -> dict[str, Any]:
    """The words that end a value; none where other words, or other schemas, describe it too."""
    if any(word in schema for word in (*_TELLING, *_COMBINING)):
        return {}
    kinds, ends = _kinds(schema), dict[str, Any]()
    if "string" in kinds and most_characters is not None:
        ends["maxLength"] = _most(schema, "maxLength", "minLength", most_characters)
    if "array" in kinds:
        ends["maxItems"] = _most(schema, "maxItems", "minItems", most_items)
    if "number" in kinds or "integer" in kinds:
        ends |= _number_bounds(schema)
    is_whole = "integer" in kinds or "multipleOf" in schema
    if "number" in kinds and not is_whole and _has_room(schema):
        ends["multipleOf"] = SMALLEST_PART
    return ends


def _most(schema: Mapping[str, Any], most: str, least: str, value: int) -> Any:
    """What the schema says, or else the value, which is no less than what it asks for."""
    floor = schema.get(least)
    return schema.get(most, max(value, floor) if isinstance(floor, int) else value)


def _number_bounds(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The bounds that the schema leaves out; none where those it has are beyond them."""
    said = [schema[word] for pair in _PAIRS for word in pair if word in schema]
    if any(not isinstance(one, int | float) or abs(one) >= LARGEST for one in said):
        return {}
    ends = (-LARGEST, LARGEST)
    return {
        pair[0]: end
        for pair, end in zip(_PAIRS, ends, strict=True)
        if not any(word in schema for word in pair)
    }


def _has_room(schema: Mapping[str, Any]) -> bool:
    """Whether enough numbers of so many decimals lie between the schema's bounds."""
    ends = [
        [schema[word] for word in pair if isinstance(schema.get(word), int | float)]
        for pair in _PAIRS
    ]
    return not all(ends) or min(ends[1]) - max(ends[0]) >= _FEWEST_PARTS * SMALLEST_PART
