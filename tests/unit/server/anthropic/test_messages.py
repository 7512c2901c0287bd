"""/v1/messages and /v1/messages/count_tokens against a scripted engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flashdraft.errors import ContextLengthError, EngineLostError, QueueFullError
from tests.unit.server.scripted import CALL, OTHER_CALL, THOUGHT, WEATHER, Scripted
from tests.unit.server.sse_reading import read_events

PATH = "/v1/messages"
RECORDED = json.loads(
    (Path(__file__).parents[1] / "requests/claude_code_messages.json").read_text()
)
BODY: dict[str, Any] = {
    "model": "tiny",
    "max_tokens": 200,
    "messages": [{"role": "user", "content": "hi"}],
}
TOOLS = [{"name": "get_weather", "description": "Weather", "input_schema": WEATHER}]
THINKING = {"thinking": {"type": "enabled", "budget_tokens": 1024}}


def ask(server: Scripted, **fields: Any) -> Any:
    response = server.post(PATH, {**BODY, **fields})
    assert response.status_code == 200, response.text
    return response.json()


def stream(server: Scripted, body: dict[str, Any]) -> list[Any]:
    response = server.post(PATH, {**body, "stream": True})
    assert response.status_code == 200, response.text
    events = read_events(response.text)
    assert all(name == data["type"] for name, data in events)
    return [data for _, data in events]


def test_plain_answer() -> None:
    server = Scripted("Hello world")
    answer = ask(server)
    assert answer["id"].startswith("msg_")
    assert (answer["type"], answer["role"], answer["model"]) == ("message", "assistant", "tiny")
    assert answer["content"] == [{"type": "text", "text": "Hello world"}]
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("end_turn", None)
    usage, request = answer["usage"], server.engine.requests[0]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == len(request.prompt_ids)
    assert usage["cache_read_input_tokens"] == 2 and usage["output_tokens"] > 2
    assert answer["flashdraft"]["accepted"] == 4
    assert (request.params.temperature, request.params.max_tokens) == (0.7, 200)


@pytest.mark.parametrize(
    ("fields", "reason", "sequence"),
    [
        ({}, "end_turn", None),
        ({"max_tokens": 2}, "max_tokens", None),
        ({"stop_sequences": ["zzz", "three"]}, "stop_sequence", "three"),
    ],
)
def test_stop_reasons(fields: dict[str, Any], reason: str, sequence: str | None) -> None:
    server = Scripted("one two three four")
    answer = ask(server, **fields)
    assert (answer["stop_reason"], answer["stop_sequence"]) == (reason, sequence)
    if sequence is not None:
        assert answer["content"][0]["text"] == "one two "
    delta = stream(server, {**BODY, **fields})[-2]["delta"]
    assert delta == {"stop_reason": reason, "stop_sequence": sequence}


def test_thinking_and_tools_are_blocks() -> None:
    server = Scripted(THOUGHT + "Well." + CALL + OTHER_CALL)
    answer = ask(server, tools=TOOLS, **THINKING)
    kinds = [block["type"] for block in answer["content"]]
    assert kinds == ["thinking", "text", "tool_use", "tool_use"]
    assert answer["content"][0] == {"type": "thinking", "thinking": "let me see", "signature": ""}
    assert answer["content"][2]["input"] == {"city": "Paris", "days": 2}
    assert answer["stop_reason"] == "tool_use"
    assert "<|think|>" in server.prompt()
    ask(server, thinking={"type": "disabled"})
    assert "<|think|>" not in server.prompt()


@pytest.mark.parametrize("width", [1, 3, 100])
def test_stream_follows_the_grammar_of_events(width: int) -> None:
    server = Scripted(THOUGHT + "Well." + CALL + OTHER_CALL, width=width)
    events = stream(server, {**BODY, "tools": TOOLS, **THINKING})
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["message_start", "ping"]
    assert kinds[-2:] == ["message_delta", "message_stop"]
    start = events[0]["message"]
    assert start["content"] == [] and start["stop_reason"] is None
    assert start["usage"]["input_tokens"] == len(server.engine.requests[0].prompt_ids)
    open_index, texts = None, dict[int, str]()
    for event in events[2:-2]:
        if event["type"] == "content_block_start":
            assert open_index is None and event["index"] == len(texts)
            open_index = event["index"]
            texts[open_index] = ""
            if event["content_block"]["type"] == "tool_use":
                assert event["content_block"]["input"] == {}
        elif event["type"] == "content_block_stop":
            assert event["index"] == open_index
            open_index = None
        else:
            assert event["type"] == "content_block_delta" and event["index"] == open_index
            delta = dict(event["delta"])
            kind = delta.pop("type")
            (text,) = delta.values()
            texts[open_index] += text
            assert kind in ("thinking_delta", "signature_delta", "text_delta", "input_json_delta")
    assert open_index is None
    assert [texts[0], texts[1]] == ["let me see", "Well."]
    assert json.loads(texts[2]) == {"city": "Paris", "days": 2}
    assert json.loads(texts[3]) == {"city": "Rome"}
    assert events[-2]["delta"]["stop_reason"] == "tool_use"
    assert events[-2]["usage"]["output_tokens"] > 10
    assert events[-2]["flashdraft"]["steps"] == 2


def test_token_view_rides_on_events() -> None:
    events = stream(Scripted("Hello é"), {**BODY, "flashdraft": {"tokens": True}})
    views = [e["flashdraft"]["tokens"] for e in events if "tokens" in e.get("flashdraft", {})]
    assert "".join(token["text"] for view in views for token in view) == "Hello é"


def test_tool_choice() -> None:
    server = Scripted(CALL + OTHER_CALL)
    for choice, forced in (
        ({"type": "auto"}, False),
        ({"type": "any"}, True),
        ({"type": "tool", "name": "get_weather"}, True),
    ):
        answer = ask(server, tools=TOOLS, tool_choice=choice)
        assert answer["stop_reason"] == "tool_use"
        assert (server.engine.requests[-1].grammar is not None) is forced
    none = ask(server, tools=TOOLS, tool_choice={"type": "none"})
    assert [block["type"] for block in none["content"]] == ["text"]
    single = {"type": "auto", "disable_parallel_tool_use": True}
    assert len(ask(server, tools=TOOLS, tool_choice=single)["content"]) == 1


def test_output_format_becomes_a_grammar() -> None:
    server = Scripted("{}")
    wanted = {"type": "json_schema", "schema": {"type": "object"}}
    ask(server, output_config={"format": wanted, "effort": "low"})
    grammar = server.engine.requests[-1].grammar
    assert grammar is not None and grammar.kind == "json_schema"


def test_recorded_request_of_claude_code_replays() -> None:
    server = Scripted(THOUGHT + '<|tool_call>call:Bash{command:<|"|>pytest<|"|>}<tool_call|>')
    events = stream(server, RECORDED)
    assert events[-2]["delta"]["stop_reason"] == "tool_use"
    started = [e["content_block"] for e in events if e["type"] == "content_block_start"]
    assert [block["type"] for block in started] == ["thinking", "tool_use"]
    assert started[1]["name"] == "Bash"
    prompt = server.prompt()
    assert "billing-header" not in prompt and "You are Claude Code" in prompt
    assert "<|think|>" in prompt and prompt.count("<|tool>") == len(RECORDED["tools"])
    assert "(I should look at the parser first.)[Read:" in prompt
    assert "<|turn>tool\nRead=     1\tdef parse" in prompt
    assert "Grep=src/parser.py:1" in prompt
    assert "Edit=Error: <tool_use_error>" in prompt
    whole = server.post(PATH, {**RECORDED, "stream": False}).json()
    assert whole["content"][1]["input"] == {"command": "pytest"}


def test_count_tokens_equals_usage() -> None:
    server = Scripted("x")
    names = ("model", "messages", "system", "tools", "tool_choice", "thinking")
    body = {name: RECORDED[name] for name in names}
    count = server.post(PATH + "/count_tokens", body)
    assert count.status_code == 200, count.text
    server.post(PATH, RECORDED)
    assert count.json() == {"input_tokens": len(server.engine.requests[0].prompt_ids)}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"frobnicate": 1}, "frobnicate is not supported"),
        ({"mcp_servers": []}, "hosted tools"),
        ({"messages": []}, "messages is empty"),
        ({"messages": [{"role": "user", "content": [
            {"type": "image", "source": {"type": "base64", "media_type": "image/png",
                                         "data": "AAAA"}}]}]}, "the model takes none"),
        ({"messages": [{"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "x", "content": [{"type": "image"}]}]}]},
         "content[0].content[0].source is missing"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]},
         "source is missing"),
        ({"messages": [{"role": "user", "content": [{"type": "search_result"}]}]},
         "the server stores no files"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search", "max_uses": 5}]},
         "web_search_20250305"),
        ({"tool_choice": {"type": "any"}}, "no tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "f"}}, "'f'"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"stop_sequences": ["x"] * 17}, "at most 16"),
        ({"temperature": 101}, "temperature"),
        ({"thinking": {"type": "sometimes"}}, "thinking.type"),
    ],
)  # fmt: skip
def test_refusals_have_anthropics_shape(fields: dict[str, Any], words: str) -> None:
    server = Scripted("x")
    response = server.post(PATH, {**BODY, **fields})
    assert response.status_code == 400, response.text
    body = response.json()
    assert body.keys() == {"type", "error"} and body["type"] == "error"
    assert body["error"]["type"] == "invalid_request_error"
    assert words in body["error"]["message"], body
    assert server.engine.requests == []


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (ContextLengthError("too long"), 400, "invalid_request_error"),
        (QueueFullError("full", 2.0), 429, "rate_limit_error"),
        (EngineLostError("restarting"), 503, "overloaded_error"),
        (ValueError("a secret"), 500, "api_error"),
    ],
)
def test_failures_have_anthropics_shape(
    error: Exception, status: int, kind: str, is_stream: bool
) -> None:
    response = Scripted(error).post(PATH, {**BODY, "stream": is_stream})
    assert response.status_code == status
    assert response.json()["error"]["type"] == kind


def test_unknown_model_is_404() -> None:
    response = Scripted("x").post(PATH, {**BODY, "model": "claude-opus"})
    assert response.status_code == 404
    assert response.json()["error"]["type"] == "not_found_error"


def test_failure_in_mid_stream_is_an_error_event() -> None:
    response = Scripted("some text here and more!!Gone.").post(PATH, {**BODY, "stream": True})
    name, data = read_events(response.text)[-1]
    assert name == "error"
    assert data == {"type": "error", "error": {"type": "api_error", "message": "Gone."}}
