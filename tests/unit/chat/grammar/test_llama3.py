"""Grammars of calls without marks: Llama 3's, and free text beside calls that may lack theirs."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from flashdraft.chat.answer_format import AnswerFormat
from flashdraft.chat.answers.deltas import ToolCallArguments, ToolCallBegin
from flashdraft.core import GrammarSpec
from flashdraft.errors import RequestError
from tests.unit.chat.chat_factory import CHATML_MARKS, byte_tokenizer, tool
from tests.unit.chat.grammar.test_tools import TOOLS, accepts, allowed_tokens, hermes_call, matcher
from tests.unit.chat.llama3_factory import LLAMA3_TEMPLATE, llama3_tokenizer
from tests.unit.chat.test_answer_format import read

LLAMA3 = llama3_tokenizer()
TOLD = byte_tokenizer(CHATML_MARKS, [], "{{ messages }}")
STRICT = [{"type": "function", "function": {**one["function"], "strict": True}} for one in TOOLS]


def call(name: str, **arguments: Any) -> str:
    return json.dumps({"name": name, "parameters": arguments}, ensure_ascii=False)


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize(
    ("choice", "answer", "fits"),
    [
        ("required", call("now"), True),
        ("required", call("get_weather", city='é"\\{', days=3), True),
        ("required", call("get_weather", days=3), False),
        ("required", call("get_weather", city="x", days=15), False),
        ("required", call("now", a=1), False),
        ("required", call("other"), False),
        ("required", call("now") + "; " + call("now"), False),
        ("required", call("now") + call("now"), False),
        ("required", "\n" + call("now"), False),
        ("required", "<|python_tag|>" + call("now"), False),
        ("required", "[" + call("now") + "]", False),
        ("required", '{"name":"now","parameters":{}}', False),
        ("required", '{"name": "now"}', False),
        ("required", "Hello", False),
        ("required", "", False),
        ("now", call("now"), True),
        ("now", call("get_weather", city="x"), False),
        ("auto", "Hello.\n", True),
        ("auto", "", True),
        ("auto", " \n\t", True),
        ("auto", "\n {", False),
        ("auto", "\x1c{", False),
        ("auto", "\u2003[", False),
        ("auto", "{}", False),
        ("auto", "[1]", False),
        ("auto", "Hello " + call("other"), True),
        ("auto", "é {[", True),
        ("auto", call("now"), True),
        ("auto", "<|python_tag|>" + call("now"), True),
        ("auto", "<|python_tag|>x", False),
        ("auto", "x<|python_tag|>" + call("now"), False),
        ("auto", call("now") + "\n", False),
        ("auto", call("get_weather", days=3), False),
        ("auto", '{"type": "function", "name": "now", "parameters": {}}', False),
    ],
)
def test_llama3_answers(choice: str, parallel: bool, answer: str, fits: bool) -> None:
    spec = AnswerFormat.of(LLAMA3).tool_grammar(STRICT, choice, parallel)
    assert accepts(LLAMA3, spec, answer) == fits


def test_auto_follows_the_schema_of_strict_tools_alone() -> None:
    spec = AnswerFormat.of(LLAMA3).tool_grammar([STRICT[0], TOOLS[1]], "auto", True)
    assert accepts(LLAMA3, spec, call("now", a=[1]))
    assert not accepts(LLAMA3, spec, call("get_weather", a=[1]))


@pytest.mark.parametrize(
    "name", ["<|python_tag|>", "<|eot_id|>", "<[3]>", 'a"b\\n', "é/'", "__proto__", "{x}", "%json"]
)
def test_names_are_text(name: str) -> None:
    """A name that looks like a mark is spelt by the tokens of its characters."""
    plain = byte_tokenizer([*CHATML_MARKS, "<|python_tag|>"], [], LLAMA3_TEMPLATE)
    tools = [tool(name, {"a": {"type": "integer"}})]
    spec = AnswerFormat.of(plain).tool_grammar(tools, name, False)
    found = matcher(plain, spec)
    text = json.dumps({"name": name, "parameters": {"a": 1}}, ensure_ascii=False)
    ids = [index for character in text for index in plain.encode(character)]
    assert found.try_consume_tokens(ids) == len(ids) and found.is_accepting()


def test_a_form_may_stand_in_the_place_of_a_call() -> None:
    """Both begin with a bracket and perhaps with the same key."""
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string"}, "city": {"type": "string"}},
        "additionalProperties": False,
    }
    answer_format = AnswerFormat.of(LLAMA3)
    calls = answer_format.tool_grammar(TOOLS, "required", True)
    form = GrammarSpec("json_schema", json.dumps(schema))
    spec = answer_format.form_grammar(form, (), True, calls)
    good = ['{"city": "x"}', '{"name": "nowhere"}', '{"name": "now"}', "{}", call("now")]
    bad = ['{"name": "now", "parameters": {"a": 1}}', '{"name": "nowhere", "parameters": {}}', "x"]
    assert [answer for answer in good if not accepts(LLAMA3, spec, answer)] == []
    assert [answer for answer in bad if accepts(LLAMA3, spec, answer)] == []


def test_refused_choices() -> None:
    with pytest.raises(RequestError, match="'other'; the tools are get_weather, now"):
        AnswerFormat.of(LLAMA3).tool_grammar(TOOLS, "other", True)
    scalar = {"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}
    with pytest.raises(RequestError, match="'f'"):
        AnswerFormat.of(LLAMA3).tool_grammar([scalar], "required", True)


def test_whatever_the_grammar_lets_through_is_read_as_such_a_call() -> None:
    properties = {
        "text": {"type": "string", "maxLength": 4},
        "count": {"type": "integer", "minimum": -5, "maximum": 500},
    }
    tools = [tool("f", properties, required=["text", "count"])]
    spec = AnswerFormat.of(LLAMA3).tool_grammar(tools, "f", False)
    special = LLAMA3.special_ids
    for seed in range(15):
        generator, found, ids = random.Random(seed), matcher(LLAMA3, spec), list[int]()
        while not found.is_accepting():
            choices = [t for t in allowed_tokens(found, LLAMA3.vocab_size) if t not in special]
            ids.append(generator.choice(choices))
            assert found.try_consume_tokens(ids[-1:]) == 1
        begin, arguments, _ = read(LLAMA3, LLAMA3.decode(ids, skip_special=False), tools=tools)
        assert isinstance(begin, ToolCallBegin) and isinstance(arguments, ToolCallArguments)
        value = json.loads(arguments.text)
        assert value.keys() == properties.keys()
        assert isinstance(value["text"], str) and -5 <= value["count"] <= 500


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize(
    ("answer", "fits"),
    [
        ("Hello.\n", True),
        ("", True),
        ("\n\n", True),
        ("Hello {[ " + hermes_call("now"), True),
        (hermes_call("now"), True),
        ("\n" + hermes_call("now"), True),
        ("<b>", True),
        ("Hello " + hermes_call("get_weather", days=99), False),
        ('{"name": "get_weather", "arguments": {}}', False),
        ('\n [{"name": "get_weather"', False),
        ("{}", False),
    ],
)
def test_told_models_call_by_schema_or_not_at_all(parallel: bool, answer: str, fits: bool) -> None:
    spec = AnswerFormat.of(TOLD).tool_grammar(STRICT, "auto", parallel)
    assert accepts(TOLD, spec, answer) == fits


def test_told_models_make_no_bare_call_after_another() -> None:
    spec = AnswerFormat.of(TOLD).tool_grammar(STRICT, "auto", True)
    first = hermes_call("now")
    assert accepts(TOLD, spec, f"{first}\n{first} and so on")
    assert not accepts(TOLD, spec, first + '\n{"name": "get_weather", "arguments": {}}')
