"""One parameter's value where values stand bare, as a grammar: strings as they are, the rest JSON.

The reader (answers/parameter.py) tells types by the schema and the text alone. So a string is not
let through that it would take for another type, or in which it would find the value's end.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from flashdraft.chat.answers.parameter import SPELLED
from flashdraft.chat.schema.json_rule import FIXED, JsonGrammar
from flashdraft.chat.schema.numbers import BOUNDS, integer_pattern, values_within
from flashdraft.chat.schema.pattern import full_pattern
from flashdraft.chat.schema.reading import DEFINITIONS, Shape, find_reference, subschemas
from flashdraft.chat.schema.rules import KEYWORDS, counts, lark_text, other_words
from flashdraft.errors import RequestError, quoted
from flashdraft.text.exact_json import write

REMEDY = "or do not force the call (tool_choice, strict)"
_END = "\n</parameter>"
_END_PATTERN = r"\n<\/parameter>"
# A text behind which the value goes on although the reader may end it there.
_ENDS_EARLY = (
    r"(?s:.*)(?:<\/parameter>|<parameter=|<\/(?:function|tool_call)>[ \t\r\n]*<\/?tool_call>)"
    r"(?s:.+)"
)
_LIMITED = "number with limits"
_UNLIKE = {**SPELLED, _LIMITED: r"[\-0-9](?s:.*)"}  # what no string is where the type is allowed
_COMBINING = ("anyOf", "oneOf", "allOf")
_MAX_ALTERNATIVES = 64


class ParameterRules:
    """Rules of values under construction, each with the tag that ends it."""

    def __init__(self) -> None:
        self._json = JsonGrammar(FIXED)
        self._texts: dict[str, str] = {}  # rules of free texts, by their pattern
        self._rules: list[str] = []
        self.free_text = self._text(["/(?s:.*)" + _END_PATTERN + "/"], frozenset())

    @property
    def lines(self) -> list[str]:
        return [*self._rules, *self._json.lines]

    def value(self, schema: Any, root: Mapping[str, Any], where: str) -> str:
        """The rule of a value; `root` is the schema that references in it are relative to."""
        if schema is True or schema is None:
            return self.free_text
        if not isinstance(schema, Mapping):
            raise RequestError(f"{where}: {schema!r:.60} is no schema that a grammar can follow.")
        types = Shape([schema], root).types
        if types is not None and "string" not in types:
            return self._json_value(schema, root, where)
        others = (types or frozenset()) - {"string"}
        alternatives = _alternatives(schema, root, where)
        if others and any(map(_is_limited_number, alternatives)):
            others |= {_LIMITED}
        rules: dict[str, None] = {}
        for one in alternatives:
            for rule in self._alternative(one, root, others, where):
                rules[rule] = None
        if not rules:
            raise RequestError(f"{where} has no value: its references or values lead nowhere.")
        return " | ".join(rules)

    def _alternative(
        self, schema: Mapping[str, Any], root: Mapping[str, Any], others: frozenset[str], where: str
    ) -> Iterator[str]:
        """`others` are the types, beside strings, that the reader will take a text for."""
        if "enum" in schema or "const" in schema:
            yield from self._literals(schema, root, others, where)
            return
        kind = schema.get("type")
        if kind not in (None, "string"):
            if others:  # else all is read as a string, and one of another alternative is right
                yield self._beside_strings(schema, root, where)
            return
        unknown = other_words(schema, KEYWORDS["string"])
        _refuse(unknown if kind else [f"{word} without a type" for word in unknown], where)
        yield self._string(schema, others, where)
        if schema.get("nullable") is True and "null" in others:
            yield lark_text("null" + _END)

    def _beside_strings(
        self, schema: Mapping[str, Any], root: Mapping[str, Any], where: str
    ) -> str:
        """A value that is no string where strings are allowed too.

        The library finds the longest match and does not go back. So a value is one match with its
        end tag, as a string is; or it begins as no string does.
        """
        kind = schema["type"]
        if kind in ("object", "array"):
            return self._json_value(schema, root, where)
        _refuse(other_words(schema, KEYWORDS[kind]), where)
        if _is_limited_number(schema):
            return self._json_value(schema, root, where)
        if kind == "integer":
            return f"/{integer_pattern(schema, where)}{_END_PATTERN}/"
        if kind == "number":
            return f"/(?:{SPELLED[kind]}){_END_PATTERN}/"
        words = ("null",) if kind == "null" else ("true", "false")
        return " | ".join(lark_text(word + _END) for word in words)

    def _literals(
        self, schema: Mapping[str, Any], root: Mapping[str, Any], others: frozenset[str], where: str
    ) -> Iterator[str]:
        name = "const" if "const" in schema else "enum"
        unknown = other_words(schema, {name, *BOUNDS})
        values = [schema["const"]] if name == "const" else schema["enum"]
        if unknown or not isinstance(values, list):
            raise RequestError(
                f"{where}: {name} must be a {'value' if name == 'const' else 'list'} without "
                f"{', '.join(unknown) or 'more'} beside it, {REMEDY}."
            )
        fitting = values_within(schema, values)
        if not fitting:
            raise RequestError(f"{where}: {name} has no value of the type and bounds beside it.")
        rest = []
        for value in fitting:
            if isinstance(value, str):
                _check_text(value, others, where)
                yield lark_text(value + _END)
            elif isinstance(value, Mapping | list):
                rest.append(value)
            elif others:
                yield lark_text(write(value) + _END)
        if rest and others:
            yield self._json_value({"enum": rest}, root, where)

    def _string(self, schema: Mapping[str, Any], others: frozenset[str], where: str) -> str:
        least, most = counts(schema, "minLength", "maxLength", where)
        patterns = []
        if "pattern" in schema:
            patterns.append(full_pattern(schema["pattern"], where)[0])
        if least or most is not None or not patterns:
            is_any = not least and most is None
            patterns.append(
                "(?s:.*)" if is_any else f"(?s:.{{{least},{'' if most is None else most}}})"
            )
        return self._text([f"/{pattern}{_END_PATTERN}/" for pattern in patterns], others)

    def _text(self, terms: list[str], others: frozenset[str]) -> str:
        """A rule of text up to the end tag."""
        unlike = [f"~/(?:{_UNLIKE[kind]}){_END_PATTERN}/" for kind in sorted(others & {*_UNLIKE})]
        pattern = " & ".join([*terms, f"~/{_ENDS_EARLY}/", *unlike])
        if pattern not in self._texts:
            name = f"text{len(self._texts)}"
            self._rules += [f"{name}[lazy]: {name.upper()}", f"{name.upper()}: {pattern}"]
            self._texts[pattern] = name
        return self._texts[pattern]

    def _json_value(self, schema: Mapping[str, Any], root: Mapping[str, Any], where: str) -> str:
        _check_references(schema, root, where)
        definitions = {name: root[name] for name in DEFINITIONS if name in root}
        name = f"value{len(self._rules)}"
        self._rules.append(f"{name}: {self._json.body({**schema, **definitions}, where)}")
        return f"{name} {lark_text(_END)}"


def _is_limited_number(schema: Mapping[str, Any]) -> bool:
    """Whether a number's limits are left to the library, which matches it without its end tag."""
    kind, limits = schema.get("type"), {*BOUNDS, "multipleOf"} & schema.keys()
    is_literal = "enum" in schema or "const" in schema
    return not is_literal and (
        (kind == "number" and bool(limits)) or (kind == "integer" and "multipleOf" in limits)
    )


def _alternatives(schema: Any, root: Any, where: str) -> list[Mapping[str, Any]]:
    """The schemas behind references, combinations and lists of types."""
    found: list[Mapping[str, Any]] = []
    waiting, seen = [schema], set[int]()
    while waiting:
        one = waiting.pop(0)
        if one is True:
            one = {}
        if not isinstance(one, Mapping):
            raise RequestError(f"{where}: {one!r:.60} is no schema that a grammar can follow.")
        if id(one) in seen:
            continue
        seen.add(id(one))
        if len(seen) > _MAX_ALTERNATIVES:
            raise RequestError(
                f"{where} has more than {_MAX_ALTERNATIVES} alternatives; leave some out, {REMEDY}."
            )
        waiting += _inner(one, root, where)
        if not any(word in one for word in ("$ref", *_COMBINING)):
            found += _by_type(one, where)
    return found


def _inner(schema: Mapping[str, Any], root: Any, where: str) -> list[Any]:
    """What a schema that says nothing itself leads to."""
    word = next((word for word in ("$ref", *_COMBINING) if word in schema), None)
    if word is None:
        return []
    unknown = [*other_words(schema, {word}), *({"type"} & schema.keys())]
    parts = schema[word]
    if unknown or (word == "allOf" and isinstance(parts, list) and len(parts) > 1):
        beside = f"{', '.join(unknown)} beside {word}" if unknown else "allOf with several schemas"
        raise RequestError(
            f"{where} uses {beside}, which a grammar cannot follow where the value may be a "
            f"string; merge them into one schema, {REMEDY}."
        )
    if word == "$ref":
        target = find_reference(root, parts) if isinstance(parts, str) else None
        if target is None:
            raise RequestError(f"{where}: $ref {parts!r:.60} leads nowhere in this schema.")
        return [target]
    if not isinstance(parts, list) or not parts:
        raise RequestError(f"{where}: {word} must be a list that is not empty.")
    return parts


def _by_type(schema: Mapping[str, Any], where: str) -> list[Mapping[str, Any]]:
    """A schema of several types as one for each."""
    kinds = schema.get("type")
    named = kinds if isinstance(kinds, list) else [] if kinds is None else [kinds]
    if not all(isinstance(kind, str) and kind in KEYWORDS for kind in named) or kinds == []:
        raise RequestError(f"{where} has the type {kinds!r:.60}; known are {', '.join(KEYWORDS)}.")
    if len(named) < 2 or "enum" in schema or "const" in schema:
        return [
            schema if not isinstance(kinds, list) or len(named) > 1 else _typed(schema, named[0])
        ]
    bound = set().union(*(KEYWORDS[kind] for kind in named))
    _refuse(other_words(schema, bound), where)
    return [
        {
            word: value
            for word, value in _typed(schema, kind).items()
            if word not in bound or word in KEYWORDS[kind]
        }
        for kind in dict.fromkeys(named)
    ]


def _typed(schema: Mapping[str, Any], kind: str) -> dict[str, Any]:
    return {**schema, "type": kind}


def _refuse(words: list[str], where: str) -> None:
    if words:
        raise RequestError(
            f"{where} uses {', '.join(words)}, which a grammar cannot follow where the value may "
            f"be a string; leave that out, {REMEDY}."
        )


def _check_text(text: str, others: frozenset[str], where: str) -> None:
    """Refuse a definite string that would not be read as what it is."""
    if re.fullmatch(_ENDS_EARLY, text + _END):
        raise RequestError(
            f"{where} has the value {quoted(text)}, which holds a tag that would end it; leave it "
            f"out, {REMEDY}."
        )
    for kind in others & {*_UNLIKE}:
        if re.fullmatch(_UNLIKE[kind], text):
            raise RequestError(
                f"{where} has the string {quoted(text)}, which cannot be told from a value of the "
                f"type {kind} where both are allowed; allow one of them, {REMEDY}."
            )


def _check_references(schema: Mapping[str, Any], root: Mapping[str, Any], where: str) -> None:
    """A value's schema keeps the definitions of the whole one, and nothing else of it."""
    waiting, seen = [schema], set[int]()
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        waiting += subschemas(one)
        reference = one.get("$ref")
        if not isinstance(reference, str):
            continue
        target = find_reference(root, reference)
        if not reference.startswith(("#/$defs/", "#/definitions/")) or target is None:
            raise RequestError(
                f"{where}: $ref {reference!r:.60} leads to none of the schema's $defs, and inside "
                f"of a parameter only those can be referred to; move what it names there, {REMEDY}."
            )
        waiting += [target] if isinstance(target, Mapping) else []
