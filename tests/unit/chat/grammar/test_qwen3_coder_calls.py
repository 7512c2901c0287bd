"""Grammars of Qwen3-Coder's calls: what llguidance lets through, and that it is read as such."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from flashdraft.chat.answer_format import AnswerFormat
from flashdraft.chat.answers.deltas import ToolCallArguments, ToolCallBegin, join_deltas
from flashdraft.errors import RequestError
from tests.unit.chat.answers.test_qwen3_coder import FAMILIES, PLAIN, call
from tests.unit.chat.chat_factory import pieces_of, tool
from tests.unit.chat.grammar.test_tools import accepts, allowed_tokens, matcher

jsonschema = pytest.importorskip("jsonschema")
pytest.importorskip("llguidance")

CITY = {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1, "maximum": 14}}
TOOLS = [tool("get_weather", CITY, required=["city"]), tool("now")]
NOW, BARE = call("now"), "<function=now>\n</function>"
WEATHER = call("get_weather", ("city", "é"), ("days", "3"))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("choice", "parallel", "answer", "fits"),
    [
        ("required", True, NOW, True),
        ("required", True, WEATHER, True),
        ("required", True, f"{NOW}\n{WEATHER}", True),
        ("required", True, f"<think>\nhm\n</think>\n\n{NOW}", True),
        ("required", False, f"{NOW}\n{NOW}", False),
        ("required", True, "Hello", False),
        ("required", True, BARE, False),
        ("required", True, call("other"), False),
        ("required", True, call("now", ("a", "1")), False),
        ("required", True, call("get_weather", ("days", "3")), False),
        ("required", True, call("get_weather", ("city", "x"), ("days", "15")), False),
        ("required", True, call("get_weather", ("days", "3"), ("city", "x")), False),
        ("required", True, call("get_weather", ("city", "x"), ("city", "x")), False),
        ("now", True, WEATHER, False),
        ("auto", True, "Hello <b>.\n", True),
        ("auto", True, f"Hello.\n{NOW}\n{NOW}", True),
        ("auto", True, f"<think>hm</think>Hello.\n{call('get_weather', ('x', 'y'))}", True),
        ("auto", True, f"Hello.\n{call('other')}", False),
        ("auto", False, f"Hello.\n{NOW}\n{NOW}", False),
        ("auto", True, f"Hello.\n\n{BARE}", True),
        ("auto", True, f"Hello.\n\n{BARE}\n</tool_call>", True),
        ("auto", True, f"Hello.\n\n{BARE}</tool_call>\n{NOW}\nx", True),
        ("auto", False, f"Hello.\n\n{BARE}\n</tool_call>", True),
        ("auto", True, "Hello.\n\n<function=other>\n</function>", False),
    ],
)
def test_answers(family: str, choice: str, parallel: bool, answer: str, fits: bool) -> None:
    tokenizer = FAMILIES[family]
    spec = AnswerFormat.of(tokenizer).tool_grammar(TOOLS, choice, parallel)
    assert accepts(tokenizer, spec, answer) == fits


@pytest.mark.parametrize("family", FAMILIES)
def test_an_open_thought_is_ended_first(family: str) -> None:
    tokenizer = FAMILIES[family]
    prompt = tokenizer.encode("<|im_start|>assistant\n<think>\n")
    spec = AnswerFormat.of(tokenizer).tool_grammar(TOOLS, "required", False, prompt)
    assert accepts(tokenizer, spec, f"hm\n</think>\n\n{NOW}")
    assert not accepts(tokenizer, spec, NOW)


def test_auto_follows_the_schema_of_strict_tools_alone() -> None:
    strict = {"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}
    spec = AnswerFormat.of(PLAIN).tool_grammar([strict, TOOLS[1]], "auto", True)
    assert accepts(PLAIN, spec, f"Well: {WEATHER}")
    assert not accepts(PLAIN, spec, f"Well: {call('get_weather')}")
    assert not accepts(PLAIN, spec, "Well: <function=get_weather>\n</function>")


def value_accepts(schema: Any, value: str, **root: Any) -> bool:
    tools = [tool("f", {"a": schema}, required=["a"], **root)]
    spec = AnswerFormat.of(PLAIN).tool_grammar(tools, "f", False)
    return accepts(PLAIN, spec, call("f", ("a", value)))


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "string"}, ["", "x", "\n", 'a{,"\\\n🙂', "a < b </p> </function>", "null", "1"],
         ["a</parameter>b", "<parameter=x>", "</function>\n</tool_call>"]),
        ({}, ["", "x", "[1]"], ["a</parameter>b"]),
        (True, ["x"], []),
        ({"type": "string", "minLength": 2, "maxLength": 3}, ["éé", "a\nb"], ["a", "abcd", ""]),
        ({"type": "string", "maxLength": 0}, [""], ["a"]),
        ({"type": "string", "minLength": 40}, ["x" * 40], ["x", "</parameter>" * 40]),
        ({"type": "string", "pattern": "^[a-c]+/\\d$"}, ["ab/1"], ["ab/", "xab/1", ""]),
        ({"type": "string", "pattern": "b", "maxLength": 3}, ["abc", "b"], ["ac", "abcd"]),
        ({"type": "string", "pattern": "^a*$"}, ["", "aa"], ["b"]),
        ({"pattern": "^a$"}, ["a"], ["b"]),
        ({"enum": ["fast", 'so "so"', "<b>\n"]}, ["fast", 'so "so"', "<b>\n"],
         ["", "fas", '"fast"']),
        ({"const": "é"}, ["é"], ["e"]),
        ({"type": "string", "enum": ["a", 1]}, ["a"], ["1"]),
        ({"enum": ["auto", 1.5, True, None, ["x"]]}, ["auto", "1.5", "true", "null", '["x"]'],
         ["x", "false", "None"]),
        ({"type": "integer"}, ["0", "-12"], ["1.5", "01", "x", '"1"', ""]),
        ({"type": "boolean"}, ["true"], ["True", "1"]),
        ({"type": ["boolean", "null"]}, ["true", "null"], ["1"]),
        ({"type": "array", "items": {"type": "string"}}, ["[]", '["a", "</parameter>"]'], ["[1]"]),
        ({"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]},
         ['{"x": 1}'], ["{}", '{"x": 1, "y": 2}']),
        ({"type": ["string", "null"]}, ["null", "x", "nulls", "", "1"], ["None"]),
        ({"type": "string", "nullable": True}, ["null", "x"], ["None"]),
        ({"anyOf": [{"type": "string"}, {"type": "integer", "minimum": 10}], "title": "t"},
         ["12", "x", "1.5", "12 px"], ["5", "5.0", "-3"]),
        ({"type": ["string", "number"], "minLength": 2, "minimum": 3}, ["3", "xy"],
         ["x", "1", "2.5", "10x"]),
        ({"type": ["string", "number"]}, ["3", "-1.5e3", "2 x"], []),
        ({"type": ["integer", "string", "boolean"], "multipleOf": 3}, ["9", "true", "x"],
         ["8", "True", "8x"]),
        ({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "integer"}}]},
         ["[1]", "x", "{}"], ['["a"]', "[x"]),
        ({"oneOf": [{"enum": ["auto"]}, {"type": "integer"}]}, ["auto", "3"], ["x"]),
        ({"allOf": [{"type": "string", "maxLength": 1}]}, ["x"], ["xy"]),
        ({"$ref": "#/$defs/mode"}, ["fast", "3"], ["slow"]),
        ({"anyOf": [{"$ref": "#/$defs/mode"}, {"type": "null"}]}, ["fast", "3", "null"], ["x"]),
        ({"type": "array", "items": {"$ref": "#/$defs/mode"}}, ['["fast", 3]'], ["[null]"]),
        ({"type": "integer", "enum": [10**23 + 1]}, [str(10**23 + 1)], ["1", str(10**23)]),
    ],
)  # fmt: skip
def test_values(schema: Any, good: list[str], bad: list[str]) -> None:
    root = {"$defs": {"mode": {"anyOf": [{"const": "fast"}, {"type": "integer"}]}}}
    assert [value for value in good if not value_accepts(schema, value, **root)] == []
    assert [value for value in bad if value_accepts(schema, value, **root)] == []


def test_parameters_stand_in_declared_order_and_may_be_optional() -> None:
    integer = {"type": "integer"}
    tools = [tool("f", {"b": integer, "a": integer, "c": {}}, required=["a"])]
    spec = AnswerFormat.of(PLAIN).tool_grammar(tools, "f", False)
    for good in ("bac", "a", "ba", "ac"):
        assert accepts(PLAIN, spec, call("f", *((name, "1") for name in good))), good
    for bad in ("", "b", "ab", "ca", "aa", "bc"):
        assert not accepts(PLAIN, spec, call("f", *((name, "1") for name in bad))), bad


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (None, [(), (("x", "1"), ("y.z", "a\nb"))], [(("a b", "1"),)]),
        ({"type": "object"}, [(), (("x", "1"),)], []),
        ({"type": "object", "additionalProperties": {"type": "integer"}}, [(), (("x", "1"),)],
         [(("x", "y"),)]),
        ({"type": "object", "additionalProperties": False}, [()], [(("x", "1"),)]),
        ({"type": "object", "properties": {}}, [()], [(("x", "1"),)]),
    ],
)  # fmt: skip
def test_parameters_that_are_not_declared(schema: Any, good: Any, bad: Any) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    spec = AnswerFormat.of(PLAIN).tool_grammar(tools, "f", False)
    assert all(accepts(PLAIN, spec, call("f", *parameters)) for parameters in good)
    assert not any(accepts(PLAIN, spec, call("f", *parameters)) for parameters in bad)


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"type": "string", "pattern": "(?=x)"}, r"\(\?="),
        ({"type": "string", "minLength": 3, "maxLength": 2}, "minLength 3"),
        ({"type": "string", "minimum": 1}, "minimum"),
        ({"type": "string", "not": {"const": "x"}}, "not"),
        ({"properties": {"x": {}}}, "properties without a type"),
        ({"type": ["string", "date"]}, "'date'"),
        ({"type": []}, "known are"),
        ({"type": ["string", {}]}, "known are"),
        ({"$ref": "#/$defs/x"}, "leads nowhere"),
        ({"anyOf": [{"$ref": "#"}, {"type": "string"}]}, "none of the schema's"),
        ({"type": "array", "items": {"$ref": "#/properties/a"}}, "none of the schema's"),
        ({"type": "array", "items": {"$ref": "#/$defs/x"}}, "none of the schema's"),
        ({"anyOf": [{"type": "string"}, {"type": "integer", "not": {}}]}, "not"),
        ({"anyOf": []}, "anyOf"),
        ({"anyOf": [{"type": "string"}, False]}, "False"),
        ({"allOf": [{"type": "string"}, {"maxLength": 2}]}, "allOf"),
        ({"type": "string", "anyOf": [{"maxLength": 2}]}, "type beside anyOf"),
        ({"enum": []}, "enum"),
        ({"type": "string", "enum": [1]}, "enum"),
        ({"enum": ["a</parameter>b"]}, "tag"),
        ({"enum": ["</function></tool_call>"]}, "tag"),
        ({"enum": ["null", None]}, "type null"),
        ({"anyOf": [{"const": "1"}, {"type": "integer"}]}, "type integer"),
        ({"const": "\ud800"}, "surrogate"),
        (False, "False"),
        ({"anyOf": [{"const": str(number)} for number in range(70)]}, "64 alternatives"),
    ],
)  # fmt: skip
def test_what_cannot_be_written_is_refused(schema: Any, named: str) -> None:
    with pytest.raises(RequestError, match=named):
        value_accepts(schema, "1")


@pytest.mark.parametrize(
    ("parameters", "named"),
    [
        ({"type": "object", "properties": {"a>b": {}}}, "a>b"),
        ({"type": "object", "properties": {" a": {}}}, "white space"),
        ({"type": "object", "properties": {"": {}}}, "cannot be called"),
        ({"type": "object", "properties": [1]}, "must be an object"),
        ({"type": "object", "required": ["z"]}, "'z'"),
        ({"type": "object", "minProperties": 1}, "minProperties"),
        ({"anyOf": [{"type": "object"}]}, "anyOf"),
        ({"type": "string"}, "'f'"),
    ],
)
def test_parameters_that_cannot_be_written_are_refused(parameters: Any, named: str) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    with pytest.raises(RequestError, match=named):
        AnswerFormat.of(PLAIN).tool_grammar(tools, "f", False)


def test_a_tools_name_must_fit_into_its_tag() -> None:
    for name in ("a>b", "a\nb", " a"):
        with pytest.raises(RequestError, match="cannot be called"):
            AnswerFormat.of(PLAIN).tool_grammar([tool(name)], "required", False)


SCHEMA = {
    "type": "object",
    "properties": {
        "text": {"type": "string", "maxLength": 12},
        "word": {"type": "string", "pattern": "^[<a-c/\\n]{1,9}$"},
        "count": {"type": "integer", "minimum": -5, "maximum": 500},
        "flags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
        "mode": {"enum": ["fast", "slow\n", None, 3]},
        "size": {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "integer", "minimum": 100},
                           {"type": "null"}]},
        "many": {"anyOf": [{"enum": ["all"]}, {"type": "array", "maxItems": 2,
                                               "items": {"type": "string", "maxLength": 3}}]},
        "when": {"type": ["string", "boolean"], "pattern": "^[a-zT]{0,5}$"},
        "place": {"$ref": "#/$defs/place"},
    },
    "required": ["text", "count"],
    "$defs": {
        "place": {
            "type": "object",
            "properties": {"x": {"type": "number", "minimum": 0, "maximum": 9},
                           "name": {"type": "string", "maxLength": 3}},
            "required": ["name"],
            "additionalProperties": False,
        }
    },
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_whatever_the_grammar_lets_through_is_valid_by_the_schema(family: str) -> None:
    """Random walks through the grammar, read by the parser; tags and brackets come often."""
    tokenizer = FAMILIES[family]
    tools = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]
    answer_format = AnswerFormat.of(tokenizer)
    spec = answer_format.tool_grammar(tools, "f", False, thinking=False)
    validator = jsonschema.Draft202012Validator(SCHEMA)
    likely = {tokenizer.encode(character)[0] for character in '</>=\n[]{}"nulltrueparmi0123'}
    end = tokenizer.token_id("<|im_end|>")
    for seed in range(20):
        generator, found, ids = random.Random(seed), matcher(tokenizer, spec), list[int]()
        while not found.is_accepting():
            choices = [t for t in allowed_tokens(found, tokenizer.vocab_size) if t != end]
            some = [token for token in choices if token in likely]
            token = generator.choice(some if some and generator.random() < 0.8 else choices)
            assert found.try_consume_tokens([token]) == 1
            ids.append(token)
            assert len(ids) < 3000
        text = tokenizer.decode(ids, skip_special=False)
        parser = answer_format.parser((), tools)
        deltas = join_deltas([*parser.push(pieces_of(tokenizer, text)), *parser.finish()])
        assert len(deltas) == 3, text
        assert isinstance(deltas[0], ToolCallBegin) and isinstance(deltas[1], ToolCallArguments)
        validator.validate(json.loads(deltas[1].text))
