"""Where objects end: after their properties, unless a schema says otherwise or shares them."""

from __future__ import annotations

import itertools
import json
import re
import time
from typing import Any

import jsonschema
import pydantic
import pytest

from flashdraft.chat.answer_format import AnswerFormat
from flashdraft.chat.grammar import compiler
from flashdraft.chat.grammar.compiler import LlguidanceCompiler
from flashdraft.chat.grammar.forms import form_grammar
from flashdraft.chat.schema import json_rule
from flashdraft.chat.schema.closing import MAX_VISITS, close_objects, open_objects
from flashdraft.core import GrammarSpec
from flashdraft.errors import RequestError
from flashdraft.models.tokenizer import Tokenizer
from tests.unit.chat.chat_factory import gemma4_tokenizer, qwen3_tokenizer

pytest.importorskip("llguidance")

Schema = dict[str, Any]
GEMMA, QWEN = gemma4_tokenizer(), qwen3_tokenizer()
ENDS = {GEMMA: "<eos>", QWEN: "<|im_end|>"}
COMPILERS = {
    one: LlguidanceCompiler(one, one.vocab_size, [one.token_id(end) or 0])
    for one, end in ENDS.items()
}
NUMBER = {"type": "integer"}
MAX_WORK_S = 0.2  # of the processor; an idle one takes a fifth of it


def of(names: str, required: str = "", **more: Any) -> Schema:
    """An object of integers, named by letters."""
    schema = {"type": "object", "properties": dict.fromkeys(names, NUMBER), **more}
    return {**schema, "required": [*required]} if required else schema


def takes(spec: GrammarSpec, text: str, tokenizer: Tokenizer = QWEN) -> bool:
    matcher = COMPILERS[tokenizer](spec).start()
    return all(map(matcher.advance, tokenizer.encode(text))) and matcher.may_end()


def as_text(schema: Schema, value: Any) -> bool:
    return takes(GrammarSpec("json_schema", json.dumps(schema)), json.dumps(value))


def after_a_thought(schema: Schema, value: Any) -> bool:
    form = form_grammar(GrammarSpec("json_schema", json.dumps(schema)), '"hm "', None)
    return takes(form, "hm " + json.dumps(value))


def call(tokenizer: Tokenizer, schema: Schema) -> GrammarSpec:
    function = {"name": "f", "parameters": {"type": "object", **schema}}
    tool = {"type": "function", "function": function}
    return AnswerFormat.of(tokenizer).tool_grammar([tool], "f", False)


def as_call(schema: Schema, value: Any) -> bool:
    text = json.dumps({"name": "f", "arguments": value})
    return takes(call(QWEN, schema), f"<tool_call>\n{text}\n</tool_call>")


def as_gemma_call(schema: Schema, value: Any) -> bool:
    text = json.dumps(value, separators=(",", ":")).replace('"', "")
    return takes(call(GEMMA, schema), f"<|tool_call>call:f{text}<tool_call|>", GEMMA)


WAYS = [as_text, after_a_thought, as_call]


def taken(schema: Schema, names: str) -> set[str]:
    """Which of all objects of these names, in this order, a schema takes."""
    subsets = (c for n in range(len(names) + 1) for c in itertools.combinations(names, n))
    return {"".join(one) for one in subsets if as_text(schema, dict.fromkeys(one, 1))}


# -- where an object ends --------------------------------------------------------------------------


@pytest.mark.parametrize("accepts", [*WAYS, as_gemma_call])
def test_an_object_ends_after_its_properties(accepts: Any) -> None:
    schema = of("abc", "a")
    assert accepts(schema, {"a": 1, "b": 2, "c": 3}) and accepts(schema, {"a": 1, "c": 3})
    assert accepts(schema, {"a": 1})
    assert not accepts(schema, {"a": 1, "d": 4}) and not accepts(schema, {"a": 1, "c": 3, "d": 4})
    assert not accepts(schema, {"b": 2})
    assert accepts(of(""), {}) and not accepts(of(""), {"a": 1})


@pytest.mark.parametrize("accepts", WAYS)
def test_objects_stay_open_where_the_schema_does_not_declare_or_says_so(accepts: Any) -> None:
    assert accepts({"type": "object"}, {"x": 1})
    assert accepts({"type": "object", "required": ["x"]}, {"x": 1, "y": [2]})
    for open_ in (True, NUMBER, {}):
        assert accepts(of("a", additionalProperties=open_), {"a": 1, "x": 1})
    assert not accepts(of("a", additionalProperties=NUMBER), {"a": 1, "x": "1"})
    assert not accepts(of("a", additionalProperties=False), {"a": 1, "x": 1})
    assert accepts(of("a", patternProperties={"^x": NUMBER}), {"a": 1, "x": 1})


@pytest.mark.parametrize("accepts", [*WAYS, as_gemma_call])
@pytest.mark.parametrize(
    "inner",
    [
        {"type": "array", "items": of("a", "a")},
        {"type": "array", "items": {"$ref": "#/$defs/A"}},
        {"type": "array", "items": {"anyOf": [of("a", "a"), {"type": "null"}]}},
        {"type": "array", "items": {"allOf": [{"$ref": "#/$defs/A"}], "title": "one is no merger"}},
        {"type": "array", "items": {"$ref": "#/$defs/A", "description": "nor are notes"}},
    ],
)
def test_objects_inside_end_too(accepts: Any, inner: Schema) -> None:
    schema = {"type": "object", "properties": {"o": inner}, "$defs": {"A": of("a", "a")}}
    assert accepts(schema, {"o": [{"a": 1}, {"a": 2}]})
    assert not accepts(schema, {"o": [{"a": 1}, {"a": 2, "x": 1}]})
    assert not accepts(schema, {"o": [{"a": 1}], "x": 1})


def test_objects_inside_open_ones_end() -> None:
    for key in ("additionalProperties", "items"):
        schema = {key: of("a"), "type": "object" if key != "items" else "array"}
        assert as_text(schema, {"x": {"a": 1}} if key != "items" else [{"a": 1}])
        assert not as_text(schema, {"x": {"x": 1}} if key != "items" else [{"x": 1}])


def test_every_alternative_ends_by_itself() -> None:
    for name in ("anyOf", "oneOf"):
        assert taken({name: [of("ab", "a"), of("cd", "c")]}, "abcd") == {"a", "ab", "c", "cd"}
        schema = {"type": "object", name: [of("a", "a"), of("b", "b")], "discriminator": {}}
        assert taken(schema, "abx") == {"a", "b"}


def test_an_object_may_hold_itself() -> None:
    schema = of("a", "a") | {"properties": {"a": NUMBER, "next": {"$ref": "#"}}}
    assert as_text(schema, {"a": 1, "next": {"a": 2, "next": {"a": 3}}})
    assert not as_text(schema, {"a": 1, "next": {"a": 2, "x": {"a": 3}}})


class Street(pydantic.BaseModel):
    name: str = pydantic.Field(description="without the number")
    number: int | None = None


class Person(pydantic.BaseModel):
    name: str
    streets: list[Street] = pydantic.Field(default_factory=list)
    home: Street = pydantic.Field(description="where they sleep")
    tags: dict[str, int] = {}


def test_a_model_of_pydantic_ends_after_its_last_property() -> None:
    spec = GrammarSpec("json_schema", json.dumps(Person.model_json_schema()))
    text = (
        '{"name": "Bo", "streets": [{"name": "a", "number": 1}], "home": {"name": "b", '
        '"number": null}, "tags": {"x": 1}'
    )
    matcher = COMPILERS[QWEN](spec).start()
    assert all(map(matcher.advance, QWEN.encode(text)))
    comma, brace = (QWEN.encode(one)[0] for one in (",", "}"))
    assert not matcher.advance(comma) and matcher.advance(brace)
    assert matcher.may_end()
    assert not takes(spec, text.replace('"number": 1', '"number": 1, "zip": 2') + "}")


# -- objects that several schemas describe ---------------------------------------------------------


def test_branches_of_all_of_stay_open() -> None:
    schema = {"allOf": [of("a", "a"), of("b", "b")]}
    assert taken(schema, "abx") == {"ab", "abx"}
    assert taken({**of("a", "a"), "allOf": [of("b", "b")]}, "abx") == {"ab", "abx"}


def test_definitions_are_open_where_they_are_merged_and_closed_elsewhere() -> None:
    schema = {
        "type": "object",
        "properties": {
            "merged": {"allOf": [{"$ref": "#/$defs/A"}, of("b", "b")]},
            "beside": {"$ref": "#/$defs/A", "properties": {"c": NUMBER}, "required": ["c"]},
            "chain": {"allOf": [{"$ref": "#/$defs/B"}, of("c", "c")]},
            "alone": {"$ref": "#/$defs/A"},
        },
        "$defs": {
            "A": of("a", "a"),
            "B": {"allOf": [{"$ref": "#/$defs/A"}]},
            "merged0": of("z", "z"),
        },
    }
    for name, good in {"merged": "ab", "beside": "ac", "chain": "ac", "alone": "a"}.items():
        assert as_text(schema, {name: dict.fromkeys(good, 1)})
        assert not as_text(schema, {name: dict.fromkeys(good[1:], 1)})
        assert as_text(schema, {name: dict.fromkeys(good + "x", 1)}) is (name != "alone")
    assert not as_text(schema, {"x": 1})


def test_alternatives_beside_properties_stay_open_where_they_name_others() -> None:
    schema = {**of("a", "a"), "anyOf": [of("b", "b"), of("c", "c")]}
    assert {"ab", "ac", "abx"} <= taken(schema, "abcx")
    asked = {**of("a"), "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}
    assert taken(asked, "ab") == {"a", "b", "ab"}


@pytest.mark.parametrize("accepts", [as_text, as_call])
def test_what_speaks_of_no_other_property_opens_nothing(accepts: Any) -> None:
    kinds = [of("a", "a"), {"required": ["b"]}]
    for name in ("anyOf", "allOf"):
        schema = {**of("ab"), name: kinds}
        assert accepts(schema, {"a": 1, "b": 1})
        assert not accepts(schema, {}) and not accepts(schema, {"a": 1, "b": 1, "x": 1})


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        (of("a", "ab"), {"a": 1, "b": 2}),
        (of("a", "a", minProperties=2), {"a": 1, "b": 2}),
        (of("a", const={"a": 1, "b": 2}), {"a": 1, "b": 2}),
        (of("a", enum=[{"a": 1, "b": 2}]), {"a": 1, "b": 2}),
    ],
)
def test_an_object_that_needs_others_stays_open(schema: Schema, value: Any) -> None:
    assert as_text(schema, value)


def test_inside_merged_schemas_objects_end_unless_two_describe_them() -> None:
    inner = {"allOf": [{"properties": {"o": of("a")}}, {"properties": {"p": of("b")}}]}
    assert as_text(inner, {"o": {"a": 1}, "p": {"b": 1}, "x": 1})
    assert not as_text(inner, {"o": {"a": 1, "x": 1}}) and not as_text(inner, {"p": {"x": 1}})
    both = {"allOf": [{"properties": {"o": of("a", "a")}}, {"properties": {"o": of("b", "b")}}]}
    assert as_text(both, {"o": {"a": 1, "b": 1}})
    lists = {"allOf": [{"items": of("a", "a")}, {"items": of("b", "b")}], "type": "array"}
    assert as_text(lists, [{"a": 1, "b": 1}])
    maps = {"allOf": [{"properties": {"o": of("a", "a")}}, {"additionalProperties": of("b", "b")}]}
    assert as_text({"type": "object", **maps}, {"x": {"b": 1}})


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        (
            {"properties": {"x1": of("ab", "b")}, "patternProperties": {"^x": of("a")}},
            {"x1": {"a": 1, "b": 2}},
        ),
        (
            {
                "properties": {"x1": {"$ref": "#/$defs/A"}},
                "patternProperties": {"^x": of("a")},
                "$defs": {"A": of("ab", "b")},
            },
            {"x1": {"a": 1, "b": 2}},
        ),
        (
            {"type": "array", "allOf": [{"prefixItems": [of("a")]}, {"items": of("ab", "b")}]},
            [{"a": 1, "b": 2}],
        ),
        ({"properties": {"o": of("a")}, "const": {"o": {"b": 2}}}, {"o": {"b": 2}}),
        ({"properties": {"o": of("a")}, "enum": [{"o": {"b": 2}}]}, {"o": {"b": 2}}),
        (
            {"allOf": [{"properties": {"o": of("a")}}, {"const": {"o": {"b": 2}}}]},
            {"o": {"b": 2}},
        ),
        ({"type": "array", "items": of("a"), "const": [{"b": 2}]}, [{"b": 2}]),
    ],
)
def test_objects_inside_stay_open_where_other_words_describe_them_too(
    schema: Schema, value: Any
) -> None:
    assert as_text({"type": "object", **schema}, value)


def test_patterns_keep_nothing_open_that_they_do_not_describe() -> None:
    named = of("", patternProperties={"^x": NUMBER}) | {"properties": {"o": of("a")}}
    assert as_text(named, {"o": {"a": 1}, "x": 1}) and not as_text(named, {"o": {"b": 1}})
    alone = {"type": "object", "patternProperties": {"^x": of("a")}}
    assert as_text(alone, {"x": {"a": 1}}) and not as_text(alone, {"x": {"b": 1}})


def test_merged_references_that_cannot_be_followed_close_nothing() -> None:
    for schema in (
        {
            "allOf": [{"$ref": "#name"}, of("b", "b")],
            "$defs": {"A": of("a", "a", **{"$anchor": "name"})},
        },
        {"allOf": [{"$ref": "#/$defs/A%41"}, of("b", "b")], "$defs": {"AA": of("a", "a")}},
    ):
        assert taken(schema, "abx") == {"ab", "abx"}
    for strange in ({"allOf": 5}, {"$ref": 5, "allOf": [of("a"), {"$ref": 7}]}, {"$defs": 1}):
        close_objects({**of("a"), **strange})


REFUSED = {
    **{name: of("b") for name in ("if", "then", "else", "not", "contains", "propertyNames")},
    **dict.fromkeys(("unevaluatedProperties", "unevaluatedItems"), False),
    **{name: {"a": of("b")} for name in ("dependentSchemas", "dependencies")},
    **{"dependentRequired": {"a": ["b"]}, "$dynamicRef": "#", "$recursiveRef": "#"},
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_schema_with_what_the_library_refuses_is_left_as_it_is(name: str) -> None:
    """No rule here reasons about these words: open or closed, no grammar has them."""
    schema = {"properties": {"o": {**of("a"), name: REFUSED[name]}, "p": of("b")}}
    assert close_objects(schema) == schema
    with pytest.raises(RequestError, match=re.escape(name)):
        as_text(schema, {})
    named = {"properties": {name: NUMBER}}
    assert close_objects(named) == {**named, "additionalProperties": False}


# -- the rule itself -------------------------------------------------------------------------------


PARTS: list[Schema] = [
    of("ab", "a"),
    of("b"),
    of("bc", "c"),
    {"required": ["a"]},
    {"$ref": "#/$defs/A"},
    {"$ref": "#/$defs/B"},
    {"anyOf": [of("a", "a"), of("c", "c")]},
    {"title": "a note"},
]
DEFINITIONS: Schema = {"A": of("ab", "b"), "B": {"allOf": [{"$ref": "#/$defs/A"}, of("c", "c")]}}


def test_closed_schemas_take_less_and_never_nothing() -> None:
    objects = [dict.fromkeys(one, 1) for n in range(5) for one in itertools.combinations("abcx", n)]
    for first, second in itertools.product(PARTS, repeat=2):
        for schema in (
            {"allOf": [first, second]},
            {**first, "allOf": [second]},
            {**first, "anyOf": [second, of("x", "x")]},
            {"anyOf": [first, second]},
        ):
            schema = {**schema, "type": "object", "$defs": DEFINITIONS}
            before = jsonschema.Draft202012Validator(schema)
            after = jsonschema.Draft202012Validator(close_objects(schema))
            good = [one for one in objects if before.is_valid(one)]
            left = [one for one in objects if after.is_valid(one)]
            assert all(one in good for one in left), schema
            assert bool(left) == bool(good), schema


def test_opened_schemas_are_not_closed() -> None:
    for part in PARTS:
        schema = {"type": "object", "properties": {"o": part}, "$defs": DEFINITIONS}
        opened = open_objects(schema)
        assert close_objects(opened)["additionalProperties"] is True
        assert taken(opened, "ax") == {"", "a", "x", "ax"}
    assert open_objects(of("a", additionalProperties=False)) == of("a", additionalProperties=False)
    assert open_objects({"enum": [of("a")]}) == {"enum": [of("a")]}
    assert open_objects(True) is True and open_objects({"type": "object"}) == {"type": "object"}


def test_nothing_but_objects_is_changed() -> None:
    schema = {
        "properties": {"properties": NUMBER, "const": {"const": of("a")}},
        "default": of("a"),
        "x-own": of("a"),
    }
    assert close_objects(schema) == {**schema, "additionalProperties": False}


def chain(length: int) -> Schema:
    """Definitions of which each is merged with all that follow it."""
    links: Schema = {
        f"{n}": {"$ref": f"#/$defs/{n + 1}", "required": []} for n in range(length - 1)
    }
    return {"$defs": {**links, f"{length - 1}": {}}, "properties": {}}


def nested(inner: Schema, levels: int = 28) -> Schema:
    """A schema of which every level is merged somewhere, all that is inside with it."""
    schema = inner
    for _ in range(levels):
        schema = {"properties": {"n": schema}}
    merged = {
        f"{n}": {"$ref": "#" + "/properties/n" * n, "required": []} for n in range(1, levels + 1)
    }
    return {**schema, "$defs": merged}


def many_merged(value: Schema, count: int = 800) -> Schema:
    merged = {"allOf": [{"$ref": "#/$defs/A"}, of("b")]}
    return {
        "properties": {f"p{n}": merged for n in range(count)},
        "$defs": {"A": {"properties": {f"q{n}": value for n in range(5 * count)}}},
    }


@pytest.mark.parametrize(
    "schema",
    [
        chain(430),
        many_merged({}),
        many_merged({"type": "null"}),
        nested({"enum": [1] * 27_000}),
        nested({"required": ["a"] * 14_000}),
    ],
)
def test_the_work_is_limited_however_schemas_refer_to_each_other(schema: Schema) -> None:
    begin = time.process_time()
    with pytest.raises(RequestError, match=f"more than {MAX_VISITS} parts, .*; combine fewer"):
        close_objects(schema)
    assert time.process_time() - begin < MAX_WORK_S


@pytest.mark.parametrize(
    "schema",
    [
        chain(100),
        many_merged({"type": "null"}, 200),
        nested(of("abcdefgh")),
        {"properties": {f"p{n}": {} for n in range(6000)}},
    ],
    ids=["chain", "many", "nested", "wide"],
)
def test_what_is_closed_is_closed_at_once(schema: Schema) -> None:
    begin = time.process_time()
    close_objects(schema)
    assert time.process_time() - begin < MAX_WORK_S


def test_a_schema_is_closed_once_to_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[Schema] = []

    def close(schema: Schema) -> Any:
        closed.append(schema)
        return close_objects(schema)

    for module in (json_rule, compiler):
        monkeypatch.setattr(module, "close_objects", close, raising=False)
    assert not as_text(of("", title="once"), {"x": 1})
    assert len(closed) == 1


def test_schemas_that_merge_with_themselves_come_to_an_end() -> None:
    circle = {"$defs": {"A": {"allOf": [{"$ref": "#/$defs/A"}, of("a")]}}, "$ref": "#/$defs/A"}
    close_objects(circle)
