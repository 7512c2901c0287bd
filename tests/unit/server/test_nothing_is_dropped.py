"""A field is honoured, refused, or advisory: what once was dropped without a word."""

from __future__ import annotations

from typing import Any

import pytest

from flashdraft.models.tokenizer import Tokenizer
from flashdraft.server.answering.serving import Serving
from flashdraft.server.app import create_app
from tests.tiny import CHAT_TEMPLATE, make_tiny_tokenizer
from tests.unit.server.scripted import WEATHER, Scripted, ScriptedEngine

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES, TOKENIZE = "/v1/messages", "/tokenize"
SAID = {"role": "user", "content": "hi"}
USE = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "c", "content": "x"}
TEXT = {"type": "text", "text": "a"}
FUNCTION = {"name": "get_weather", "parameters": WEATHER, "strict": True}
TOOL = {"type": "function", "function": FUNCTION}


def chat(*messages: Any, **fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [*messages] or [SAID], **fields}


def anthropic(*messages: Any, **fields: Any) -> dict[str, Any]:
    return chat(*messages, max_tokens=4, **fields)


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": [*blocks]}


def assistant(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": [*blocks]}


def served(*scripts: str) -> Scripted:
    """The whole application, which has /tokenize too."""
    server = Scripted(*scripts, allow_hosts=("*",))
    server.app = create_app(server.serving, lambda line: None)
    return server


def named(name: str) -> dict[str, Any]:
    """A request that must call the one function that it offers."""
    tool = {"type": "function", "function": {"name": name}}
    return chat(tools=[tool], tool_choice=tool)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    # they would be read as the words, and the tools dropped or another one called
    *(
        (CHAT, named(word), f"tools has a function named '{word}'")
        for word in ("auto", "none", "required")
    ),
    (
        MESSAGES,
        anthropic(
            tools=[{"name": "none", "input_schema": {"type": "object"}}],
            tool_choice={"type": "tool", "name": "none"},
        ),
        "tools has a function named 'none'",
    ),
    (
        RESPONSES,
        {"model": "tiny", "input": "hi", "tools": [{"type": "function", "name": "a\nb"}]},
        "tools[0].name",
    ),
    (
        CHAT,
        chat(
            SAID,
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {
                        "id": "c",
                        "type": "function",
                        "function": {"name": "f", "arguments": '{"a": NaN}'},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": "c", "content": "x"},
        ),
        "messages[1].tool_calls[0].function.arguments is not valid JSON",
    ),
    (MESSAGES, anthropic(user(USE)), "messages[0].content[0].type is 'tool_use'"),
    (MESSAGES, anthropic(SAID, assistant(RESULT), SAID), "messages[1].content[0].type is 'tool_"),
    (MESSAGES, anthropic(user({"type": "thinking", "thinking": "a"})), "messages[0].content[0]."),
    (MESSAGES, anthropic(user({"type": "text"})), "messages[0].content[0].text is missing"),
    (MESSAGES, anthropic(user({**TEXT, "tool_use_id": "c"})), "messages[0].content[0].tool_use_id"),
    (MESSAGES, anthropic(user({**TEXT, "input": {}})), "messages[0].content[0].input has no mean"),
    (MESSAGES, anthropic(user({"type": "tool_result"})), "messages[0].content[0].tool_use_id is m"),
    (
        MESSAGES,
        anthropic(SAID, assistant({"type": "tool_use", "id": "c", "input": {}}), SAID),
        "messages[1].content[0].name is missing",
    ),
    (
        MESSAGES,
        anthropic(user({**RESULT, "content": [USE]})),
        "messages[0].content[0].content[0].type is 'tool_use'",
    ),
    (MESSAGES, anthropic(system=[USE]), "system[0].type is 'tool_use'"),
    (CHAT, chat(user({"type": "text"})), "messages[0].content[0].text is missing"),
    (CHAT, chat(user({**TEXT, "refusal": "b"})), "messages[0].content[0].refusal has no meaning"),
    (
        CHAT,
        chat(user({**TEXT, "image_url": {"url": "b"}})),
        "messages[0].content[0].image_url has no meaning",
    ),
    (CHAT, chat({"role": "assistant"}, SAID), "messages[0].content is missing"),
    (
        CHAT,
        chat({"role": "assistant", "content": None, "tool_calls": []}, SAID),
        "messages[0].content is missing",
    ),
    (
        CHAT,
        chat(stream=True, stream_options={"continuous_usage_stats": True}),
        "stream_options.continuous_usage_stats needs include_usage",
    ),
    (CHAT, chat(stop_token_ids=[10**6]), "stop_token_ids holds 1000000"),
    (CHAT, chat(stop_token_ids=[-1]), "stop_token_ids holds -1"),
    (CHAT, chat(logit_bias={"1000000": 1}), "logit_bias has the key 1000000"),
    (
        COMPLETIONS,
        {"model": "tiny", "prompt": "a", "stop_token_ids": [10**6]},
        "stop_token_ids holds 1000000",
    ),
    (
        RESPONSES,
        {"model": "tiny", "input": "a", "tools": [{"type": "function", **FUNCTION, "color": 1}]},
        "tools[0].color is not supported",
    ),
    (
        RESPONSES,
        {"model": "tiny", "input": [user({"type": "input_text"})]},
        "input[0].content[0].text is missing",
    ),
    (
        RESPONSES,
        {"model": "tiny", "input": "a", "stream_options": {"continuous_usage_stats": True}},
        "stream_options.continuous_usage_stats is not supported",
    ),
    (TOKENIZE, {"messages": [{**SAID, "color": 1}]}, "messages[0].color is not supported"),
    (TOKENIZE, {"messages": [SAID], "tools": [{"a": 1}]}, "tools[0]."),
]


@pytest.mark.parametrize(
    ("path", "body", "begin"),
    REFUSED,
    ids=[f"{n}-{path}" for n, (path, _, _) in enumerate(REFUSED)],
)
def test_what_has_no_effect_is_refused_by_its_name(
    path: str, body: dict[str, Any], begin: str
) -> None:
    server = served()
    response = server.post(path, body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["message"].startswith(begin)
    if path != MESSAGES:
        assert error["param"] is not None and error["message"].startswith(error["param"])
    assert server.engine.requests == []


def test_what_clients_send_back_is_taken() -> None:
    server = served(*["the quick"] * 3)
    refused = {"role": "assistant", "content": None, "refusal": "never"}
    assert server.post(CHAT, chat(SAID, refused, SAID)).status_code == 200
    assert "never" in server.prompt()
    nulls = {"type": "text", "text": "a", "citations": None, "tool_use_id": None}
    body = anthropic(SAID, assistant(nulls, USE), user(RESULT, TEXT))
    assert server.post(MESSAGES, body).status_code == 200
    tools = [{"type": "function", **FUNCTION}, {"type": "web_search", "external_web_access": True}]
    body = {"model": "tiny", "input": "a", "tools": tools}
    assert server.post(RESPONSES, body).status_code == 200


def without_calls() -> Scripted:
    """A server of a model that has no format for calls of its own."""
    server = Scripted(allow_hosts=("*",))
    tokenizer = Tokenizer(make_tiny_tokenizer(), special_tokens={}, chat_template=CHAT_TEMPLATE)
    server.engine = ScriptedEngine(tokenizer, ["the quick"])
    settings = server.serving.settings
    server.serving = Serving(server.engine, tokenizer, settings, server.metrics)
    server.app = create_app(server.serving, lambda line: None)
    return server


@pytest.mark.parametrize(
    "choice",
    [None, "auto", "required", {"type": "function", "function": {"name": "get_weather"}}],
)
def test_a_model_without_calls_is_told_of_tools(choice: Any) -> None:
    server = without_calls()
    response = server.post(CHAT, chat(tools=[TOOL], tool_choice=choice))
    assert response.status_code == 200, response.text
    assert "get_weather" in server.prompt() and "<tool_call>" in server.prompt()
    grammar = server.engine.requests[0].grammar  # TOOL is strict: its calls keep to the schema
    assert grammar is not None and "get_weather" in grammar.text


def test_tools_that_may_not_be_called_are_not_told() -> None:
    server = without_calls()
    response = server.post(CHAT, chat(tools=[TOOL], tool_choice="none"))
    assert response.status_code == 200, response.text
    assert server.engine.requests[0].grammar is None
    assert "get_weather" not in server.prompt()


@pytest.mark.parametrize("max_tokens", [None, 200, 100_000])
def test_texts_of_a_model_that_is_told_end_in_the_grammar_alone(max_tokens: int | None) -> None:
    """Else a small model goes on until its tokens are used up, and the call is cut."""
    server = without_calls()
    free = {"type": "object", "properties": {"note": {"type": "string"}}, "required": ["note"]}
    tool = {"type": "function", "function": {"name": "keep", "parameters": free}}
    more = {} if max_tokens is None else {"max_tokens": max_tokens}
    response = server.post(CHAT, chat(tools=[tool], tool_choice="required", **more))
    assert response.status_code == 200, response.text
    grammar = server.engine.requests[0].grammar
    limit = min(server.serving.sampling_defaults["max_tokens"], max_tokens or 100_000) // 2
    assert grammar is not None and f'"maxLength":{limit}' in grammar.text.replace(" ", "")
    assert "maxLength" not in server.prompt()
