"""What each API's body says, as the messages that chat templates are given."""

from __future__ import annotations

from typing import Any

from flashdraft.server.anthropic import conversation
from flashdraft.server.anthropic.fields import MessagesRequest
from flashdraft.server.openai import chat_input, responses_input
from flashdraft.server.openai.chat_fields import ChatRequest
from flashdraft.server.openai.responses_fields import ResponsesRequest

USER = {"role": "user", "content": "Hi"}
ODD = '{"x":1.50}'


def chat(*messages: dict[str, Any]) -> list[dict[str, Any]]:
    body = ChatRequest.model_validate({"model": "m", "messages": [USER, *messages]})
    return chat_input.chat_messages(body.messages)[1:]


def anthropic(*messages: dict[str, Any]) -> list[dict[str, Any]]:
    given = {"model": "m", "max_tokens": 1, "messages": [USER, *messages, USER]}
    return conversation.chat_messages(MessagesRequest.model_validate(given))[1:-1]


def responses(*items: dict[str, Any]) -> list[dict[str, Any]]:
    body = ResponsesRequest.model_validate({"model": "m", "input": [USER, *items]})
    return responses_input.chat_messages(body)[1:]


def texts(*values: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": value} for value in values]


CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": ODD}}


def test_chat_keeps_null_apart_from_absent_and_empty() -> None:
    said = {"role": "assistant", "tool_calls": [CALL]}
    assert chat({**said, "content": None}) == [{**said, "content": None}]
    assert chat(said) == [said]
    assert chat({**said, "content": ""}) == [{**said, "content": ""}]
    assert chat({"role": "assistant", "reasoning": "hm", "content": None}) == [
        {"role": "assistant", "content": None, "reasoning_content": "hm"}
    ]
    assert chat({"role": "assistant", "content": None, "refusal": "No."})[0]["content"] == "No."
    assert chat({"role": "assistant", "content": None, "reasoning": ""})[0]["content"] == ""


def test_chat_keeps_parts_and_the_text_of_arguments() -> None:
    (message,) = chat({"role": "user", "content": texts("one", "two")})
    assert message["content"] == texts("one", "two")
    nameless = {"function": {"name": "f", "arguments": ODD}}
    (message,) = chat({"role": "assistant", "content": None, "tool_calls": [nameless]})
    assert message["tool_calls"] == [{"type": "function", **nameless}]  # no id that is none


def test_anthropic() -> None:
    call = {"type": "tool_use", "id": "c1", "name": "f", "input": {"x": 1}}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": texts("a", "b")}
    called, answered = anthropic(
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}, call]},
        {"role": "user", "content": [result]},
    )
    assert called["content"] is None and called["reasoning_content"] == "hm"
    assert answered["content"] == texts("a", "b")
    assert answered["name"] == "f"
    spoken, failed, asked = anthropic(
        {"role": "assistant", "content": [*texts("one", "two"), call]},
        {"role": "user", "content": [{**result, "is_error": True}, *texts("three")]},
    )
    assert spoken["content"] == texts("one", "two")
    assert failed["content"] == "Error: a\nb"
    assert asked["content"] == texts("three")
    (nothing, empty) = anthropic(
        {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]},
        {"role": "user", "content": [{**result, "content": texts("")}]},
    )
    assert (nothing["content"], empty["content"]) == ("", "")


def test_responses() -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": ODD}
    (called,) = responses(call)
    assert called["content"] is None
    assert called["tool_calls"][0]["function"]["arguments"] == ODD
    parts = [{"type": "output_text", "text": "one"}, {"type": "output_text", "text": "two"}]
    said = {"type": "message", "role": "assistant", "content": parts}
    assert responses(said, call)[0]["content"] == texts("one", "two")
    again = {"type": "message", "role": "assistant", "content": "three"}
    assert responses(said, again)[0]["content"] == texts("one", "two", "three")
    thought = {"type": "reasoning", "id": "r", "summary": []}
    assert responses(thought, {"role": "user", "content": "x"})[0]["content"] == ""
