"""What a schema costs grows with its size, whatever it refers to and however often.

The front writes grammars on its event loop: a schema within the limits of size must not hold it.
"""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from flashdraft.chat.grammar.compiler import check_multiples
from flashdraft.chat.schema.json_rule import FIXED, MAX_PARTS, JsonGrammar
from flashdraft.errors import RequestError
from flashdraft.text.exact_json import read

MAX_BYTES = 64 * 1024
MAX_WORK_S = 0.8  # of the processor; an idle one takes a fifth of it
ID = {"const": 2**53 + 1}
Schema = dict[str, Any]


def schema_of(properties: Schema, definition: Schema | None = None, **more: Any) -> str:
    schema = {"type": "object", "properties": properties, "$defs": {"a": definition}, **more}
    return json.dumps(schema, separators=(",", ":"))


def strings(count: int) -> Schema:
    return {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(count)}}


def with_id(count: int) -> Schema:
    return {"type": "object", "properties": {"id": ID, **strings(count)["properties"]}}


def nested(levels: int) -> str:
    """Objects in each other, the innermost of which refers to all of them."""
    schema = with_id(1500)
    for level in range(1, levels):
        schema["properties"][f"r{level}"] = {"$ref": "#" + "/properties/n" * level}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"n": schema}}
    return json.dumps(schema, separators=(",", ":"))


LARGE = {
    "a definition in many parts": schema_of(
        {"id": ID, **{f"q{n}": {"anyOf": [{"$ref": "#/$defs/a"}]} for n in range(700)}},
        strings(1100),
    ),
    "a changed number behind many references": schema_of(
        {f"q{n}": {"anyOf": [{"$ref": "#/$defs/a"}]} for n in range(700)}, with_id(1100)
    ),
    "one definition by many names": schema_of(
        {f"q{n}": {"$ref": f"#{n}/$defs/a"} for n in range(700)}, with_id(1100)
    ),
    "references to what they are in": nested(14),
    "one type many times": schema_of(with_id(1000)["properties"], type=["object"] * 2500),
    "all names required": schema_of(
        {"id": ID, **{f"{n}": {} for n in range(3400)}}, required=[f"{n}" for n in range(3400)]
    ),
    "a long bound beside many values": (
        f'{{"enum": [{"1," * 15_000}1.50], "minimum": 0.{"0" * 30_000}1}}'
    ),
    "many types beside many values": json.dumps(
        {"enum": [1] * 15_000 + [2**53 + 1], "type": ["string"] * 1500 + ["number"]},
        separators=(",", ":"),
    ),
    "many values": f'{{"enum": [{"1," * 32_000}1e400]}}',
}


@pytest.mark.parametrize("text", LARGE.values(), ids=LARGE)
def test_a_schema_within_the_limits_is_written_at_once(text: str) -> None:
    assert MAX_BYTES * 0.6 < len(text) <= MAX_BYTES
    schema, begin = read(text), time.process_time()
    JsonGrammar(FIXED).body(schema)
    assert time.process_time() - begin < MAX_WORK_S


def test_parts_that_differ_are_counted_with_their_definitions() -> None:
    parts = {f"q{n}": {"maxProperties": n, "allOf": [{"$ref": "#/$defs/a"}]} for n in range(600)}
    schema, begin = read(schema_of({"id": ID, **parts}, strings(900))), time.process_time()
    with pytest.raises(RequestError, match=f"more than {MAX_PARTS} characters .* shorter"):
        JsonGrammar(FIXED).body(schema)
    assert time.process_time() - begin < MAX_WORK_S


def test_the_parts_of_all_tools_are_counted_together() -> None:
    parts = {f"q{n}": {"maxProperties": n, "allOf": [{"$ref": "#/$defs/a"}]} for n in range(10)}
    text, grammar = schema_of({"id": ID, **parts}, strings(1000)), JsonGrammar(FIXED)
    grammar.body(read(text))
    with pytest.raises(RequestError, match="more than"):
        for _ in range(4):
            grammar.body(read(text))


def test_a_large_schema_of_shared_definitions_and_ids_is_no_trouble() -> None:
    address = {
        "type": "object",
        "title": "Address",
        "properties": {f"line{n}": {"type": "string", "format": "date"} for n in range(40)},
        "required": ["line0"],
    }
    optional = {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]}
    properties: Schema = {
        f"q{n}": {"title": f"Q{n}", "description": f"The {n}th.", **optional} for n in range(200)
    }
    properties |= {f"id{n}": {"title": f"Id{n}", "const": 2**60 + n} for n in range(100)}
    grammar = JsonGrammar(FIXED)
    grammar.body(read(schema_of(properties, address)))
    text = "\n".join(grammar.lines)
    assert text.count('"line0"') == 2  # a property and a required name: the part is there once
    assert all(f'"{2**60 + n}"' in text for n in range(100))


def test_definitions_that_are_none_are_refused_in_words() -> None:
    for definitions in ("[1]", "5", '{"a": 5}'):
        schema = read(
            f'{{"properties": {{"id": {{"const": 1e400}}, "b": {{"allOf": [{{"$ref": '
            f'"#/$defs/a"}}]}}}}, "$defs": {definitions}}}'
        )
        with pytest.raises(RequestError, match=r"leads to none of the schema's \$defs"):
            JsonGrammar(FIXED).body(schema)


@pytest.mark.parametrize(
    "text", ['{"enum": [9007199254740993, "\\ud800"]}', '{"const": {"\\udc00": 1e400}}']
)
def test_half_of_a_surrogate_pair_is_refused_in_words(text: str) -> None:
    with pytest.raises(RequestError, match="surrogate pair"):
        JsonGrammar(FIXED).body(read(text))


def test_types_that_are_none_beside_a_value_are_no_failure() -> None:
    JsonGrammar(FIXED).body(read('{"type": [{}], "const": 1e400}'))


@pytest.mark.parametrize("number", ["1e9999999", "1e-9999999", "1e60", f"0.{'0' * 60}1", "3" * 61])
def test_a_multiple_of_absurd_size_is_refused_in_words(number: str) -> None:
    schema = read(f'{{"anyOf": [{{"multipleOf": {number}}}, {{"multipleOf": 5}}]}}')
    with pytest.raises(RequestError, match=r"multipleOf is [\d.E+-]+; .* 60 digits .* leave it"):
        check_multiples(schema)


def test_a_long_multiple_is_told_digit_for_digit() -> None:
    number = "1234567890123456789012345678901234567890"
    with pytest.raises(RequestError, match=f" is {number};"):
        check_multiples(read(f'{{"multipleOf": {number}}}'))
    check_multiples(read('{"multipleOf": 100.00}'))


def test_many_different_multiples_are_refused_in_words() -> None:
    schema = {"anyOf": [{"multipleOf": 10**50 + n} for n in range(1000)]}
    with pytest.raises(RequestError, match="more than 64 different multipleOf; leave"):
        check_multiples(schema)
    check_multiples({"anyOf": [{"multipleOf": n} for n in range(1, 11)]})
