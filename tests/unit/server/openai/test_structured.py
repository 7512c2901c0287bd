"""Grammars that the server makes itself, compiled and followed: thoughts, then the form."""

from __future__ import annotations

import json
from typing import Any

import pytest

from flashdraft.chat.answer_format import AnswerFormat
from flashdraft.chat.answers.gemma4 import knows as knows_gemma4
from flashdraft.chat.grammar.compiler import grammar_compiler
from flashdraft.core import GrammarSpec
from flashdraft.models.tokenizer import Tokenizer
from tests.tiny import END_OF_TURN
from tests.unit.server.scripted import CALL, MODEL, WEATHER, Scripted, make_tokenizer

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
THOUGHT = "<|channel>thought\nhm, {1}<channel|>"
FORMS = [
    (GrammarSpec("json_schema", json.dumps(SCHEMA)), '{"a": 12}', '{"b": 12}'),
    (GrammarSpec("json_object"), '{"x": [1, 2]}', "[1]"),
    (GrammarSpec("regex", "a/b+\n?"), "a/bbb", "ab"),
    (GrammarSpec("choice", '["yes", "no \\"x\\""]'), 'no "x"', "maybe"),
]


def matches(spec: GrammarSpec, text: str) -> bool:
    """Whether a grammar takes a whole text."""
    tokenizer = make_tokenizer()
    compiler = grammar_compiler(tokenizer, tokenizer.vocab_size, [END_OF_TURN])
    assert compiler is not None, "llguidance is not installed"
    matcher = compiler(spec).start()
    return all(matcher.advance(token) for token in tokenizer.encode(text)) and matcher.may_end()


@pytest.mark.parametrize(("form", "good", "bad"), FORMS)
def test_thoughts_are_free_and_the_form_follows(form: GrammarSpec, good: str, bad: str) -> None:
    tokenizer = make_tokenizer()
    prompt = tokenizer.encode("<|think|><|turn>user\nhi<turn|>\n<|turn>model\n")
    spec = AnswerFormat.of(tokenizer).form_grammar(form, prompt, thinking=True)
    assert matches(spec, good) and matches(spec, THOUGHT + good)
    assert not matches(spec, bad) and not matches(spec, THOUGHT + bad)
    assert not matches(spec, THOUGHT)


@pytest.mark.parametrize("letter", [*map(chr, range(0x20)), *'"\\/\x7f\x85\u2028'])
def test_choices_of_any_character_after_thoughts(letter: str) -> None:
    tokenizer = make_tokenizer()
    text = f"a{letter}b"
    prompt = tokenizer.encode("<|think|><|turn>user\nhi<turn|>\n<|turn>model\n")
    for choices in ([text], ["x", text]):
        form = GrammarSpec("choice", json.dumps(choices))
        spec = AnswerFormat.of(tokenizer).form_grammar(form, prompt, thinking=True)
        assert matches(spec, THOUGHT + text) and matches(spec, text)
        assert not matches(spec, "ab") and not matches(spec, THOUGHT + "a")


@pytest.mark.parametrize(
    ("fields", "may_think"),
    [
        ({}, False),  # as Gemma 4's template has it
        ({"chat_template_kwargs": {"enable_thinking": False}}, False),
        ({"reasoning_effort": "none"}, False),
        ({"reasoning_effort": "high"}, True),
    ],
)
def test_a_forced_call_is_not_preceded_by_thoughts_that_nobody_wants(
    fields: dict[str, Any], may_think: bool
) -> None:
    server = Scripted(CALL)
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}}
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "tools": [tool]}
    for more in ({"tool_choice": "required"}, {"response_format": {"type": "json_object"}}):
        answer = server.post("/v1/chat/completions", {**body, **fields, **more})
        assert answer.status_code == 200
        grammar = server.engine.requests[-1].grammar
        assert grammar is not None and matches(grammar, CALL)
        assert matches(grammar, THOUGHT + CALL) is may_think


def test_a_thought_that_the_prompt_opened_is_ended_first() -> None:
    tokenizer = make_tokenizer()
    prompt = tokenizer.encode("<|turn>model\n<|channel>thought\n")
    spec = AnswerFormat.of(tokenizer).form_grammar(FORMS[0][0], prompt, thinking=True)
    assert matches(spec, 'hm<channel|>{"a": 1}')
    assert not matches(spec, '{"a": 1}')


def test_without_thinking_the_form_is_all() -> None:
    tokenizer = make_tokenizer()
    prompt = tokenizer.encode("<|turn>model\n<|channel>thought\n<channel|>")
    assert (
        AnswerFormat.of(tokenizer).form_grammar(FORMS[0][0], prompt, thinking=False) == FORMS[0][0]
    )


def test_the_format_of_answers_is_found_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Tokenizer] = []

    def knows(tokenizer: Tokenizer) -> bool:
        asked.append(tokenizer)
        return knows_gemma4(tokenizer)

    monkeypatch.setattr("flashdraft.chat.answers.gemma4.knows", knows)
    server = Scripted(CALL)
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}}
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "tools": [tool]}
    form = {"response_format": {"type": "json_object"}}
    for more in ({}, {"tool_choice": "required"}, {"n": 3}, form):
        assert server.post("/v1/chat/completions", {**body, **more}).status_code == 200
    assert asked == [server.serving.tokenizer]


def test_forced_calls_of_all_tools_can_be_compiled() -> None:
    server = Scripted("x")
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}],
        "tool_choice": "required",
    }
    assert server.post("/v1/chat/completions", body).status_code == 200
    grammar = server.engine.requests[0].grammar
    assert grammar is not None
    assert matches(grammar, "<|tool_call>call:f{a:1}<tool_call|>")
    assert not matches(grammar, "<|tool_call>call:f{b:1}<tool_call|>")


@pytest.mark.parametrize("thinking", [False, True])
def test_beside_tools_an_answer_has_the_form_or_calls(thinking: bool) -> None:
    server = Scripted("x")
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}],
        "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}},
        "chat_template_kwargs": {"enable_thinking": thinking},
    }
    assert server.post("/v1/chat/completions", body).status_code == 200
    grammar = server.engine.requests[0].grammar
    assert grammar is not None
    assert matches(grammar, '{"a": 1}')
    assert matches(grammar, "<|tool_call>call:f{a:1}<tool_call|>")
    assert matches(grammar, THOUGHT + '{"a": 1}') is thinking
    assert not matches(grammar, "free text")
    assert not matches(grammar, '{"b": 1}')
