"""Bodies of many small things: refused by their structure, before they cost the event loop time."""

from __future__ import annotations

import gc
import json
from typing import Any

import pytest
from starlette.types import ASGIApp

from flashdraft.server.app import create_app
from flashdraft.server.http.body_structure import MAX_TOKEN_VALUES, MAX_VALUES
from tests.unit.server.asgi_client import Answer, call, call_and_watch
from tests.unit.server.scripted import MODEL
from tests.unit.server.test_loop_lag import HEADERS, make_serving

pytestmark = pytest.mark.alone  # it measures how long the loop stands still

MAX_LAG_S = 0.3  # the same as for long prompts; before there was a check, seconds

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES, COUNT, TOKENIZE = "/v1/messages", "/v1/messages/count_tokens", "/tokenize"
SAID = [{"role": "user", "content": "hi"}]
TEXT = {"type": "text", "text": "a"}
FUNCTION = {"type": "function", "function": {"name": "f"}}


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": SAID, **fields}


def unknown(count: int) -> dict[str, int]:
    return {f"k{number}": 1 for number in range(count)}


CASES: list[tuple[str, dict[str, Any]]] = [
    (RESPONSES, {"model": MODEL, "input": [{}] * 125_000}),
    (RESPONSES, {"model": MODEL, "input": [{}] * 20_000}),
    (RESPONSES, {"model": MODEL, "input": [{}] * 2_000}),
    (RESPONSES, {"model": MODEL, "input": [{"role": "user", "content": "a"}] * 50_000}),
    (RESPONSES, {"model": MODEL, "input": [{"role": "user", "content": [{}] * 30_000}]}),
    (RESPONSES, {"model": MODEL, "input": [unknown(30)] * 2_000}),
    (RESPONSES, {"model": MODEL, "input": "a", "include": [1] * 90_000}),
    (CHAT, chat(messages=[1] * 500_000)),
    (CHAT, chat(messages=[1] * 90_000)),
    (CHAT, chat(messages=SAID * 100_000)),
    (CHAT, chat(messages=SAID * 15_000)),
    (CHAT, chat(messages=[{"role": "user", **unknown(30)}] * 2_000)),
    (CHAT, chat(messages=[{"role": "user", "content": [{}] * 200_000}])),
    (CHAT, chat(messages=[{"role": "user", "content": [{}] * 40_000}])),
    (CHAT, chat(messages=[{"role": "user", "content": [TEXT] * 100_000}])),
    (CHAT, chat(messages=[{"role": "user", "content": [TEXT] * 20}] * 2_000)),
    (CHAT, chat(messages=[{"role": "user", "content": {"a": [1] * 90_000}}])),
    (CHAT, chat(stop=[1] * 500_000)),
    (CHAT, chat(stop=[1] * 90_000)),
    (CHAT, chat(stop_token_ids=[1] * 90_000)),
    (CHAT, chat(stop_token_ids=["a"] * 90_000)),
    (CHAT, chat(logit_bias={str(number): "x" for number in range(100_000)})),
    (CHAT, chat(logit_bias={str(number): "x" for number in range(50_000)})),
    (CHAT, chat(modalities=[1] * 90_000)),
    (CHAT, chat(guided_choice=[1] * 90_000)),
    (CHAT, chat(structured_outputs={"choice": [1] * 90_000})),
    (CHAT, chat(tools=[{}] * 40_000)),
    (CHAT, chat(tools=[{**FUNCTION, **unknown(100)}] * 400)),
    (CHAT, chat(guided_json={f"k{number}": {"type": "null"} for number in range(100_000)})),
    (CHAT, chat(guided_json={f"k{number}": {"type": "null"} for number in range(40_000)})),
    (CHAT, chat(**unknown(100_000))),
    (CHAT, chat(**unknown(40_000))),
    (MESSAGES, {"model": MODEL, "max_tokens": 4, "messages": [{}] * 300_000}),
    (MESSAGES, {"model": MODEL, "max_tokens": 4, "messages": [{}] * 40_000}),
    (MESSAGES, {"model": MODEL, "max_tokens": 4, "messages": SAID, "system": [{}] * 40_000}),
    (MESSAGES, {"model": MODEL, "max_tokens": 4, "messages": SAID, "stop_sequences": [1] * 90_000}),
    (COUNT, {"model": MODEL, "messages": [{"role": "user", "content": [{}] * 40_000}]}),
    (TOKENIZE, {"messages": [1] * 500_000}),
    (TOKENIZE, {"messages": [1] * 90_000}),
    (TOKENIZE, {"messages": SAID, "tools": [1] * 90_000}),
    (COMPLETIONS, {"model": MODEL, "prompt": "a", "guided_json": {"enum": [1] * 450_000}}),
    (COMPLETIONS, {"model": MODEL, "prompt": ["a"] * 450_000}),
    (COMPLETIONS, {"model": MODEL, "prompt": [[5]] * 90_000}),
    (COMPLETIONS, {"model": MODEL, "prompt": "a", "stop": [1] * 450_000}),
]


def call_arguments(path: str, arguments: str) -> dict[str, Any]:
    if path == RESPONSES:
        made = {"type": "function_call", "call_id": "c", "name": "f", "arguments": arguments}
        return {"model": MODEL, "input": [made]}
    called = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return chat(messages=[{"role": "assistant", "tool_calls": [called]}, *SAID])


LONG_ARGUMENTS = json.dumps({"a": [1] * 1_500_000})
CASES += [(path, call_arguments(path, LONG_ARGUMENTS)) for path in (CHAT, RESPONSES)]


def ask_and_measure(app: ASGIApp, path: str, data: bytes) -> tuple[Answer, float]:
    gc.collect()
    return call_and_watch(app, path, HEADERS, data)


@pytest.fixture(scope="module")
def app() -> ASGIApp:
    return create_app(make_serving(), lambda line: None)


@pytest.mark.parametrize(
    ("path", "body"), CASES, ids=[f"{n}-{path}" for n, (path, _) in enumerate(CASES)]
)
def test_many_small_things_are_refused_at_once(
    app: ASGIApp, path: str, body: dict[str, Any]
) -> None:
    answer, lag_s = ask_and_measure(app, path, json.dumps(body).encode())
    assert answer.status in (400, 413), answer.body[:200]
    assert len(answer.body) < 1000
    assert lag_s < MAX_LAG_S


RAW = [
    b'{"a":' + b"[" * 70 + b'"' + b"a," * 4_000_000 + b'"',  # once 0.3 s of a regular expression
    b'{"a":' + b"[" * 70 + b'"",' * 2_700_000,
    b"{" + b'"":1,' * 1_600_000 + b'"":1}',
    b"[" + b"1," * 4_000_000 + b"1]",
    b"[" + b"{}," * 2_700_000 + b"{}]",
    b'"' + b'\\"' * 4_000_000 + b'"',
]


@pytest.mark.parametrize("data", RAW, ids=range(len(RAW)))
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_large_body_of_anything_is_read_without_holding_up_the_loop(
    app: ASGIApp, path: str, data: bytes
) -> None:
    answer, lag_s = ask_and_measure(app, path, data)
    assert answer.status in (400, 413)
    assert lag_s < MAX_LAG_S


def ask(app: ASGIApp, path: str, body: dict[str, Any]) -> tuple[int, str, str | None]:
    answer = call(app, "POST", path, HEADERS, [json.dumps(body).encode()])
    error = answer.json()["error"]
    return answer.status, error["message"], error.get("param")


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        (CHAT, chat(messages=SAID * 2049), "messages", "messages has 2049 entries; at most 2048"),
        (
            RESPONSES,
            {"model": MODEL, "input": SAID * 2049},
            "input",
            "input has 2049 entries; at most 2048",
        ),
        (TOKENIZE, {"messages": SAID * 2049}, "messages", "messages has 2049 entries"),
        (CHAT, chat(tools=[FUNCTION] * 513), "tools", "tools has 513 entries; at most 512"),
        (CHAT, chat(stop=["a"] * 17), "stop", "stop has 17 entries; at most 16"),
        (
            CHAT,
            chat(stop_token_ids=[1] * 1025),
            "stop_token_ids",
            "stop_token_ids has 1025 entries; at most 1024",
        ),
        (
            COMPLETIONS,
            {"model": MODEL, "prompt": "a", "stop_token_ids": [1] * 1025},
            "stop_token_ids",
            "stop_token_ids has 1025 entries; at most 1024",
        ),
        (
            CHAT,
            chat(logit_bias={str(n): 1 for n in range(1025)}),
            "logit_bias",
            "logit_bias has 1025 entries; at most 1024",
        ),
        (
            CHAT,
            chat(messages=[*SAID, {"role": "user", "content": [TEXT] * 1025}]),
            "messages[1].content",
            "messages[1].content has 1025 entries; at most 1024",
        ),
        (
            CHAT,
            chat(messages=[{"role": "user", **unknown(300)}]),
            "messages[0]",
            "messages[0] has 301 fields; at most 256",
        ),
        (CHAT, chat(**unknown(300)), None, "The body has 302 fields; at most 256"),
    ],
)
def test_a_refusal_says_the_count_the_limit_and_the_remedy(
    app: ASGIApp, path: str, body: dict[str, Any], param: str | None, message: str
) -> None:
    status, said, named = ask(app, path, body)
    assert (status, named) == (400, param)
    assert said.startswith(message) and said.endswith("Send fewer.")


@pytest.mark.parametrize(("path", "limit"), [(CHAT, MAX_VALUES), (COMPLETIONS, MAX_TOKEN_VALUES)])
def test_the_number_of_json_values_has_a_limit(app: ASGIApp, path: str, limit: int) -> None:
    status, said, _ = ask(app, path, {"metadata": [1] * limit})
    assert status == 413
    assert said.startswith("The body has ") and f"at most {limit}." in said
    status, said, param = ask(app, path, {"metadata": "1," * limit, "messages": 1, "prompt": 1})
    assert status == 400 and param is not None


def test_free_values_may_have_many_keys(app: ASGIApp) -> None:
    many = unknown(2000)
    called = {"id": "c", "type": "function", "function": {"name": "f", "arguments": many}}
    said = [*SAID, {"role": "assistant", "tool_calls": [called]}]
    body = chat(messages=[*said, *SAID], metadata=many, max_tokens=2)
    answer = call(app, "POST", CHAT, HEADERS, [json.dumps(body).encode()])
    assert answer.status == 200, answer.body
    blocks = [{"type": "tool_use", "id": "c", "name": "f", "input": many}]
    talk = [*SAID, {"role": "assistant", "content": blocks}, *SAID]
    body = {"model": MODEL, "messages": talk, "max_tokens": 2}
    answer = call(app, "POST", MESSAGES, HEADERS, [json.dumps(body).encode()])
    assert answer.status == 200, answer.body


def test_a_conversation_at_the_limits_is_answered_and_does_not_hold_up_the_loop(
    app: ASGIApp,
) -> None:
    said = [{"role": "user", "content": [TEXT] * 4}] * 2048
    body = chat(messages=said, stop_token_ids=[1] * 1024, max_tokens=2)
    answer, lag_s = ask_and_measure(app, CHAT, json.dumps(body).encode())
    assert answer.status == 200, answer.body[:200]
    assert lag_s < MAX_LAG_S
    body = chat(messages=[*said[1:], {"role": "user", "content": [TEXT] * 5}])
    status, message, param = ask(app, CHAT, body)
    assert (status, param) == (400, "messages[2047].content")
    assert "past the 8192 parts" in message
