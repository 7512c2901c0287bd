"""Llama 3: how it is told from others, and conversations with calls in its own words."""

from __future__ import annotations

import json
from typing import Any

import pytest

from flashdraft.chat.answer_format import AnswerFormat
from flashdraft.chat.answers import llama3
from flashdraft.chat.answers.deltas import ToolCallBegin
from flashdraft.chat.templates import encode_chat, render_chat
from flashdraft.errors import RequestError
from flashdraft.models.tokenizer import Tokenizer
from tests.unit.chat.answer_corpus import called
from tests.unit.chat.chat_factory import (
    HERMES_MARKS,
    TOOLS,
    byte_tokenizer,
    gemma4_tokenizer,
    qwen3_tokenizer,
)
from tests.unit.chat.llama3_factory import LLAMA3_MARKS, LLAMA3_TEMPLATE, llama3_tokenizer
from tests.unit.chat.test_answer_format import read

LLAMA3 = llama3_tokenizer()
OTHERS = {
    "no token": byte_tokenizer(LLAMA3_MARKS[:-1], [], LLAMA3_TEMPLATE),
    "a token that is text": byte_tokenizer(LLAMA3_MARKS[:-1], ["<|python_tag|>"], LLAMA3_TEMPLATE),
    "no template": byte_tokenizer(LLAMA3_MARKS, []),
    "no tools": byte_tokenizer(LLAMA3_MARKS, [], "{{ messages[0].content }}"),
    "marked calls": byte_tokenizer(LLAMA3_MARKS, HERMES_MARKS, LLAMA3_TEMPLATE),
    "marked calls in the template": byte_tokenizer(
        LLAMA3_MARKS, [], LLAMA3_TEMPLATE + "<tool_call></tool_call>"
    ),
    "thoughts": byte_tokenizer(LLAMA3_MARKS, [], LLAMA3_TEMPLATE + "<think></think>"),
    "gemma4": gemma4_tokenizer(),
    "qwen3": qwen3_tokenizer(),
}


def test_token_and_template_tell() -> None:
    assert llama3.knows(LLAMA3)
    answer_format = AnswerFormat.of(LLAMA3)
    assert answer_format.told_marks is None
    assert not answer_format.marks_thoughts and not answer_format.thinks_by_default


@pytest.mark.parametrize("tokenizer", OTHERS.values(), ids=OTHERS.keys())
def test_others_are_not_taken_for_it(tokenizer: Tokenizer) -> None:
    assert not llama3.knows(tokenizer)


def conversation(result: Any) -> list[dict[str, Any]]:
    call = {"name": "get_weather", "arguments": '{"city": "Łódź"}'}
    return [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "tool_calls": [{"id": "c1", "type": "function", "function": call}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": result},
    ]


def test_calls_and_results_are_rendered_and_read_back() -> None:
    text = render_chat(LLAMA3, conversation('{"degrees": 3}'), tools=TOOLS)
    assert text.startswith(
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nEnvironment: ipython"
    )
    for offered in TOOLS:
        assert json.dumps(offered["function"]["name"]) in text
    answered = text.split("<|start_header_id|>assistant<|end_header_id|>\n\n")[1]
    call, _, rest = answered.partition("<|eot_id|>")
    assert read(LLAMA3, call) == called(0, "get_weather", city="Łódź")
    assert rest == ('<|start_header_id|>ipython<|end_header_id|>\n\n{"degrees": 3}<|eot_id|>')


def test_no_prompt_leaves_a_thought_open() -> None:
    for question in ("<think>", "<|python_tag|>", "Hi"):
        ids = encode_chat(LLAMA3, [{"role": "user", "content": question}], tools=TOOLS)
        assert AnswerFormat.of(LLAMA3).open_thought(ids) is None


def test_the_tag_in_a_question_does_not_count() -> None:
    """Only what the model writes is read, however the question was cut into tokens."""
    question = '<|python_tag|>{"name": "now", "parameters": {}}'
    ids = encode_chat(LLAMA3, [{"role": "user", "content": question}], tools=TOOLS)
    parser = AnswerFormat.of(LLAMA3).parser(ids, TOOLS)
    deltas = [*parser.push(["Hello"]), *parser.finish()]
    assert not any(isinstance(delta, ToolCallBegin) for delta in deltas)


def test_its_template_refuses_several_calls() -> None:
    """Hence a forced answer has one; the parser reads as many as the model writes."""
    messages = conversation("x")
    messages[2]["tool_calls"] *= 2
    with pytest.raises(RequestError, match="one tool call"):
        render_chat(LLAMA3, messages, tools=TOOLS)
