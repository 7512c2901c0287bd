"""What a tool's JSON schema says about the value at hand; a strange schema says nothing.

It validates nothing: it answers which types a value may have, and leads to a property or an item.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any, NamedTuple

from flashdraft.errors import RequestError
from flashdraft.text.exact_json import ExactNumber, NegativeZero, exact, levels

_MAX_MULTIPLES = 64  # no number up to 10000 has more divisors
_MAX_DIGITS = 60  # of a multipleOf, before and after the point
_MAX_ALTERNATIVES = 64  # of anyOf, oneOf, allOf and $ref together: more are not looked at
DEFINITIONS = ("$defs", "definitions")
NAMED = ("properties", "patternProperties", "dependentSchemas")  # whose keys are names
DATA = ("const", "enum", "default", "example", "examples")  # which hold values, not schemas
_JSON_TYPES: dict[type, str] = {
    str: "string",
    bool: "boolean",
    int: "integer",
    NegativeZero: "integer",
    float: "number",
    ExactNumber: "number",
    dict: "object",
    list: "array",
    type(None): "null",
}


def is_deeper_than(value: Any, limit: int) -> bool:
    """Whether objects and lists nest deeper than a limit.

    Level by level: recursion on a client's data could be made to fail.
    """
    return any(depth > limit for depth, _ in enumerate(levels(value), 1))


class Multiple(NamedTuple):
    """A multipleOf: a whole number, its last digits after the point."""

    coefficient: int
    decimals: int


def multiples(schema: Any) -> set[Multiple]:
    """All multipleOf in a schema."""
    found = set()
    for level in levels(schema):
        for one in level:
            number = exact(one.get("multipleOf")) if isinstance(one, Mapping) else None
            if number is not None and number > 0:
                found.add(_multiple(number))
                if len(found) > _MAX_MULTIPLES:
                    raise RequestError(
                        f"The schema has more than {_MAX_MULTIPLES} different multipleOf; leave "
                        "some out."
                    )
    return found


def _multiple(number: Decimal) -> Multiple:
    """By its digits: to compute with the number would round it, or fail."""
    _, digits, exponent = number.as_tuple()
    text = "".join(map(str, digits))
    power = int(exponent) + len(text) - len(text.rstrip("0"))
    if not -_MAX_DIGITS <= power <= number.adjusted() < _MAX_DIGITS:
        raise RequestError(
            f"multipleOf is {number!s:.60}; it must have at most {_MAX_DIGITS} digits before the "
            "point and as many after it. Round it or leave it out."
        )
    return Multiple(int(text.rstrip("0")) * 10 ** max(0, power), max(0, -power))


def subschemas(schema: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The schemas right inside a schema; definitions are inside where they are referred to."""
    for key, value in schema.items():
        if key in DATA or key in DEFINITIONS or str(key).startswith("x-"):
            continue
        if isinstance(value, Mapping) and key not in NAMED:
            yield value
        elif isinstance(value, Mapping | list):
            inner = value.values() if isinstance(value, Mapping) else value
            yield from (one for one in inner if isinstance(one, Mapping))


def tool_functions(tools: Sequence[Mapping[str, Any]] | None) -> dict[str, Any]:
    """The parameters' schema of every tool by its name."""
    functions = {}
    for tool in tools or ():
        function = tool.get("function", tool)
        if isinstance(function, Mapping) and isinstance(function.get("name"), str):
            functions[function["name"]] = function.get("parameters")
    return functions


def is_tool_name(name: str, functions: Mapping[str, Any]) -> bool:
    """Whether a call may have this name: a tool's own, or one that a tool could have.

    A tool that was not offered is the client's to refuse; it tells the model so.
    """
    return name in functions or re.fullmatch(r"[\w.-]{1,128}", name) is not None


class Shape:
    """One place in a schema: every alternative that may describe the value there."""

    def __init__(self, schemas: Iterable[Any], root: Any) -> None:
        self._root = root
        self._alternatives = _flatten(list(schemas), root)
        self.types = self._find_types()

    @classmethod
    def of(cls, schema: Any) -> Shape:
        """The place of the whole value."""
        return cls([schema], schema)

    def names(self) -> set[str]:
        """The properties that an object has here, as far as they are declared."""
        found = (schema.get("properties") for schema in self._alternatives)
        return {name for names in found if isinstance(names, Mapping) for name in names}

    def property(self, name: str) -> Shape:
        """The place of an object's property."""
        found = []
        for schema in self._alternatives:
            properties = schema.get("properties")
            if isinstance(properties, Mapping) and name in properties:
                found.append(properties[name])
            else:
                found.append(schema.get("additionalProperties"))
        return Shape([schema for schema in found if isinstance(schema, Mapping)], self._root)

    def item(self, index: int) -> Shape:
        """The place of an array's item."""
        found = []
        for schema in self._alternatives:
            prefix = schema.get("prefixItems")
            if isinstance(prefix, list) and index < len(prefix):
                found.append(prefix[index])
            else:
                found.append(schema.get("items"))
        return Shape([schema for schema in found if isinstance(schema, Mapping)], self._root)

    def _find_types(self) -> frozenset[str] | None:
        types: set[str] = set()
        for schema in self._alternatives:
            named = _types_of(schema)
            if not named:
                return None  # one alternative takes anything
            types |= named
        return frozenset(types) or None


def _types_of(schema: Mapping[str, Any]) -> set[str]:
    kind = schema.get("type")
    named = {kind} if isinstance(kind, str) else set()
    if isinstance(kind, list):
        named = {name for name in kind if isinstance(name, str)}
    elif kind is None:
        values = schema.get("enum") if "enum" in schema else [schema.get("const")]
        if ("enum" in schema or "const" in schema) and isinstance(values, list):
            named = {_JSON_TYPES.get(type(value), "object") for value in values}
    named = {name.lower() for name in named}
    if named and schema.get("nullable") is True:
        named.add("null")
    return named


def _flatten(waiting: list[Any], root: Any) -> list[Mapping[str, Any]]:
    """The schemas behind references and combinations; a combining one is not one itself."""
    found: list[Mapping[str, Any]] = []
    seen: set[str] = set()
    while waiting and len(found) < _MAX_ALTERNATIVES:
        schema = waiting.pop(0)
        if not isinstance(schema, Mapping):
            continue
        reference = schema.get("$ref")
        if isinstance(reference, str):
            if reference not in seen:
                seen.add(reference)
                waiting.append(find_reference(root, reference))
            continue
        parts = [
            part
            for name in ("anyOf", "oneOf", "allOf")
            if isinstance(schema.get(name), list)
            for part in schema[name]
        ]
        waiting += parts[:_MAX_ALTERNATIVES]
        if not parts or "type" in schema or "properties" in schema:
            found.append(schema)
    return found


def find_reference(root: Any, reference: str) -> Any:
    """The schema a reference inside the same document names; None where there is none."""
    if not reference.startswith("#"):
        return None
    place = root
    for part in reference[1:].split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if not isinstance(place, Mapping) or name not in place:
            return None
        place = place[name]
    return place
