"""Numbers of schemas and calls are nobody's but the client's and the model's: none is rounded.

Grammars of random schemas are held against a reference validator that computes with decimals.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import jsonschema
import pytest

from flashdraft.chat.answer_format import AnswerFormat
from flashdraft.chat.answers.deltas import ToolCallArguments
from flashdraft.chat.grammar.compiler import LlguidanceCompiler
from flashdraft.core import GrammarSpec
from flashdraft.engine.sampling.grammar import GrammarTooComplexError
from flashdraft.errors import RequestError
from flashdraft.models.tokenizer import Tokenizer
from flashdraft.text.exact_json import read
from tests.unit.chat.chat_factory import gemma4_tokenizer, pieces_of, qwen3_tokenizer

pytest.importorskip("llguidance")

GEMMA, QWEN = gemma4_tokenizer(), qwen3_tokenizer()
IDS = ["9007199254740993", "123456789012345678", "-9223372036854775808", str(2**127 - 1)]
SPELLINGS = ["1.50", "1E5", "-0", "-0.0", "1e400", "1.0", "0.1000000000000000000000000001"]


def compiler(tokenizer: Tokenizer, end: str) -> Callable[[GrammarSpec], Any]:
    index = tokenizer.token_id(end)
    assert index is not None
    return LlguidanceCompiler(tokenizer, tokenizer.vocab_size, [index])


COMPILE_QWEN = compiler(QWEN, "<|im_end|>")
COMPILE_GEMMA = compiler(GEMMA, "<eos>")


def takes(spec: GrammarSpec, text: str, tokenizer: Tokenizer = QWEN) -> bool:
    matcher = (COMPILE_GEMMA if tokenizer is GEMMA else COMPILE_QWEN)(spec).start()
    return all(map(matcher.advance, tokenizer.encode(text))) and matcher.may_end()


def as_json(schema: str, value: str) -> bool:
    return takes(GrammarSpec("json_schema", schema), value)


def called(tokenizer: Tokenizer, schema: str) -> GrammarSpec:
    parameters = read(f'{{"properties": {{"a": {schema}}}, "required": ["a"]}}')
    function = {"name": "f", "parameters": {"type": "object", **parameters}}
    return AnswerFormat.of(tokenizer).tool_grammar(
        [{"type": "function", "function": function}], "f", False
    )


def as_hermes_call(schema: str, value: str) -> bool:
    call = f'<tool_call>\n{{"name": "f", "arguments": {{"a": {value}}}}}\n</tool_call>'
    return takes(called(QWEN, schema), call)


def as_gemma_call(schema: str, value: str) -> bool:
    return takes(called(GEMMA, schema), f"<|tool_call>call:f{{a:{value}}}<tool_call|>", GEMMA)


FORMS = [as_json, as_hermes_call, as_gemma_call]


def neighbours(number: str) -> list[str]:
    """What a reader with floats would make of a number, and the numbers beside it."""
    found = {repr(float(number)), str(Decimal(number) * 10)}
    if "." not in number and "e" not in number.lower():
        whole = int(number)
        found |= {str(whole + 1), str(whole - 1), str(int(float(whole))), f"{whole}0"}
    return sorted(found - {number, "inf", "-inf"})


def random_number(source: random.Random) -> str:
    whole = source.getrandbits(source.choice([8, 53, 54, 64, 128])) * source.choice([1, -1])
    if source.random() < 0.6:
        return str(whole)
    digits = "".join(source.choices("0123456789", k=source.choice([1, 2, 17, 30])))
    return f"{whole % 10 ** source.choice([1, 6, 20])}.{digits}"


def is_integer(_: Any, value: Any) -> bool:
    if isinstance(value, Decimal):
        return value == value.to_integral_value()
    return isinstance(value, int) and not isinstance(value, bool)


Reference = jsonschema.validators.extend(
    jsonschema.Draft202012Validator,
    type_checker=jsonschema.Draft202012Validator.TYPE_CHECKER.redefine("integer", is_integer),
)


def is_valid(schema: str, value: str) -> bool:
    return Reference(json.loads(schema, parse_float=Decimal)).is_valid(
        json.loads(value, parse_float=Decimal)
    )


# -- definite values -------------------------------------------------------------------------------


@pytest.mark.parametrize("accepts", FORMS)
@pytest.mark.parametrize("number", [*IDS, *SPELLINGS])
def test_const_and_enum_are_the_text_of_the_schema(
    accepts: Callable[[str, str], bool], number: str
) -> None:
    for schema in (f'{{"const": {number}}}', f'{{"type": "number", "enum": ["x", 7, {number}]}}'):
        assert accepts(schema, number)
        assert [other for other in neighbours(number) if accepts(schema, other)] == []


@pytest.mark.parametrize("accepts", FORMS)
def test_random_values_of_64_and_128_bits_and_decimals(
    accepts: Callable[[str, str], bool],
) -> None:
    source = random.Random(22)
    for _ in range(25):
        numbers = [random_number(source) for _ in range(3)]
        schema = f'{{"enum": [{", ".join(numbers)}]}}'
        others = {other for number in numbers for other in neighbours(number)} - set(numbers)
        assert [number for number in numbers if not accepts(schema, number)] == []
        assert [other for other in others if accepts(schema, other)] == []


def test_numbers_within_definite_values() -> None:
    value = '{"a": [1.50, {"b": -0}], "é\\"": 123456789012345678901234567890, "c": []}'
    schema = f'{{"const": {value}}}'
    assert as_json(schema, value) and as_json(schema, value.replace(" ", ""))
    assert as_json(schema, value.replace(", ", ",\n  "))
    assert not as_json(schema, value.replace("1.50", "1.5"))
    assert not as_json(schema, value.replace("567890,", "567891,"))
    gemma = "{a:[1.50,{b:-0}],c:123456789012345678901234567890}"
    schema = '{"const": {"a": [1.50, {"b": -0}], "c": 123456789012345678901234567890}}'
    assert as_gemma_call(schema, gemma)
    assert not as_gemma_call(schema, gemma.replace("1.50", "1.5"))


def test_what_stands_beside_such_numbers_keeps_all_that_schemas_can_say() -> None:
    schema = json.dumps(
        {
            "type": "object",
            "properties": {
                "id": {"enum": [9007199254740993, 5], "type": "integer", "minimum": 6},
                "day": {"type": "string", "format": "date"},
                "more": {"$ref": "#/$defs/more"},
                "list": {"type": "array", "items": {"$ref": "#/$defs/id"}, "maxItems": 2},
            },
            "required": ["id", "day"],
            "$defs": {
                "id": {"anyOf": [{"const": 2**64}, {"type": "null"}]},
                "more": {
                    "type": "object",
                    "properties": {"next": {"$ref": "#/$defs/more"}, "n": {"type": "integer"}},
                    "allOf": [{"required": ["n"]}],
                    "additionalProperties": False,
                    "default": 1e300,
                },
            },
        }
    )
    good = '{"id": 9007199254740993, "day": "2024-02-29", "more": {"next": {"n": 1}, "n": 2}}'
    listed = good[:-1] + ', "list": [18446744073709551616, null]}'
    for text in (good, listed, good.replace(" ", "")):
        assert as_json(schema, text) and is_valid(schema, text)
    for wrong, right in [("993", "992"), ("9007199254740993", "5"), ("-29", "-39"), ('"n"', '"m"')]:
        assert not as_json(schema, good.replace(wrong, right))
    assert not as_json(schema, listed.replace("616", "615"))


def test_a_schema_may_contain_itself_beside_such_numbers() -> None:
    schema = '{"type": "object", "properties": {"id": {"const": 1.50}, "next": {"$ref": "#"}}}'
    assert as_json(schema, '{"id": 1.50, "next": {"id": 1.50, "next": {}}}')
    assert not as_json(schema, '{"id": 1.50, "next": {"id": 1.5}}')


def test_one_rule_serves_all_references_to_a_schema() -> None:
    place, other = ('{"$ref": "#/properties/a"}', '{"$ref": "#x/properties/a"}')
    inner = f'"x": {{"const": 1.50}}, "b": {place}, "c": {other}, "d": {place[:-2]}/properties/x"}}'
    schema = f'{{"type": "object", "properties": {{"a": {{"properties": {{{inner}}}}}}}}}'
    for value in ('{"x": 1.50}', '{"x": 1.50, "b": {"c": {"d": 1.50}}, "d": 1.50}'):
        text = f'{{"a": {value}}}'
        assert as_json(schema, text)
        assert not as_json(schema, text.replace("1.50", "1.5"))
        assert not as_json(schema, text.replace('"x"', '"y"'))


def test_where_the_way_to_a_number_cannot_be_written_an_equal_number_will_do_but_no_other() -> None:
    schema = '{"allOf": [{"const": NUMBER}, {"type": "number"}]}'
    assert as_json(schema.replace("NUMBER", "1.50"), "1.5")
    with pytest.raises(RequestError, match="allOf"):
        as_json(schema.replace("NUMBER", "9007199254740993"), "9007199254740993")


def test_numbers_that_bind_nobody_may_be_any() -> None:
    schema = '{"type": "integer", "default": 1e400, "examples": [9007199254740993], "x-a": 1.50}'
    assert as_json(schema, "5")
    assert as_json('{"$defs": {"a": {"const": 1e400}}, "type": "null"}', "null")


# -- bounds ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("accepts", FORMS)
def test_bounds_of_whole_numbers_of_any_size_are_exact(
    accepts: Callable[[str, str], bool],
) -> None:
    source = random.Random(3)
    for _ in range(20):
        low, high = sorted(source.getrandbits(b) - 2 ** (b - 1) for b in source.sample(BITS, 2))
        names = (source.choice(["minimum", "exclusiveMinimum"]), source.choice(["maximum", ""]))
        bounds = {name: n for name, n in zip(names, (low, high + 2), strict=True) if name}
        schema = json.dumps({"type": "integer", **bounds})
        near = (low - 1, low, low + 1, high + 1, high + 2, high + 3, (low + high) // 2, 0, -1, 10)
        for value in map(str, near):
            assert accepts(schema, value) == is_valid(schema, value), (schema, value)


def test_the_bounds_of_64_bits_that_end_the_process_if_llguidance_reads_them() -> None:
    schema = f'{{"type": "integer", "minimum": {-(2**63)}, "maximum": {2**64 - 1}}}'
    assert as_json(schema, str(-(2**63))) and as_json(schema, str(2**64 - 1))
    assert not as_json(schema, str(-(2**63) - 1)) and not as_json(schema, str(2**64))
    assert as_json(f'{{"const": {-(2**63)}}}', str(-(2**63)))


BITS = (8, 40, 54, 64, 65, 128)


def test_a_grammar_of_bounds_takes_nothing_that_is_not_valid_or_is_refused() -> None:
    source, num_taken, num_refused = random.Random(5), 0, 0
    for _ in range(80):
        kind = source.choice(["integer", "number"])
        low, high = sorted((random_number(source), random_number(source)), key=Decimal)
        name = source.choice(["minimum", "exclusiveMinimum"])
        schema = f'{{"type": "{kind}", "{name}": {low}, "maximum": {high}}}'
        values = {low, high, *neighbours(low), *neighbours(high)}
        values |= {text.partition(".")[0] for text in values}
        values = {text for text in values if "e" not in text}
        try:
            taken = [text for text in values if as_json(schema, text)]
        except RequestError as error:
            assert kind == "number" and "cannot be kept exactly" in str(error)
            num_refused += 1
            continue
        assert [text for text in taken if not is_valid(schema, text)] == [], schema
        num_taken += len(taken)
    assert num_taken > 100 and num_refused > 10


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ('{"type": "number", "minimum": 9007199254740993}', "minimum is 9007199254740993"),
        ('{"minimum": 9007199254740993}', "minimum is 9007199254740993"),
        ('{"type": "number", "maximum": 0.10000000000000000001}', "maximum is 0.1000000000000000"),
        ('{"type": "number", "exclusiveMaximum": 1e400}', "exclusiveMaximum is 1e400"),
        ('{"type": "number", "minimum": 1e-300}', "minimum is 1e-300"),
        ('{"type": "integer", "maximum": 1e400}', "maximum is 1e400; .* 60 digits"),
        ('{"type": "number", "multipleOf": 0.10000000000000000001}', "multipleOf"),
        ('{"type": "integer", "maximum": 9007199254740993, "multipleOf": 5}', "maximum is 900719"),
        ('{"type": "string", "maxLength": 1e20}', "maxLength is 1e20"),
        ('{"type": "array", "minItems": 18446744073709551617}', "minItems is 184467440737095516"),
        ('{"type": "integer", "enum": [9007199254740993], "maximum": 3}', "no value"),
    ],
)
def test_limits_that_cannot_be_kept_are_refused_with_their_place(schema: str, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        as_json(schema, "1")
    inner = f'{{"type": "object", "properties": {{"p": {{"type": "array", "items": {schema}}}}}}}'
    with pytest.raises(RequestError) as caught:
        as_json(inner, "{}")
    assert isinstance(caught.value, GrammarTooComplexError) or "'p', items" in str(caught.value)


def test_multiples_whose_product_llguidance_cannot_hold_are_refused() -> None:
    schema = '{"type": "number", "allOf": [{"multipleOf": 7}, {"multipleOf": 0.000000001}]}'
    with pytest.raises(GrammarTooComplexError, match="multipleOf"):
        as_json(schema, "7")
    assert as_json('{"type": "array", "items": {"type": "number", "multipleOf": 0.01}}', "[0.25]")


# -- the answer's way back -------------------------------------------------------------------------


def arguments_of(tokenizer: Tokenizer, answer: str, schema: Any) -> str:
    function = {"name": "f", "parameters": {"type": "object", "properties": {"a": schema}}}
    parser = AnswerFormat.of(tokenizer).parser([], [{"type": "function", "function": function}])
    deltas = [delta for piece in pieces_of(tokenizer, answer) for delta in parser.push([piece])]
    deltas += parser.finish()
    return "".join(delta.text for delta in deltas if isinstance(delta, ToolCallArguments))


@pytest.mark.parametrize("number", [*IDS, *SPELLINGS, "12345678901234567890123"])
def test_numbers_of_a_call_leave_as_the_model_wrote_them(number: str) -> None:
    inner = f'{{"b": [{number}]}}'
    objects = {"type": "object"}
    for schema, written, value in [
        ({}, number, number),
        ({"type": "number"}, number, number),
        ({"type": "number"}, f'"{number}"', number),
        (objects, inner, inner),
        (objects, json.dumps(inner), inner),  # an object as text
    ]:
        call = f'<tool_call>\n{{"name": "f", "arguments": {{"a": {written}}}}}\n</tool_call>'
        assert arguments_of(QWEN, call, schema) == f'{{"a": {value}}}'
        whole = json.dumps(f'{{"a": {value}}}')  # all arguments as text
        call = f'<tool_call>\n{{"name": "f", "arguments": {whole}}}\n</tool_call>'
        assert arguments_of(QWEN, call, schema) == f'{{"a": {value}}}'
    call = f"<|tool_call>call:f{{a:{number}}}<tool_call|>"
    assert arguments_of(GEMMA, call, {"type": "number"}) == f'{{"a": {number}}}'


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("+12345678901234567890123", "12345678901234567890123"),
        (".12345678901234567890123", "0.12345678901234567890123"),
        ("-.50", "-0.50"),
        ("007.10", "7.10"),
        ("12_345_678_901_234_567_890.", "12345678901234567890"),
        ("1_0.5e3", "10.5e3"),
        ("nan", '"nan"'),
        (".", '"."'),
        ("1__0", '"1__0"'),
    ],
)
def test_numbers_that_are_nearly_json_keep_their_digits(written: str, value: str) -> None:
    call = f"<|tool_call>call:f{{a:{written}}}<tool_call|>"
    assert arguments_of(GEMMA, call, {"type": "number"}) == f'{{"a": {value}}}'
