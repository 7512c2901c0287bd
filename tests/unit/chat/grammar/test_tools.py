"""Grammars of tool calls: what llguidance lets through, and what is refused before."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from flashdraft.chat.answer_format import AnswerFormat
from flashdraft.chat.answers.deltas import ToolCallArguments, ToolCallBegin, join_deltas
from flashdraft.core import GrammarSpec
from flashdraft.errors import RequestError
from flashdraft.models.tokenizer import Tokenizer
from tests.unit.chat.chat_factory import (
    CHATML_MARKS,
    byte_tokenizer,
    gemma4_tokenizer,
    pieces_of,
    qwen3_tokenizer,
    special_hermes_tokenizer,
    tool,
)

llguidance = pytest.importorskip("llguidance")

GEMMA4 = gemma4_tokenizer()
HERMES_TEMPLATE = "<think></think><tool_call></tool_call>"
HERMES = {
    "plain tokens": qwen3_tokenizer(),
    "special tokens": special_hermes_tokenizer(),
    "text": byte_tokenizer(CHATML_MARKS, [], HERMES_TEMPLATE),
}
CITY = {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1, "maximum": 14}}
TOOLS = [tool("get_weather", CITY, required=["city"]), tool("now")]


def matcher(tokenizer: Tokenizer, spec: GrammarSpec) -> Any:
    assert spec.kind == "lark"
    ends = [tokenizer.token_id(name) for name in ("<eos>", "<|im_end|>", "<|eot_id|>")]
    library = llguidance.LLTokenizer(
        tokenizer.to_json(), eos_token=[end for end in ends if end is not None]
    )
    source = llguidance.LLMatcher.grammar_from_lark(spec.text)
    found = llguidance.LLMatcher(library, source, log_level=0)
    assert not found.is_error(), found.get_error() + spec.text
    return found


def accepts(tokenizer: Tokenizer, spec: GrammarSpec, text: str) -> bool:
    found = matcher(tokenizer, spec)
    ids = tokenizer.encode(text)
    return found.try_consume_tokens(ids) == len(ids) and found.is_accepting()


def gemma_accepts(schema: Any, arguments: str) -> bool:
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    spec = AnswerFormat.of(GEMMA4).tool_grammar(tools, "f", False)
    return accepts(GEMMA4, spec, f"<|tool_call>call:f{arguments}<tool_call|>")


def value_accepts(schema: Any, value: str) -> bool:
    root = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return gemma_accepts(root, "{a:" + value + "}")


NOW, WEATHER = (
    "<|tool_call>call:now{}<tool_call|>",
    '<|tool_call>call:get_weather{city:<|"|>x<|"|>}',
)
WEATHER += "<tool_call|>"


@pytest.mark.parametrize(
    ("choice", "parallel", "answer", "fits"),
    [
        ("required", True, NOW, True),
        ("required", True, NOW + WEATHER, True),
        ("required", True, NOW + "<|tool_response>", True),
        ("required", False, WEATHER, True),
        ("required", False, NOW + NOW, False),
        ("required", True, "Hello", False),
        ("required", True, "", False),
        ("required", True, NOW + "x", False),
        ("required", True, "<|channel>thought\nhm\n<channel|>" + NOW, True),
        ("required", True, "<|channel>thought\nhm\n<channel|>", False),
        ("now", False, NOW, True),
        ("now", False, WEATHER, False),
        ("required", True, "<|tool_call>call:other{}<tool_call|>", False),
        ("required", True, "<|tool_call>call:now{a:1}<tool_call|>", False),
        ("auto", True, "Hello.\n", True),
        ("auto", True, "", True),
        ("auto", True, "<|channel>thought\nhm<channel|>Hello " + NOW + WEATHER, True),
        ("auto", True, "Hello <|tool_call>call:other{}<tool_call|>", False),
        ("auto", True, "Hello <|tool_call>call:now{a:[1,{b:null}]}<tool_call|>", True),
        ("auto", False, "Hello " + NOW + NOW, False),
    ],
)
def test_gemma4_answers(choice: str, parallel: bool, answer: str, fits: bool) -> None:
    assert (
        accepts(GEMMA4, AnswerFormat.of(GEMMA4).tool_grammar(TOOLS, choice, parallel), answer)
        == fits
    )


def test_gemma4_open_thought() -> None:
    prompt = GEMMA4.encode("<|turn>model\n<|channel>thought\n")
    spec = AnswerFormat.of(GEMMA4).tool_grammar(TOOLS, "required", False, prompt)
    assert accepts(GEMMA4, spec, "hm<channel|>" + NOW)
    assert accepts(GEMMA4, spec, "<channel|>" + NOW)
    assert not accepts(GEMMA4, spec, NOW)


def test_auto_follows_the_schema_of_strict_tools_alone() -> None:
    strict = {"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}
    spec = AnswerFormat.of(GEMMA4).tool_grammar([strict, TOOLS[1]], "auto", True)
    assert accepts(GEMMA4, spec, "Well: " + WEATHER)
    assert not accepts(GEMMA4, spec, "Well: <|tool_call>call:get_weather{}<tool_call|>")
    spec = AnswerFormat.of(GEMMA4).tool_grammar(TOOLS, "auto", True)
    assert accepts(GEMMA4, spec, "Well: <|tool_call>call:get_weather{}<tool_call|>")


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "string"}, ['<|"|><|"|>', '<|"|>a{,"\\\n🙂<|"|>'], ["x", '"x"', '<|"|>x', "1"]),
        ({"type": "string", "minLength": 2, "maxLength": 3}, ['<|"|>éé<|"|>'],
         ['<|"|>a<|"|>', '<|"|>abcd<|"|>', '<|"|><|"|>']),
        ({"type": "string", "maxLength": 0}, ['<|"|><|"|>'], ['<|"|>a<|"|>']),
        ({"type": "string", "pattern": "^[a-c]+/\\d$"}, ['<|"|>ab/1<|"|>'],
         ['<|"|>ab/<|"|>', '<|"|>xab/1<|"|>', '<|"|><|"|>']),
        ({"type": "string", "pattern": "b", "maxLength": 3}, ['<|"|>abc<|"|>', '<|"|>b<|"|>'],
         ['<|"|>ac<|"|>', '<|"|>abcd<|"|>']),
        ({"type": "string", "pattern": "^a*$"}, ['<|"|><|"|>', '<|"|>aa<|"|>'], ['<|"|>b<|"|>']),
        ({"type": "integer"}, ["0", "-12"], ["1.5", "01", "x", '<|"|>1<|"|>']),
        ({"type": "number"}, ["0", "-12.5", "1e-3"], [".5", "5.", "+1"]),
        ({"type": "number", "minimum": 0, "exclusiveMaximum": 2}, ["1.99", "0"], ["-1", "2", " 1"]),
        ({"type": "boolean"}, ["true", "false"], ["True", "1", "null"]),
        ({"type": ["boolean", "null"]}, ["true", "null"], ["1"]),
        ({"type": "boolean", "nullable": True}, ["true", "null"], ["1"]),
        ({"enum": ["a\"'", 1.5, True, None, ["x", {"k": 1}]]},
         ['<|"|>a"\'<|"|>', "1.5", "true", "null", '[<|"|>x<|"|>,{k:1}]'], ["false", "2"]),
        ({"const": "é"}, ['<|"|>é<|"|>'], ['<|"|>e<|"|>']),
        ({"type": "array", "items": {"type": "integer"}}, ["[]", "[1]", "[1,2]"],
         ["[1,]", "[,1]", "[true]", "[1"]),
        ({"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 3},
         ["[1,2]", "[1,2,3]"], ["[]", "[1]", "[1,2,3,4]"]),
        ({"type": "array", "maxItems": 1}, ["[]", "[1]"], ["[1,2]"]),
        ({"type": "array", "maxItems": 0}, ["[]"], ["[1]"]),
        ({"type": "array"}, ['[1,<|"|>x<|"|>,{a:[null]}]'], ["[x]"]),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}], "description": "d"}, ["1", "null"],
         ["true"]),
        ({"type": "object", "additionalProperties": {"type": "integer"}}, ["{}", "{x:1,y.z:2}"],
         ["{x:true}", "{x:1,}"]),
        ({"type": "object", "additionalProperties": False}, ["{}"], ["{x:1}"]),
        ({"type": "object"}, ["{}", "{x:{y:[1]}}"], ["{x}"]),
        ({}, ["1", "{a:1}", "[]", '<|"|>x<|"|>'], ["x"]),
        ({"allOf": [{"type": "integer"}]}, ["1"], ["true"]),
    ],
)  # fmt: skip
def test_gemma4_values(schema: Any, good: list[str], bad: list[str]) -> None:
    assert [value for value in good if not value_accepts(schema, value)] == []
    assert [value for value in bad if value_accepts(schema, value)] == []


def test_gemma4_keys_stand_in_declared_order_and_may_be_optional() -> None:
    integer = {"type": "integer"}
    properties = {"b": integer, "a": integer, "c": integer, "d": integer}
    schema = {"type": "object", "properties": properties, "required": ["a", "d"]}
    for good in ("{b:1,a:1,c:1,d:1}", "{a:1,d:1}", "{b:1,a:1,d:1}", "{a:1,c:1,d:1}"):
        assert gemma_accepts(schema, good), good
    for bad in (
        "{a:1,b:1,d:1}",
        "{a:1}",
        "{,a:1,d:1}",
        "{a:1,d:1,}",
        "{a:1,,d:1}",
        "{}",
        "{a:1 d:1}",
    ):
        assert not gemma_accepts(schema, bad), bad
    schema["required"] = []
    for good in ("{}", "{c:1}", "{b:1,d:1}", "{d:1}", "{b:1,a:1,c:1,d:1}"):
        assert gemma_accepts(schema, good), good
    for bad in ("{,c:1}", "{d:1,c:1}"):
        assert not gemma_accepts(schema, bad), bad


def test_gemma4_schemas_may_refer_to_themselves() -> None:
    node = {
        "type": "object",
        "properties": {"value": {"type": "integer"}, "next": {"$ref": "#/$defs/node"}},
        "required": ["value"],
    }
    schema = {
        "type": "object",
        "properties": {"list": {"$ref": "#/$defs/node"}},
        "$defs": {"node": node},
    }
    assert gemma_accepts(schema, "{list:{value:1,next:{value:2,next:{value:3}}}}")
    assert not gemma_accepts(schema, "{list:{value:1,next:{}}}")


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "array", "prefixItems": [{}]}, "prefixItems"),
        ({"type": "object", "patternProperties": {}}, "patternProperties"),
        ({"type": "object", "minProperties": 1}, "minProperties"),
        ({"not": {"type": "string"}}, "not"),
        ({"type": "string", "minimum": 1}, "minimum"),
        ({"allOf": [{}, {}]}, "allOf"),
        ({"anyOf": [{}], "properties": {}}, "properties"),
        ({"type": "string", "pattern": "(?=x)"}, r"\(\?="),
        ({"type": "string", "pattern": "(a)\\1"}, r"\\\\1"),
        ({"type": "string", "pattern": "a^b"}, r"'\^'"),
        ({"type": "string", "pattern": "^a|b$"}, "alternatives"),
        ({"type": "string", "pattern": "("}, "not valid"),
        ({"type": "string", "minLength": -1}, "minLength"),
        ({"type": "string", "minLength": 3, "maxLength": 2}, "minLength 3"),
        ({"type": "date"}, "'date'"),
        ({"type": ["string", {}]}, "known are"),
        ({"type": 3}, "known are"),
        ({"type": "object", "properties": {}, "required": [[]]}, "list of names"),
        ({"$ref": "#/$defs/x"}, "leads nowhere"),
        ({"$ref": "http://x/y"}, "leads nowhere"),
        ({"enum": []}, "enum"),
        (False, "False"),
        ({"type": "object", "properties": {"a:b": {}}}, "'a:b'"),
        ({"type": "object", "required": ["z"]}, "'z'"),
    ],
)
def test_gemma4_refuses_what_a_grammar_cannot_say(schema: Any, named: str) -> None:
    with pytest.raises(RequestError, match=named):
        value_accepts(schema, "1")
    if isinstance(schema, dict) and "object" in str(schema.get("type")):
        with pytest.raises(RequestError, match="'f'"):
            gemma_accepts(schema, "{}")


def test_gemma4_refuses_bottomless_schemas() -> None:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(100):
        schema = {"type": "array", "items": schema}
    with pytest.raises(RequestError, match="64 levels"):
        value_accepts(schema, "[]")


def hermes_call(name: str, **arguments: Any) -> str:
    call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{call}\n</tool_call>"


@pytest.mark.parametrize("kind", HERMES)
@pytest.mark.parametrize(
    ("choice", "parallel", "answer", "fits"),
    [
        ("required", True, hermes_call("now"), True),
        ("required", True, hermes_call("get_weather", city="é", days=3), True),
        ("required", True, hermes_call("now") + "\n" + hermes_call("now"), True),
        ("required", True, "<think>\nhm\n</think>\n\n" + hermes_call("now"), True),
        ("required", False, hermes_call("now") + "\n" + hermes_call("now"), False),
        ("required", True, "Hello", False),
        ("required", True, hermes_call("other"), False),
        ("required", True, hermes_call("now", a=1), False),
        ("required", True, hermes_call("get_weather", days=3), False),
        ("required", True, hermes_call("get_weather", city="x", days=15), False),
        ("now", True, hermes_call("get_weather", city="x"), False),
        ("auto", True, "Hello.\n", True),
        ("auto", True, "Hello.\n" + hermes_call("now") + "\n" + hermes_call("now"), True),
        ("auto", True, "<think>hm</think>Hello.\n" + hermes_call("get_weather", days=99), True),
        ("auto", True, "Hello.\n" + hermes_call("other"), False),
        ("auto", False, "Hello.\n" + hermes_call("now") + "\n" + hermes_call("now"), False),
    ],
)
def test_hermes_answers(kind: str, choice: str, parallel: bool, answer: str, fits: bool) -> None:
    tokenizer = HERMES[kind]
    assert (
        accepts(tokenizer, AnswerFormat.of(tokenizer).tool_grammar(TOOLS, choice, parallel), answer)
        == fits
    )


@pytest.mark.parametrize("kind", HERMES)
def test_hermes_open_thought(kind: str) -> None:
    tokenizer = HERMES[kind]
    prompt = tokenizer.encode("<|im_start|>assistant\n<think>\n")
    spec = AnswerFormat.of(tokenizer).tool_grammar(TOOLS, "required", False, prompt)
    assert accepts(tokenizer, spec, "hm\n</think>\n\n" + hermes_call("now"))
    assert not accepts(tokenizer, spec, hermes_call("now"))


def test_references_stay_inside_their_tool() -> None:
    tools = [
        tool("f", {"a": {"$ref": "#/$defs/x"}}, required=["a"], **{"$defs": {"x": {"type": kind}}})
        for kind in ("integer", "boolean")
    ]
    tools[1]["function"]["name"] = "g"
    tokenizer = HERMES["plain tokens"]
    spec = AnswerFormat.of(tokenizer).tool_grammar(tools, "required", False)
    assert accepts(tokenizer, spec, hermes_call("f", a=1))
    assert accepts(tokenizer, spec, hermes_call("g", a=True))
    assert not accepts(tokenizer, spec, hermes_call("g", a=1))
    spec = AnswerFormat.of(GEMMA4).tool_grammar(tools, "required", False)
    assert accepts(GEMMA4, spec, "<|tool_call>call:g{a:true}<tool_call|>")
    assert not accepts(GEMMA4, spec, "<|tool_call>call:g{a:1}<tool_call|>")


@pytest.mark.parametrize("tokenizer", [GEMMA4, *HERMES.values()])
def test_refused_choices(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="'other'; the tools are get_weather, now"):
        AnswerFormat.of(tokenizer).tool_grammar(TOOLS, "other", True)
    with pytest.raises(RequestError, match="empty"):
        AnswerFormat.of(tokenizer).tool_grammar([], "required", True)
    with pytest.raises(RequestError, match="'f'"):
        scalar = {"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}
        AnswerFormat.of(tokenizer).tool_grammar([scalar], "required", True)


def test_a_model_without_calls_is_forced_to_those_it_was_told_of() -> None:
    plain = byte_tokenizer(CHATML_MARKS, [])
    spec = AnswerFormat.of(plain).tool_grammar(TOOLS, "required", True)
    assert accepts(plain, spec, hermes_call("get_weather", city="x"))
    assert not accepts(plain, spec, "Hello")
    assert not accepts(plain, spec, hermes_call("get_weather", days=2))
    assert not accepts(plain, spec, "<think>hm</think>" + hermes_call("now"))


def allowed_tokens(found: Any, size: int) -> list[int]:
    mask = found.compute_bitmask()
    return [token for token in range(size) if mask[token // 8] >> token % 8 & 1]


@pytest.mark.parametrize("tokenizer", [GEMMA4, HERMES["plain tokens"]], ids=["gemma4", "qwen3"])
def test_whatever_the_grammar_lets_through_is_read_as_such_a_call(tokenizer: Tokenizer) -> None:
    """Random walks through the grammar, read by the parser: arguments of the declared types."""
    properties = {
        "text": {"type": "string", "maxLength": 4},
        "count": {"type": "integer", "minimum": -5, "maximum": 500},
        "flags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
        "mode": {"enum": ["fast", "slow", None]},
    }
    tools = [tool("f", properties, required=["text", "count"])]
    spec = AnswerFormat.of(tokenizer).tool_grammar(tools, "f", False)
    ends = {tokenizer.token_id(name) for name in ("<eos>", "<|im_end|>")}
    starts = [tokenizer.token_id(name) for name in ("<|tool_call>", "<tool_call>")]
    for seed in range(25):
        generator, found, ids = random.Random(seed), matcher(tokenizer, spec), list[int]()
        while not found.is_accepting():
            choices = [t for t in allowed_tokens(found, tokenizer.vocab_size) if t not in ends]
            token = next((t for t in choices if t in starts), generator.choice(choices))
            assert found.try_consume_tokens([token]) == 1
            ids.append(token)
        parser = AnswerFormat.of(tokenizer).parser((), tools)
        text = tokenizer.decode(ids, skip_special=False)
        deltas = join_deltas([*parser.push(pieces_of(tokenizer, text)), *parser.finish()])
        assert isinstance(deltas[0], ToolCallBegin) and isinstance(deltas[1], ToolCallArguments)
        arguments = json.loads(deltas[1].text)
        assert set(arguments) <= properties.keys() and len(deltas) == 3
        assert isinstance(arguments["text"], str) and len(arguments["text"]) <= 4
        assert type(arguments["count"]) is int and -5 <= arguments["count"] <= 500
        assert all(type(flag) is bool for flag in arguments.get("flags", []))
        assert arguments.get("mode") in ("fast", "slow", None)
