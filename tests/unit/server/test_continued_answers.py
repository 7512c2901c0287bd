"""An answer that goes on where the last message ends, in every API that has it."""

from __future__ import annotations

from typing import Any

import pytest

from flashdraft.server.app import create_app
from tests.unit.server.scripted import WEATHER, Scripted

CHAT, MESSAGES, COUNT = "/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens"
OLLAMA = "/api/chat"
BEGUN = {"role": "assistant", "content": 'Here is it:\n{"a": '}
SAID = [{"role": "user", "content": "hi"}, BEGUN]
FIELDS: dict[str, dict[str, Any]] = {
    CHAT: {"continue_final_message": True, "add_generation_prompt": False},
    MESSAGES: {"max_tokens": 50},
    OLLAMA: {"stream": False},
}
TOOL = {"name": "f", "parameters": WEATHER}
CHAT_TOOLS = [{"type": "function", "function": TOOL}]
CALLED = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def text_of(path: str, made: Any) -> str:
    if path == CHAT:
        return str(made["choices"][0]["message"]["content"])
    return str(made["content"][0]["text"] if path == MESSAGES else made["message"]["content"])


@pytest.mark.parametrize("path", FIELDS)
def test_the_answer_goes_on_and_does_not_repeat(path: str) -> None:
    server = Scripted('1, "b": 2}')
    response = server.post(path, {"messages": SAID, **FIELDS[path]})
    assert response.status_code == 200, response.text
    assert text_of(path, response.json()) == '1, "b": 2}'
    prompt = server.prompt()
    assert prompt.endswith('<|turn>assistant\nHere is it:\n{"a": ')
    assert prompt.count("Here is it") == 1 and prompt.count("<|turn>") == 2


def test_parts_and_blocks_are_continued_too() -> None:
    server = Scripted("x")
    parts = [{"type": "text", "text": "One."}, {"type": "text", "text": "Two "}]
    for path in (CHAT, MESSAGES):
        begun = {"role": "assistant", "content": parts}
        response = server.post(path, {"messages": [SAID[0], begun], **FIELDS[path]})
        assert response.status_code == 200, response.text
        assert server.prompt().endswith("One.\nTwo ")


def test_counting_counts_what_is_asked() -> None:
    server = Scripted("x", allow_hosts=("*",))
    server.post(MESSAGES, {"messages": SAID, "max_tokens": 5})
    count = server.post(COUNT, {"messages": SAID}).json()["input_tokens"]
    assert count == len(server.engine.requests[0].prompt_ids)
    tokenized = {"messages": SAID, "continue_final_message": True}
    server.app = create_app(server.serving, lambda line: None)
    assert server.post("/tokenize", tokenized).json()["count"] == count


def test_without_the_word_the_chat_api_begins_a_new_turn() -> None:
    server = Scripted("x")
    assert server.post(CHAT, {"messages": SAID}).status_code == 200
    assert server.prompt().count("<|turn>") == 3


@pytest.mark.parametrize(
    ("path", "fields", "words"),
    [
        (CHAT, {"add_generation_prompt": True}, "add_generation_prompt is true"),
        (CHAT, {"messages": SAID[:1]}, "ends with the role 'user'"),
        (CHAT, {"messages": [SAID[0], {**BEGUN, "tool_calls": [CALLED]}]}, "ends with calls"),
        (CHAT, {"response_format": {"type": "json_object"}}, "holds for whole answers"),
        (CHAT, {"tools": CHAT_TOOLS, "tool_choice": "required"}, "holds for whole answers"),
        (CHAT, {"continue_final_message": "yes"}, "continue_final_message"),
        (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking is on"),
        (MESSAGES, {"output_format": {"type": "json_schema", "schema": {}}}, "whole answers"),
        (MESSAGES, {"tools": [{"name": "f"}], "tool_choice": {"type": "any"}}, "whole answers"),
        (
            MESSAGES,
            {
                "messages": [
                    SAID[0],
                    {
                        "role": "assistant",
                        "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}],
                    },
                ]
            },
            "ends with calls",
        ),
        (OLLAMA, {"format": "json"}, "holds for whole answers"),
    ],
)
def test_what_cannot_be_continued_is_refused(path: str, fields: dict[str, Any], words: str) -> None:
    server = Scripted("x")
    response = server.post(path, {"messages": SAID, **FIELDS[path], **fields})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert words in (error if isinstance(error, str) else error["message"])
    assert server.engine.requests == []
