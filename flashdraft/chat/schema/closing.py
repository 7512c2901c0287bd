"""Where an object ends: one that declares `properties` has no others, unless its schema says so.

JSON Schema lets every object have further properties. A model that may go on does, often until its
tokens are used up, and those who write schemas rarely mean it; llama.cpp and xgrammar end such
objects too. What is decided here is written into the schema as `additionalProperties`, so nobody
else need know the rule.

Schemas that describe one object together (allOf, or anyOf, oneOf and $ref beside other words) stay
open: each of them closed, they would exclude each other. Inside them the rule holds again, except
where two of them, or two words of one, may describe the same property.

A schema with a word that llguidance refuses is left as it is: it is refused, open or closed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from functools import cached_property
from typing import Any, NamedTuple

from flashdraft.chat.schema.reading import DATA, DEFINITIONS, NAMED, find_reference
from flashdraft.errors import RequestError
from flashdraft.text.exact_json import levels

MAX_VISITS = 10_000  # of schemas and names, however often they are referred to: some 30 ms
_VALUES_PER_VISIT = 4  # of a copy: a long list costs too, though no schema is in it
_BRANCHES = ("allOf", "anyOf", "oneOf")  # what is in them describes the value itself
_ITEMS = {"items", "prefixItems", "additionalItems"}
_VALUES = {"const", "enum"}  # which say all of a value, whatever is inside
_OPENING = {"additionalProperties", "patternProperties", *_VALUES}  # they say what else there is
_OWN = {*_OPENING, *_ITEMS, "properties", "required", "minProperties", "maxProperties"}
_MERGING = {*_BRANCHES, "$ref"}
_DESCRIBING = {*_OWN, *_MERGING}
_REFUSED = {
    *("if", "then", "else", "not", "dependentSchemas", "dependencies", "dependentRequired"),
    *("contains", "propertyNames", "unevaluatedProperties", "unevaluatedItems"),
    *("$dynamicRef", "$recursiveRef"),
}
_SCALARS = {"string", "integer", "number", "boolean", "null"}


def close_objects(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema with `additionalProperties: false` wherever an object ends after its properties.

    Raises RequestError where combined schemas refer to each other too often.
    """
    return _Closing(schema).closed()


def open_objects(schema: Any) -> Any:
    """The schema with `additionalProperties: true` where it does not say: no object is closed."""
    if not isinstance(schema, Mapping):
        return schema
    made = with_inner(schema, lambda _, inner: open_objects(inner))
    return {"additionalProperties": True, **made} if "properties" in made else made


class _Place(Enum):
    """What becomes of the objects at a place."""

    CLOSED = 1
    MERGED = 2  # other schemas describe this object too: it stays open, those inside are closed
    KEPT = 3  # others may describe those inside as well: all stay as they are


_DEFINED = dict.fromkeys(DEFINITIONS, _Place.CLOSED)


class _Own(NamedTuple):
    """What one of several merged schemas brings along."""

    places: list[str]  # inside, that others may describe too
    is_everywhere: bool  # it may describe any place
    merged: list[Mapping[str, Any]]  # those that describe the same value


class _Closing:
    """One schema. What is merged somewhere by reference gets a version of its own for that."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._num_visits = 0
        self._versions: dict[tuple[int, _Place], str] = {}  # names, by the id of the schema
        self._waiting: list[tuple[str, Mapping[str, Any], _Place]] = []
        self._owns: dict[int, _Own] = {}  # by the id of the schema
        self._is_left = False  # it has a word that is refused, or a merged reference to nowhere
        self._has_identifiers = False  # to which references are relative: no copy would do

    def closed(self) -> Mapping[str, Any]:
        made = self._value(self._root, _Place.CLOSED)
        versions = {}
        while self._waiting:
            name, schema, place = self._waiting.pop()
            own = {key: value for key, value in schema.items() if key not in DEFINITIONS}
            self._visit(sum(map(len, levels(own))) // _VALUES_PER_VISIT)
            versions[name] = self._value(own, place)
        if self._is_left or (versions and self._has_identifiers):
            return self._root
        return {**made, "$defs": {**made.get("$defs", {}), **versions}} if versions else made

    def _value(self, schema: Any, place: _Place) -> Any:
        if not isinstance(schema, Mapping):
            return schema
        self._visit(1)
        self._is_left |= not _REFUSED.isdisjoint(schema)
        is_root = schema is self._root
        self._has_identifiers |= not is_root and ("$id" in schema or "$anchor" in schema)
        ends = place is _Place.CLOSED and _ends(schema)
        if place is _Place.CLOSED and _is_merged(schema):
            place = _Place.KEPT if self._overlap(schema) else _Place.MERGED
        is_kept = place is _Place.KEPT or _describes_twice(schema)
        inside = _Place.KEPT if is_kept else _Place.CLOSED
        places = {**_DEFINED, "allOf": place, "anyOf": place, "oneOf": place}
        made = with_inner(schema, lambda key, inner: self._value(inner, places.get(key, inside)))
        if place is not _Place.CLOSED and "$ref" in schema:
            made["$ref"] = self._version(schema["$ref"], place)
        return {**made, "additionalProperties": False} if ends else made

    def _version(self, reference: Any, place: _Place) -> Any:
        """A reference to the version of a schema for a place that is not closed."""
        schema = self._find(reference)
        if schema is None or not isinstance(self._root.get("$defs", {}), Mapping):
            self._is_left = True
            return reference
        key = id(schema), place
        if key not in self._versions:
            self._versions[key] = f"{self._prefix}{len(self._versions)}"
            self._waiting.append((self._versions[key], schema, place))
        return f"#/$defs/{self._versions[key]}"

    @cached_property
    def _prefix(self) -> str:
        """What no definition's name begins with."""
        prefix = "merged"
        while any(str(name).startswith(prefix) for name in self._root.get("$defs", ())):
            prefix += "_"
        return prefix

    def _find(self, reference: Any) -> Mapping[str, Any] | None:
        is_pointer = isinstance(reference, str) and (reference == "#" or reference[:2] == "#/")
        schema = find_reference(self._root, reference) if is_pointer else None
        return schema if isinstance(schema, Mapping) else None

    def _overlap(self, schema: Mapping[str, Any]) -> bool:
        """Whether merged schemas may describe one property, or the items, together."""
        found, seen, waiting = set[str](), set[int](), [schema]
        while waiting:
            one = waiting.pop()
            if id(one) in seen:
                continue
            seen.add(id(one))
            own = self._own(one)
            self._visit(1 + len(own.places))
            if own.is_everywhere or not found.isdisjoint(own.places):
                return True
            found.update(own.places)
            waiting += own.merged
        return False

    def _own(self, schema: Mapping[str, Any]) -> _Own:
        """Found once: many others may be merged with one schema."""
        if id(schema) not in self._owns:
            properties, rest = schema.get("properties"), schema.get("additionalProperties")
            named = properties.items() if isinstance(properties, Mapping) else ()
            places = [f".{name}" for name, value in named if _may_hold_objects(value)]
            places += [] if _ITEMS.isdisjoint(schema) else ["[]"]
            has_patterns = "patternProperties" in schema
            is_everywhere = (
                has_patterns or isinstance(rest, Mapping) or not _VALUES.isdisjoint(schema)
            )
            target = self._find(schema.get("$ref"))
            merged = [*_parts(schema), *([] if target is None else [target])]
            self._owns[id(schema)] = _Own(places, is_everywhere, merged)
        return self._owns[id(schema)]

    def _visit(self, count: int) -> None:
        self._num_visits += count
        if self._num_visits > MAX_VISITS:
            raise RequestError(
                f"The schema has more than {MAX_VISITS} parts, what it combines (by allOf; by "
                "anyOf, oneOf or $ref beside others) counted every time; combine fewer of them."
            )


def with_inner(schema: Mapping[str, Any], change: Callable[[str, Any], Any]) -> dict[str, Any]:
    """A schema with what `change` makes of those right inside, by the word they stand in."""
    made: dict[str, Any] = {}
    for key, value in schema.items():
        if key in DATA or str(key).startswith("x-"):
            made[key] = value
        elif isinstance(value, Mapping) and (key in NAMED or key in DEFINITIONS):
            made[key] = {name: change(key, inner) for name, inner in value.items()}
        elif isinstance(value, list):
            made[key] = [change(key, inner) for inner in value]
        else:
            made[key] = change(key, value)
    return made


def _is_merged(schema: Mapping[str, Any]) -> bool:
    """Whether more than one schema describes the value here."""
    if _MERGING.isdisjoint(schema):
        return False
    together = schema.get("allOf")
    describing = [
        one
        for one in (together if isinstance(together, list) else ())
        if isinstance(one, Mapping) and not _DESCRIBING.isdisjoint(one)
    ]
    count = len(describing) + sum(name in schema for name in ("anyOf", "oneOf", "$ref"))
    count += not _OWN.isdisjoint(schema)
    return count > 1


def _describes_twice(schema: Mapping[str, Any]) -> bool:
    """Whether two words of one schema may describe the same object inside."""
    if "patternProperties" not in schema:
        return not _VALUES.isdisjoint(schema)
    declared = (schema.get(name) for name in ("properties", "patternProperties"))
    return not _VALUES.isdisjoint(schema) or all(
        isinstance(one, Mapping) and any(map(_may_hold_objects, one.values())) for one in declared
    )


def _ends(schema: Mapping[str, Any]) -> bool:
    """Whether the object ends after its properties: nothing here speaks of any other."""
    properties, least = schema.get("properties"), schema.get("minProperties", 0)
    if not isinstance(properties, Mapping) or "$ref" in schema or not _OPENING.isdisjoint(schema):
        return False
    if isinstance(least, int) and least > len(properties):
        return False
    parts = list(_parts(schema))
    if not all(_DESCRIBING & one.keys() <= {"properties", "required"} for one in parts):
        return False
    return all(name in properties for one in [schema, *parts] for name in _names(one))


def _names(schema: Mapping[str, Any]) -> Iterator[str]:
    """The properties that a schema speaks of."""
    for key in ("properties", "required"):
        names = schema.get(key)
        if isinstance(names, Mapping | list):
            yield from (name for name in names if isinstance(name, str))


def _parts(schema: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The schemas inside that describe the same value."""
    for key in _BRANCHES:
        value = schema.get(key)
        if isinstance(value, list):
            yield from (one for one in value if isinstance(one, Mapping))


def _may_hold_objects(schema: Any) -> bool:
    if not isinstance(schema, Mapping) or "const" in schema or "enum" in schema:
        return False
    kinds = schema.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    return not all(isinstance(kind, str) and kind in _SCALARS for kind in kinds)
