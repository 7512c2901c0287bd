"""A tool's JSON schema as grammar rules for the arguments of a Gemma 4 call.

The rules take values that the schema allows, not all of them: keys stand in declared order, an
object with declared properties has no others, and oneOf is read as anyOf. What a grammar cannot
say is refused by name; annotations such as format are passed over.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from flashdraft.chat.schema import find_reference
from flashdraft.chat.schema_pattern import full_pattern
from flashdraft.errors import RequestError

_MAX_DEPTH = 64
_NOTES = {
    *("title", "description", "default", "example", "examples", "format", "type", "nullable"),
    *("$schema", "$id", "$comment", "$defs", "definitions"),
    *("deprecated", "readOnly", "writeOnly", "strict"),
}
_KEYWORDS = {
    "string": {"minLength", "maxLength", "pattern"},
    "integer": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"},
    "number": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"},
    "object": {"properties", "required", "additionalProperties"},
    "array": {"items", "minItems", "maxItems"},
    "boolean": set[str](),
    "null": set[str](),
}
_KEY = re.compile(r'[^:,{}\[\]"]+')  # names that can stand without quotes
_TERMINALS = {
    "INTEGER": r"/-?(0|[1-9][0-9]*)/",
    "NUMBER": r"/-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?/",
    "KEY": r"/[A-Za-z_][A-Za-z0-9_.\-]*/",
    "STRING": r"/(?s:.+)/",
}


class GemmaRules:
    """Grammar rules under construction; `text` has them all."""

    def __init__(self, quote: str) -> None:
        """`quote` is the quote token in the grammar's syntax."""
        self._quote = quote
        self._rules: list[str] = []
        self._references: dict[str, str] = {}  # of the schema at hand: reference -> rule
        self._generic: str | None = None
        self._root: Any = None

    def arguments(self, name: str, schema: Any) -> str:
        """The rule of a tool's arguments; no schema means any arguments."""
        self._references, self._root = {}, schema
        if schema is None or schema is True or schema == {}:
            return self._any_object()
        where = f"the parameters of the tool {name!r}"
        if not isinstance(schema, Mapping):
            raise RequestError(f"{where} are {schema!r:.60}; they must be a JSON schema.")
        if schema.get("type", "object") != "object":
            raise RequestError(
                f"{where} have the type {schema['type']!r:.60}; it must be 'object'."
            )
        return self._value(schema, where, 0)

    def text(self) -> str:
        terminals = [f"{name}: {body}" for name, body in _TERMINALS.items()]
        return "\n".join([*self._rules, *terminals])

    def _rule(self, body: str) -> str:
        name = f"v{len(self._rules)}"
        self._rules.append(f"{name}: {body}")
        return name

    def _value(self, schema: Any, where: str, depth: int) -> str:
        if schema is True or schema == {} or schema is None:
            return self._any()
        if not isinstance(schema, Mapping):
            raise RequestError(f"{where}: {schema!r:.60} is no schema that a call can follow.")
        if depth > _MAX_DEPTH:
            raise RequestError(f"{where} is nested more than {_MAX_DEPTH} levels deep.")
        if "$ref" in schema:
            _refuse_others(schema, {"$ref"}, where)
            return self._reference(schema["$ref"], where, depth)
        for name in ("anyOf", "oneOf", "allOf"):
            if name in schema:
                return self._combination(schema, name, where, depth)
        if "enum" in schema or "const" in schema:
            _refuse_others(schema, {"enum", "const"}, where)
            values = [schema["const"]] if "const" in schema else schema["enum"]
            if not isinstance(values, list) or not values:
                raise RequestError(f"{where}: enum must be a list that is not empty.")
            return self._rule(" | ".join(self._literal(value, where) for value in values))
        return self._typed(schema, where, depth)

    def _reference(self, reference: Any, where: str, depth: int) -> str:
        if reference in self._references:
            return self._references[reference]
        schema = find_reference(self._root, reference) if isinstance(reference, str) else None
        if schema is None:
            raise RequestError(f"{where}: $ref {reference!r:.60} leads nowhere in this schema.")
        # the name is known before the body is, so that a schema may contain itself
        name = self._references[reference] = self._rule("")
        place = len(self._rules) - 1
        self._rules[place] = f"{name}: {self._value(schema, where, depth + 1)}"
        return name

    def _combination(self, schema: Mapping[str, Any], name: str, where: str, depth: int) -> str:
        _refuse_others(schema, {name}, where)
        parts = schema[name]
        if not isinstance(parts, list) or not parts:
            raise RequestError(f"{where}: {name} must be a list that is not empty.")
        if name == "allOf" and len(parts) > 1:
            raise RequestError(
                f"{where} uses allOf with {len(parts)} schemas, which a call cannot follow; "
                "merge them into one."
            )
        rules = [self._value(part, where, depth + 1) for part in parts]
        return self._rule(" | ".join(rules + self._null_if(schema)))

    def _null_if(self, schema: Mapping[str, Any]) -> list[str]:
        return ['"null"'] if schema.get("nullable") is True else []

    def _typed(self, schema: Mapping[str, Any], where: str, depth: int) -> str:
        types = schema.get("type")
        if types is None:
            types = [kind for kind in ("object", "array") if _KEYWORDS[kind] & schema.keys()]
            if not types:
                _refuse_others(schema, set(), where)
                return self._any()
        types = types if isinstance(types, list) else [types]
        known_types = [t for t in types if isinstance(t, str) and t in _KEYWORDS]
        if not types or known_types != types:
            known = ", ".join(_KEYWORDS)
            raise RequestError(f"{where} has the type {types!r:.60}; known are {known}.")
        _refuse_others(schema, set().union(*(_KEYWORDS[kind] for kind in types)), where)
        rules = [self._of_type(kind, schema, where, depth) for kind in types]
        return self._rule(" | ".join(rules + self._null_if(schema)))

    def _of_type(self, kind: str, schema: Mapping[str, Any], where: str, depth: int) -> str:
        match kind:
            case "string":
                return self._string(schema, where)
            case "integer" | "number":
                limits = {k: schema[k] for k in sorted(_KEYWORDS[kind]) if k in schema}
                if not limits:
                    return kind.upper()
                return self._rule(f"%json {json.dumps({'type': kind, **limits})}")
            case "boolean":
                return '"true" | "false"'
            case "null":
                return '"null"'
            case "array":
                return self._array(schema, where, depth)
            case _:
                return self._object(schema, where, depth)

    def _string(self, schema: Mapping[str, Any], where: str) -> str:
        least, most = _counts(schema, "minLength", "maxLength", where)
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
        name = f"STRING_{len(self._rules)}"
        self._rules.append(f"{name}: {' & '.join(terms)}")
        return f"{self._quote} {name}{'?' if may_be_empty else ''} {self._quote}"

    def _array(self, schema: Mapping[str, Any], where: str, depth: int) -> str:
        least, most = _counts(schema, "minItems", "maxItems", where)
        item = self._value(schema.get("items"), f"{where}, items", depth + 1)
        if most == 0:
            return '"[" "]"'
        more = f"{{{max(least - 1, 0)},{'' if most is None else most - 1}}}"
        items = item if most == 1 else f'{item} ("," {item}){more}'
        return f'"[" ({items}){"?" if least == 0 else ""} "]"'

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
            return self._map(
                not has_none and schema.get("additionalProperties", True), where, depth
            )
        # after[i]: the pairs from i on, where others stand before them; first[i]: where none does
        after = first = '""'
        for name in reversed(properties):
            value = self._value(properties[name], f"{where}, {name!r:.60}", depth + 1)
            pair = f"{_literal_text(_key(name, where) + ':')} {value}"
            if name in required:
                first = self._rule(f"{pair} {after}")
                after = self._rule(f'"," {pair} {after}')
            else:
                first = self._rule(f"{pair} {after} | {first}")
                after = self._rule(f'("," {pair})? {after}')
        return f'"{{" {first} "}}"'

    def _map(self, schema: Any, where: str, depth: int) -> str:
        if schema is False:
            return '"{" "}"'
        value = self._value(schema, f"{where}, additionalProperties", depth + 1)
        pair = self._rule(f'KEY ":" {value}')
        return f'"{{" ({pair} ("," {pair})*)? "}}"'

    def _any(self) -> str:
        """The rule of a value of any type."""
        if self._generic is None:
            name = self._generic = self._rule("")
            place = len(self._rules) - 1
            pair = self._rule(f'KEY ":" {name}')
            self._rules[place] = (
                f'{name}: NUMBER | "true" | "false" | "null" | {self._quote} STRING? {self._quote}'
                f' | "[" ({name} ("," {name})*)? "]" | "{{" ({pair} ("," {pair})*)? "}}"'
            )
        return self._generic

    def _any_object(self) -> str:
        return self._rule(self._map(True, "", 0))

    def _literal(self, value: Any, where: str) -> str:
        """One definite value in Gemma's syntax."""
        if isinstance(value, str):
            return f"{self._quote} {_literal_text(value) if value else ''} {self._quote}"
        if isinstance(value, Mapping):
            pairs = [
                f"{_literal_text(_key(key, where) + ':')} {self._literal(inner, where)}"
                for key, inner in value.items()
            ]
            return ' "," '.join(pairs).join(('"{" ', ' "}"'))
        if isinstance(value, Sequence):
            return ' "," '.join(self._literal(inner, where) for inner in value).join(
                ('"[" ', ' "]"')
            )
        return _literal_text(json.dumps(value))


def _refuse_others(schema: Mapping[str, Any], known: set[str], where: str) -> None:
    others = schema.keys() - known - _NOTES
    others = {name for name in others if not str(name).startswith("x-")}
    if others:
        raise RequestError(
            f"{where} uses {', '.join(sorted(map(str, others)))}, which the grammar of a call "
            "cannot follow here; leave it out, or do not force the call (tool_choice, strict)."
        )


def _counts(schema: Mapping[str, Any], low: str, high: str, where: str) -> tuple[int, int | None]:
    least, most = schema.get(low, 0), schema.get(high)
    for name, value in ((low, least), (high, 0 if most is None else most)):
        if type(value) is not int or not 0 <= value <= 1_000_000:
            raise RequestError(f"{where}: {name} is {value!r:.60}; it must be from 0 to 1000000.")
    if most is not None and least > most:
        raise RequestError(f"{where}: {low} {least} is more than {high} {most}.")
    return least, most


def _key(name: Any, where: str) -> str:
    if not isinstance(name, str) or name != name.strip() or not _KEY.fullmatch(name):
        raise RequestError(
            f"{where} has the property {name!r:.60}; Gemma writes names without quotes, so a name "
            "cannot have brackets, quotes, commas, colons or white space around it."
        )
    return name


def _literal_text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
