"""JSON by a schema, as the body of a Lark rule in which every number is the client's own.

Objects end where closing.py says. A schema whose numbers llguidance keeps is left to it whole. Of
any other one, only the way to the numbers it would change is written as rules here; what stands
beside is left to it part by part.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from flashdraft.chat.schema.closing import close_objects
from flashdraft.chat.schema.numbers import (
    are_all_limits_kept,
    are_limits_kept,
    check_kept,
    is_literal_kept,
    is_value_kept,
)
from flashdraft.chat.schema.reading import DATA, DEFINITIONS, NAMED, find_reference, subschemas
from flashdraft.chat.schema.rules import SchemaRules, lark_text
from flashdraft.errors import RequestError
from flashdraft.text.exact_json import write

SCHEMA_MARK = "%json "  # before a schema that is left to llguidance
MAX_PARTS = 1024 * 1024  # characters of what is left to llguidance, all parts together
_UNBINDING = {"title", "description", "$comment", "default", "example", "examples"}
_Place = tuple[str, str]  # of a definition: what holds it, and its name
# White space is one space or a new line with an indent: a weak model would go on with spaces for
# ever if it could.
_WHITE_SPACE = r"\x20|\x0A(\x20{0,24}|\x09{0,8})"
# Qwen's templates print JSON like this; the fixed form is also what drafts guess best.
FIXED: dict[str, Any] = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}
FREE: Any = {
    "whitespace_pattern": _WHITE_SPACE,
    "lenient": False,
    "coerce_one_of": True,
}


class JsonGrammar:
    """Rules of JSON values by their schemas, in one style of white space: FIXED or FREE."""

    def __init__(self, style: Mapping[str, Any], prefix: str = "json") -> None:
        """`prefix` begins the names of the rules."""
        self._style = style
        self._prefix = prefix
        self._num_bodies = 0
        self._num_characters = 0  # of the parts of all bodies
        self.lines: list[str] = []  # the rules that the bodies refer to

    def body(self, schema: Mapping[str, Any], where: str = "the schema") -> str:
        """The body of a schema's rule. RequestError where its numbers cannot be kept.

        Without `lines`, in the style FREE, it is a schema after SCHEMA_MARK.
        """
        schema = close_objects(schema)
        if is_literal_kept(schema) and are_all_limits_kept(schema):
            return _part(schema, self._style)
        syntax = _JsonSyntax(self._style, schema, self._num_characters)
        rules = SchemaRules(syntax, f"{self._prefix}{self._num_bodies}_")
        try:
            body = rules.of(schema, where)
        except RequestError:
            if not is_value_kept(schema):
                raise
            return _part(schema, self._style)  # the same numbers, written in another way
        if not self.lines and self._style is not FIXED:
            self.lines.append(f"WHITE_SPACE: /{_WHITE_SPACE}/")
        self.lines += rules.lines
        self._num_bodies += 1
        self._num_characters = syntax.num_characters
        return body


def _part(schema: Mapping[str, Any], style: Mapping[str, Any]) -> str:
    # what a schema says of its own of such options does not count
    return SCHEMA_MARK + write({**schema, "x-guidance": style}, ensure_ascii=True)


class _JsonSyntax:
    """JSON's `Syntax`: what has no number that would change is a part of its own."""

    knows_nullable = False
    remedy = "or have no number in this schema that a 64-bit float does not hold"

    def __init__(
        self, style: Mapping[str, Any], root: Mapping[str, Any], num_characters: int
    ) -> None:
        """`num_characters` are those of parts before this schema's; they share one limit."""
        self._style, self._root = style, root
        is_fixed = style is FIXED
        self.gap = "" if is_fixed else "WHITE_SPACE?"
        self.comma = '", "' if is_fixed else 'WHITE_SPACE? "," WHITE_SPACE?'
        self._colon = '": "' if is_fixed else 'WHITE_SPACE? ":" WHITE_SPACE?'
        self._parts: dict[str, str] = {}  # the rule of each, by its text without definitions
        self._definitions: dict[_Place, tuple[str, list[_Place]]] = {}
        self._kept = _find_kept(root)
        self.num_characters = num_characters

    def whole(self, rules: SchemaRules, schema: Mapping[str, Any]) -> str | None:
        return self._add_part(rules, schema) if id(schema) in self._kept else None

    def anything(self, rules: SchemaRules) -> str:
        return self._parts.get("{}") or self._add_part(rules, {})

    def string(self, rules: SchemaRules, schema: Mapping[str, Any], where: str) -> str:
        check_kept(schema, where)
        return self._add_part(rules, {"type": "string", **schema})

    def number(self, rules: SchemaRules, schema: Mapping[str, Any]) -> str:
        return self._add_part(rules, schema)

    def text(self, text: str) -> str:
        return lark_text(json.dumps(text, ensure_ascii=False))

    def key(self, name: Any, where: str) -> str:
        return f"{self.text(str(name))} {self._colon}"

    def any_key(self, rules: SchemaRules) -> str:
        return f"{self._add_part(rules, {'type': 'string'})} {self._colon}"

    def _add_part(self, rules: SchemaRules, schema: Mapping[str, Any]) -> str:
        own = write(_without_notes(schema), ensure_ascii=True)
        if own not in self._parts:
            text = self._with_definitions(own, schema)
            self.num_characters += len(text)
            if self.num_characters > MAX_PARTS:
                raise RequestError(
                    f"The parts of the schema have more than {MAX_PARTS} characters together, each "
                    "with the definitions that it refers to; make the schema shorter."
                )
            self._parts[own] = rules.add(text)
        return self._parts[own]

    def _with_definitions(self, own: str, schema: Mapping[str, Any]) -> str:
        """A part of the schema as a whole one, with all definitions that it comes to."""
        texts: dict[_Place, str] = {}
        waiting = self._places(schema)
        while waiting:
            place = waiting.pop()
            if place not in texts:
                texts[place], places = self._definition(place)
                waiting += places
        members = [own[1:-1]] if own != "{}" else []
        for container in DEFINITIONS:
            held = [f"{json.dumps(name)}: {texts[c, name]}" for c, name in texts if c == container]
            members += [f'"{container}": {{{", ".join(held)}}}'] if held else []
        members.append(f'"x-guidance": {json.dumps(self._style)}')
        return f"{SCHEMA_MARK}{{{', '.join(members)}}}"

    def _definition(self, place: _Place) -> tuple[str, list[_Place]]:
        """The text of a definition, and those that it refers to itself."""
        if place not in self._definitions:
            container, name = place
            schema = self._root[container][name]
            text = write(_without_notes(schema), ensure_ascii=True)
            self._definitions[place] = text, self._places(schema)
        return self._definitions[place]

    def _places(self, schema: Mapping[str, Any]) -> list[_Place]:
        """The definitions that a schema refers to."""
        found: dict[_Place, None] = {}
        waiting = [schema]
        while waiting:
            one = waiting.pop()
            waiting += subschemas(one)
            reference = one.get("$ref")
            if not isinstance(reference, str):
                continue
            head, container, name = [*reference.split("/"), "", ""][:3]
            target = find_reference(self._root, f"#/{container}/{name}")
            if head != "#" or container not in DEFINITIONS or not isinstance(target, Mapping):
                raise RequestError(
                    f"$ref {reference!r:.60} leads to none of the schema's $defs; beside numbers "
                    "that must be kept exactly, references can only name those."
                )
            found[container, name.replace("~1", "/").replace("~0", "~")] = None
        return list(found)


def _find_kept(root: Mapping[str, Any]) -> set[int]:
    """The schemas, by id, in which nothing would change, nor in what they refer to."""
    users: dict[int, list[int]] = {id(root): []}
    waiting, lost = [root], []
    while waiting:
        one = waiting.pop()
        literals = [one[name] for name in ("const", "enum") if name in one]
        if not are_limits_kept(one) or (literals and not is_literal_kept(literals)):
            lost.append(id(one))
        reference = one.get("$ref")
        target = find_reference(root, reference) if isinstance(reference, str) else None
        for inner in [*subschemas(one), *([target] if isinstance(target, Mapping) else [])]:
            if id(inner) not in users:
                users[id(inner)] = []
                waiting.append(inner)
            users[id(inner)].append(id(one))
    kept = set(users)
    while lost:
        changed = lost.pop()
        if changed in kept:
            kept.remove(changed)
            lost += users[changed]
    return kept


def _without_notes(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A schema without definitions, and without values that bind nobody and may be any number."""
    made: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _UNBINDING or key in DEFINITIONS or str(key).startswith("x-"):
            continue
        if key in DATA:
            made[key] = value
        elif key in NAMED and isinstance(value, Mapping):
            made[key] = {
                name: _without_notes(one) if isinstance(one, Mapping) else one
                for name, one in value.items()
            }
        elif isinstance(value, Mapping):
            made[key] = _without_notes(value)
        elif isinstance(value, list):
            made[key] = [_without_notes(one) if isinstance(one, Mapping) else one for one in value]
        else:
            made[key] = value
    return made
