"""A JSON schema as Lark rules of llguidance's dialect, in whatever syntax values are written.

The rules take values that the schema allows, not all of them: keys stand in declared order, an
object with declared properties has no others, and oneOf is read as anyOf. Definite values are
written as the client wrote them, digit for digit. What a grammar cannot say is refused by name;
annotations such as format are passed over. How values are written is the syntax's business.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Protocol

from flashdraft.chat.schema.numbers import (
    BOUNDS,
    are_limits_kept,
    check_kept,
    integer_pattern,
    values_within,
)
from flashdraft.chat.schema.reading import find_reference
from flashdraft.errors import RequestError, quoted
from flashdraft.text.exact_json import ExactNumber, NegativeZero

_MAX_DEPTH = 64
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False)  # to make one takes time
_PASSED_OVER = {
    *("title", "description", "default", "example", "examples", "format", "type", "nullable"),
    *("$schema", "$id", "$comment", "$defs", "definitions"),
    *("deprecated", "readOnly", "writeOnly", "strict"),
}
KEYWORDS = {
    "string": {"minLength", "maxLength", "pattern"},
    "integer": {*BOUNDS, "multipleOf"},
    "number": {*BOUNDS, "multipleOf"},
    "object": {"properties", "required", "additionalProperties"},
    "array": {"items", "minItems", "maxItems"},
    "boolean": set[str](),
    "null": set[str](),
}


class Syntax(Protocol):
    """How values are written. All texts are pieces of Lark rules."""

    comma: str  # between two items
    gap: str  # white space that may stand inside brackets
    knows_nullable: bool
    remedy: str  # what helps, beside leaving it out, against a keyword that cannot be followed

    def whole(self, rules: SchemaRules, schema: Mapping[str, Any]) -> str | None:
        """A rule of the schema where it needs no rules from here."""
        ...

    def anything(self, rules: SchemaRules) -> str:
        """A value of any type."""
        ...

    def string(self, rules: SchemaRules, schema: Mapping[str, Any], where: str) -> str:
        """A string, by its length and pattern."""
        ...

    def number(self, rules: SchemaRules, schema: Mapping[str, Any]) -> str:
        """A number whose limits the library keeps."""
        ...

    def text(self, text: str) -> str:
        """One definite string."""
        ...

    def key(self, name: Any, where: str) -> str:
        """A property's name with the colon after it."""
        ...

    def any_key(self, rules: SchemaRules) -> str:
        """A name that nobody declared, with the colon after it."""
        ...


class SchemaRules:
    """Grammar rules under construction; `lines` has them all.

    No schema is written twice, however many references lead to it: the work grows with its size.
    """

    def __init__(self, syntax: Syntax, prefix: str = "v") -> None:
        """`prefix` begins the names of the rules."""
        self._syntax = syntax
        self._prefix = prefix
        self._rules: dict[int, str] = {}  # of schemas, by id, inside the one at hand
        self._open: dict[int, int | None] = {}  # those being written, with the place of their rule
        self.root: Any = None  # the schema at hand
        self.lines: list[str] = []

    def of(self, schema: Any, where: str) -> str:
        """The rule of a schema; `where` names it in messages."""
        self._rules, self._open, self.root = {}, {}, schema
        return self._value(schema, where, 0)

    def add(self, body: str) -> str:
        """A new rule; its name."""
        name = f"{self._prefix}{len(self.lines)}"
        self.lines.append(f"{name}: {body}")
        return name

    def reserve(self) -> tuple[str, int]:
        """The name of a rule that is written later, so that it may contain itself; its place."""
        return self.add(""), len(self.lines) - 1

    def _value(self, schema: Any, where: str, depth: int) -> str:
        if schema is True or schema == {} or schema is None:
            return self._syntax.anything(self)
        if not isinstance(schema, Mapping):
            raise RequestError(f"{where}: {schema!r:.60} is no schema that a grammar can follow.")
        key = id(schema)
        if key in self._open and key not in self._rules:  # it contains itself
            self._rules[key], self._open[key] = self.reserve()
        if key in self._rules:
            return self._rules[key]
        if depth > _MAX_DEPTH:
            raise RequestError(f"{where} is nested more than {_MAX_DEPTH} levels deep.")
        self._open[key] = None
        rule = self._new_value(schema, where, depth)
        place = self._open.pop(key)
        if place is None:
            self._rules[key] = rule
        else:
            self.lines[place] = f"{self._rules[key]}: {rule}"
        return self._rules[key]

    def _new_value(self, schema: Mapping[str, Any], where: str, depth: int) -> str:
        if "$ref" in schema and not other_words(schema, {"$ref"}):
            return self._reference(schema["$ref"], where, depth)
        whole = self._syntax.whole(self, schema)
        if whole is not None:
            return whole
        for name in ("$ref", "anyOf", "oneOf", "allOf"):
            if name in schema:
                return self._combination(schema, name, where, depth)
        if "enum" in schema or "const" in schema:
            return self._literals(schema, where)
        return self._typed(schema, where, depth)

    def _reference(self, reference: Any, where: str, depth: int) -> str:
        schema = find_reference(self.root, reference) if isinstance(reference, str) else None
        if schema is None:
            raise RequestError(f"{where}: $ref {reference!r:.60} leads nowhere in this schema.")
        return self._value(schema, where, depth + 1)

    def _combination(self, schema: Mapping[str, Any], name: str, where: str, depth: int) -> str:
        self._refuse_others(schema, {name}, where)
        parts = schema[name]
        if not isinstance(parts, list) or not parts:
            raise RequestError(f"{where}: {name} must be a list that is not empty.")
        if name == "allOf" and len(parts) > 1:
            raise RequestError(
                f"{where} uses allOf with {len(parts)} schemas, which a grammar cannot follow "
                f"here; merge them into one, {self._syntax.remedy}."
            )
        rules = [self._value(part, where, depth + 1) for part in parts]
        return self.add(" | ".join(rules + self._null_if(schema)))

    def _null_if(self, schema: Mapping[str, Any]) -> list[str]:
        is_nullable = self._syntax.knows_nullable and schema.get("nullable") is True
        return ['"null"'] if is_nullable else []

    def _literals(self, schema: Mapping[str, Any], where: str) -> str:
        name = "const" if "const" in schema else "enum"
        self._refuse_others(schema, {name, *BOUNDS}, where)
        values = [schema["const"]] if "const" in schema else schema["enum"]
        if not isinstance(values, list) or not values:
            raise RequestError(f"{where}: enum must be a list that is not empty.")
        nullable = {**schema, "type": None} if self._null_if(schema) else schema
        fitting = values_within(nullable, values)
        if not fitting:
            raise RequestError(f"{where}: {name} has no value of the type and bounds beside it.")
        return self.add(" | ".join(self._literal(value, where) for value in fitting))

    def _typed(self, schema: Mapping[str, Any], where: str, depth: int) -> str:
        types = schema.get("type")
        if types is None:
            check_kept(schema, where)
            types = [kind for kind in ("object", "array") if KEYWORDS[kind] & schema.keys()]
            if not types:
                self._refuse_others(schema, set(), where)
                return self._syntax.anything(self)
        types = types if isinstance(types, list) else [types]
        known_types = [t for t in types if isinstance(t, str) and t in KEYWORDS]
        if not types or known_types != types:
            known = ", ".join(KEYWORDS)
            raise RequestError(f"{where} has the type {types!r:.60}; known are {known}.")
        self._refuse_others(schema, set().union(*(KEYWORDS[kind] for kind in types)), where)
        rules = [self._of_type(kind, schema, where, depth) for kind in dict.fromkeys(types)]
        return self.add(" | ".join(rules + self._null_if(schema)))

    def _of_type(self, kind: str, schema: Mapping[str, Any], where: str, depth: int) -> str:
        of_kind = {name: schema[name] for name in sorted(KEYWORDS[kind]) if name in schema}
        match kind:
            case "string":
                return self._syntax.string(self, of_kind, where)
            case "integer" if not are_limits_kept(of_kind):
                return f"/{integer_pattern(of_kind, where)}/"
            case "integer" | "number":
                check_kept(of_kind, where)
                return self._syntax.number(self, {"type": kind, **of_kind})
            case "boolean":
                return '"true" | "false"'
            case "null":
                return '"null"'
            case "array":
                return self._array(schema, where, depth)
            case _:
                return self._object(schema, where, depth)

    def _array(self, schema: Mapping[str, Any], where: str, depth: int) -> str:
        syntax = self._syntax
        least, most = counts(schema, "minItems", "maxItems", where)
        item = self._value(schema.get("items"), f"{where}, items", depth + 1)
        if most == 0:
            return f'"[" {syntax.gap} "]"'
        more = f"{{{max(least - 1, 0)},{'' if most is None else most - 1}}}"
        items = item if most == 1 else f"{item} ({syntax.comma} {item}){more}"
        return f'"[" {syntax.gap} ({items} {syntax.gap}){"?" if least == 0 else ""} "]"'

    def _object(self, schema: Mapping[str, Any], where: str, depth: int) -> str:
        properties = schema.get("properties") or {}
        required = schema.get("required") or []
        is_list = isinstance(required, list) and all(isinstance(name, str) for name in required)
        if not isinstance(properties, Mapping) or not is_list:
            raise RequestError(
                f"{where}: properties must be an object and required a list of names."
            )
        missing = [name for name in required if name not in properties]
        if missing:
            raise RequestError(f"{where} requires {missing[0]!r:.60}, which it does not declare.")
        if not properties:
            has_none = "properties" in schema and "additionalProperties" not in schema
            return self.map(not has_none and schema.get("additionalProperties", True), where, depth)
        needed = set(required)
        # after[i]: the pairs from i on, where others stand before them; first[i]: where none does
        after = first = '""'
        comma = self._syntax.comma
        for name in reversed(properties):
            value = self._value(properties[name], f"{where}, {name!r:.60}", depth + 1)
            pair = f"{self._syntax.key(name, where)} {value}"
            if name in needed:
                first = self.add(f"{pair} {after}")
                after = self.add(f"{comma} {pair} {after}")
            else:
                first = self.add(f"{pair} {after} | {first}")
                after = self.add(f"({comma} {pair})? {after}")
        return f'"{{" {self._syntax.gap} {first} {self._syntax.gap} "}}"'

    def map(self, schema: Any, where: str, depth: int) -> str:
        """An object of any names; False for its values means that it has none."""
        syntax = self._syntax
        if schema is False:
            return f'"{{" {syntax.gap} "}}"'
        value = self._value(schema, f"{where}, additionalProperties", depth + 1)
        pair = self.add(f"{syntax.any_key(self)} {value}")
        return f'"{{" {syntax.gap} ({pair} ({syntax.comma} {pair})* {syntax.gap})? "}}"'

    def _refuse_others(self, schema: Mapping[str, Any], known: set[str], where: str) -> None:
        others = other_words(schema, known)
        if others:
            raise RequestError(
                f"{where} uses {', '.join(others)}, which a grammar cannot follow here; leave it "
                f"out, {self._syntax.remedy}."
            )

    def _literal(self, value: Any, where: str) -> str:
        """One definite value."""
        syntax = self._syntax
        if isinstance(value, str):
            return syntax.text(value)
        if isinstance(value, Mapping):
            pairs = [
                f"{syntax.key(key, where)} {self._literal(inner, where)}"
                for key, inner in value.items()
            ]
            inside = f" {syntax.comma} ".join(pairs)
            return f'"{{" {syntax.gap} {inside} {syntax.gap if pairs else ""} "}}"'
        if isinstance(value, list | tuple):
            inside = f" {syntax.comma} ".join(self._literal(inner, where) for inner in value)
            return f'"[" {syntax.gap} {inside} {syntax.gap if value else ""} "]"'
        return lark_text(_scalar(value))


def lark_text(text: str) -> str:
    """A definite text in a Lark rule."""
    if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
        raise RequestError(
            f"The text {quoted(text)} holds half of a surrogate pair, which is no character; "
            "leave it out."
        )
    # DEL is the one control character that JSON leaves as it is and Lark does not take
    return _ENCODER.encode(text).replace("\x7f", "\\u007f")


def _scalar(value: Any) -> str:
    return value.text if isinstance(value, ExactNumber | NegativeZero) else _ENCODER.encode(value)


def counts(schema: Mapping[str, Any], low: str, high: str, where: str) -> tuple[int, int | None]:
    """The least and the most of what is counted."""
    least, most = schema.get(low, 0), schema.get(high)
    for name, value in ((low, least), (high, 0 if most is None else most)):
        if type(value) is not int or not 0 <= value <= 1_000_000:
            raise RequestError(f"{where}: {name} is {value!r:.60}; it must be from 0 to 1000000.")
    if most is not None and least > most:
        raise RequestError(f"{where}: {low} {least} is more than {high} {most}.")
    return least, most


def other_words(schema: Mapping[str, Any], known: set[str]) -> list[str]:
    """The words of a schema that bind its values, beside those that are known."""
    others = map(str, schema.keys() - known - _PASSED_OVER)
    return sorted(name for name in others if not name.startswith("x-"))
