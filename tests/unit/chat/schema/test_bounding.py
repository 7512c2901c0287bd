"""An end for texts and lists that have none."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from flashdraft.chat.grammar.compiler import LlguidanceCompiler
from flashdraft.chat.schema.bounding import (
    LARGEST,
    MOST_CHARACTERS,
    SMALLEST_PART,
    bound_values,
)
from flashdraft.core import GrammarSpec
from tests.unit.chat.chat_factory import CHATML_MARKS, byte_tokenizer

TEXT = {"type": "string"}


@pytest.mark.parametrize(
    ("schema", "bounded"),
    [
        (TEXT, {"type": "string", "maxLength": 640}),
        ({"type": ["string", "null"]}, {"type": ["string", "null"], "maxLength": 640}),
        ({"type": "string", "maxLength": 9000}, {"type": "string", "maxLength": 9000}),
        (
            {"type": "string", "minLength": 700},
            {"type": "string", "minLength": 700, "maxLength": 700},
        ),
        ({"type": "string", "enum": ["a"]}, {"type": "string", "enum": ["a"]}),
        ({"type": "string", "pattern": "a+"}, {"type": "string", "pattern": "a+"}),
        ({"type": "string", "format": "date"}, {"type": "string", "format": "date"}),
        ({"type": "boolean"}, {"type": "boolean"}),
        ({"type": "integer", "minimum": 1}, {"type": "integer", "minimum": 1, "maximum": LARGEST}),
        (
            {"type": "number", "exclusiveMaximum": 3},
            {
                "type": "number",
                "exclusiveMaximum": 3,
                "minimum": -LARGEST,
                "multipleOf": SMALLEST_PART,
            },
        ),
        (
            {"type": "number", "minimum": 1e16, "multipleOf": 0.5},
            {"type": "number", "minimum": 1e16, "multipleOf": 0.5},
        ),
        ({"type": "array", "maxItems": 99}, {"type": "array", "maxItems": 99}),
        ({"type": "array", "minItems": 50}, {"type": "array", "minItems": 50, "maxItems": 50}),
        (
            {"type": "number", "minimum": 0, "maximum": 1e-7},
            {"type": "number", "minimum": 0, "maximum": 1e-7},
        ),
        (
            {"type": "number", "minimum": 0, "maximum": 0.5},
            {"type": "number", "minimum": 0, "maximum": 0.5, "multipleOf": SMALLEST_PART},
        ),
        ({}, {}),
        (True, True),
        (None, None),
    ],
)
def test_what_has_no_end_gets_one(schema: Any, bounded: Any) -> None:
    assert bound_values(schema, 1280) == bounded


def test_it_holds_wherever_a_value_stands() -> None:
    schema = {
        "type": "object",
        "properties": {
            "type": {"type": "array", "items": TEXT},
            "b": {"anyOf": [TEXT, {"$ref": "#/$defs/c"}]},
            "d": {"const": {"type": "string"}},
        },
        "$defs": {"c": {"type": "object", "additionalProperties": TEXT}},
    }
    found = bound_values(schema, 1280)
    end = {"type": "string", "maxLength": 32}
    assert found["properties"]["type"] == {"type": "array", "items": end, "maxItems": 20}
    assert found["properties"]["b"]["anyOf"][0] == end
    assert found["properties"]["d"] == {"const": {"type": "string"}}, "values are no schemas"
    assert found["$defs"]["c"]["additionalProperties"] == end
    assert schema["properties"]["b"]["anyOf"][0] == TEXT, "nothing given is changed"


@pytest.mark.parametrize("kind", ["number", "integer"])
def test_numbers_end(kind: str) -> None:
    llguidance = pytest.importorskip("llguidance")
    tokenizer = byte_tokenizer(CHATML_MARKS, [])
    library = llguidance.LLTokenizer(tokenizer.to_json())
    source = llguidance.LLMatcher.grammar_from_json_schema(bound_values({"type": kind}, 640))
    for text, length in (("2" * 60, 16), ("0." + "3" * 60, 8 if kind == "number" else 1)):
        matcher = llguidance.LLMatcher(library, source, log_level=0)
        assert matcher.try_consume_tokens(tokenizer.encode(text)) == length


def test_texts_share_what_there_is() -> None:
    def most(schema: Any) -> int:
        found = bound_values({"type": "object", "properties": {"a": TEXT, **schema}}, 1280)
        return int(found["properties"]["a"]["maxLength"])

    assert most({}) == 640 and most({"b": TEXT}) == 320
    assert most({"b": {"type": "array", "items": TEXT, "maxItems": 4}}) == 128
    assert most({"b": {"anyOf": [TEXT, {"type": "null"}]}}) == 320
    assert most({"b": {"type": "string", "maxLength": 5}}) == 640, "it has its own end"
    assert most({"b": {"type": "array", "items": TEXT}}) == 32, "no less than that"


def test_deep_schemas_take_no_longer() -> None:
    schema: dict[str, Any] = dict(TEXT)
    for _ in range(32):  # 64 levels: more are refused before
        schema = {"anyOf": [{"type": "object", "properties": {"a": schema}}, {"type": "null"}]}
    start = time.perf_counter()
    bound_values(schema, 1280)
    assert time.perf_counter() - start < 1.0


def test_times_in_milliseconds_and_ids_are_numbers_too() -> None:
    assert 1_763_499_999_999 < bound_values({"type": "integer"}, 1280)["maximum"] == LARGEST
    assert LARGEST == 2**53 - 1, "more than that many programs cannot read"


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [TEXT, {"minLength": 700}]},
        {"allOf": [{"type": "number"}, {"type": "number", "multipleOf": 5000}]},
        {"type": "integer", "anyOf": [{"minimum": 2 * LARGEST}]},
        {"$ref": "#/$defs/a", "type": "string"},
    ],
)
def test_a_value_that_several_schemas_describe_gets_no_end(schema: Any) -> None:
    assert bound_values(schema, 1280) == schema


def test_ends_are_given_inside_of_combined_schemas() -> None:
    branch = {"type": "object", "properties": {"a": TEXT}}
    found = bound_values({"allOf": [branch, {"required": ["a"]}]}, 1280)
    assert found["allOf"][0]["properties"]["a"] == {"type": "string", "maxLength": 1280 // 2}


@pytest.mark.parametrize("max_tokens", [1024, 2 * MOST_CHARACTERS, 32768])
def test_a_text_can_be_written_to_its_end(max_tokens: int) -> None:
    pytest.importorskip("llguidance")
    tokenizer = byte_tokenizer(CHATML_MARKS, [])
    compiler = LlguidanceCompiler(tokenizer, tokenizer.vocab_size, [0])
    schema = bound_values(TEXT, max_tokens)
    most = schema.get("maxLength", 12_000)
    matcher = compiler(GrammarSpec("json_schema", json.dumps(schema))).start()
    text = '"' + ("añ日😀" * most)[:most] + '"'
    assert all(matcher.advance(token) for token in tokenizer.encode(text))
    assert matcher.may_end()
