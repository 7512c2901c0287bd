"""What /v1/chat/completions refuses, how the engine's failures are told, and clients that leave."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from flashdraft.errors import ContextLengthError, EngineLostError, QueueFullError
from tests.unit.server.scripted import MODEL, WEATHER, Scripted
from tests.unit.server.sse_reading import read_events

PATH = "/v1/chat/completions"
BODY: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
BIG = {"x": "y" * 70000}
BAD_CALL = {"name": "f", "arguments": "{"}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}}]


def refusal(server: Scripted, **fields: Any) -> dict[str, Any]:
    response = server.post(PATH, {**BODY, **fields})
    assert response.status_code == 400, response.text
    assert server.engine.requests == []
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    return error


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"frobnicate": 1}, "frobnicate", "not supported"),
        ({"functions": []}, "functions", "use tools"),
        ({"temperature": "hot"}, "temperature", "number"),
        ({"temperature": -1}, "temperature", "between 0"),
        ({"top_p": 0}, "top_p", "above 0"),
        ({"flashdraft": {"trees": True}}, "flashdraft.trees", "needs tokens"),
        ({"n": 17}, "n", "1 to 16"),
        ({"n": 0}, "n", "1 to 16"),
        ({"stop": ["x"] * 17}, "stop", "at most 16"),
        ({"stop": ["x" * 2000]}, "stop", "characters"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "token ids"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias", "at most 1024"),
        ({"max_tokens": -1}, "max_tokens", "at least 1"),
        ({"top_logprobs": 2}, "top_logprobs", "logprobs"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs", "20"),
        ({"messages": []}, "messages", "empty"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "missing"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0]", "role"),
        ({"messages": [{"content": "x"}]}, "messages[0]", "role"),
        ({"messages": "hi"}, "messages", "list"),
        ({"tool_choice": "required"}, "tool_choice", "no tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}},
         "tool_choice", "'f'"),
        ({"tools": TOOLS * 2}, "tools", "same name"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "schema"),
        ({"guided_regex": "a" * 5000}, "guided_regex", "4096"),
        ({"guided_regex": "a", "guided_json": {}}, "guided_regex", "one constraint"),
        ({"guided_json": "{nope"}, "guided_json", "valid JSON"),
        ({"guided_json": {"x": "y" * 70000}}, "guided_json", "65536"),
        ({"chat_template_kwargs": {"tokenize": False}}, "chat_template_kwargs", "allowed"),
        ({"chat_template_kwargs": {"enable_thinking": "x"}}, "chat_template_kwargs", "true or"),
        ({"flashdraft": {"verify": 16}}, "flashdraft.verify", "15"),
        ({"modalities": ["audio"]}, "modalities[0]", "text"),
        ({"stop": [""]}, "stop", "non-empty"),
        ({"stop": ""}, "stop", "non-empty"),
        ({"presence_penalty": 2.1}, "presence_penalty", "less than or equal to 2"),
        ({"frequency_penalty": -3}, "frequency_penalty", "greater than or equal to -2"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": BAD_CALL}]}]},
         "messages[0].tool_calls[0].function.arguments", "not valid JSON"),
        ({"max_completion_tokens": 0}, "max_completion_tokens", "at least 1"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": BIG}}]},
         "tools[0].function.parameters", "65536"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream"),
    ],
)  # fmt: skip
def test_refusals_name_the_field_and_the_limit(
    fields: dict[str, Any], param: str, words: str
) -> None:
    error = refusal(Scripted("x"), **fields)
    assert error["param"] == param, error
    assert words in error["message"], error


@pytest.mark.parametrize(
    ("path", "fields", "field", "words"),
    [
        ("/v1/responses", {"max_output_tokens": 0}, "max_output_tokens", "at least 1"),
        ("/v1/responses", {"input": []}, "input", "empty"),
        (
            "/v1/responses",
            {"input": [{"type": "function_call", "call_id": "a", "name": "f", "arguments": "{"}]},
            "input[0].arguments",
            "not valid JSON",
        ),
        (
            "/v1/responses",
            {"tools": [{"type": "x"}, {"type": "function", "name": "f", "parameters": BIG}]},
            "tools[1].parameters",
            "65536",
        ),
        ("/v1/messages", {"stop_sequences": ["x"] * 17}, "stop_sequences", "at most 16"),
        (
            "/v1/messages",
            {"output_format": {"type": "json_schema", "schema": BIG}},
            "output_format.schema",
            "65536",
        ),
        (
            "/v1/messages",
            {"tools": [{"name": "f", "input_schema": BIG}]},
            "tools[0].input_schema",
            "65536",
        ),
    ],
)
def test_refusals_name_the_field_as_the_api_does(
    path: str, fields: dict[str, Any], field: str, words: str
) -> None:
    user = [{"role": "user", "content": "hi"}]
    bodies = {"/v1/responses": {"input": "hi"}, "/v1/messages": {"messages": user, "max_tokens": 9}}
    response = Scripted("x").post(path, {"model": MODEL, **bodies[path], **fields})
    error = response.json()["error"]
    assert response.status_code == 400
    assert error["message"].startswith(field + " ") and words in error["message"]
    assert error.get("param", field) == field


def test_no_top_logprobs_need_no_logprobs() -> None:
    for given in ({"logprobs": False, "top_logprobs": 0}, {"top_logprobs": 0}):
        response = Scripted("x").post(PATH, {**BODY, **given})
        assert response.status_code == 200 and response.json()["choices"][0]["logprobs"] is None


def test_pictures_are_refused_clearly_where_the_model_takes_none() -> None:
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    error = refusal(Scripted("x"), messages=[{"role": "user", "content": [part]}])
    assert error["param"] == "messages[0].content[0].image_url.url"
    assert "the model takes none" in error["message"] and "Send text only" in error["message"]


def test_deep_schema_is_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(40):
        schema = {"items": schema}
    assert "deeper than 32" in refusal(Scripted("x"), guided_json=schema)["message"]


@pytest.mark.parametrize("value", ["NaN", "-Infinity", '"\\ud800"'])
def test_schemas_must_be_plain_json(value: str) -> None:
    body = json.dumps({**BODY, "guided_json": {"const": "VALUE"}}).replace('"VALUE"', value)
    response = Scripted("x").post(PATH, body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "guided_json"


def test_too_many_messages() -> None:
    error = refusal(Scripted("x", max_messages=3), messages=BODY["messages"] * 4)
    assert "at most 3" in error["message"]


def test_bodies_that_are_no_json_object() -> None:
    server = Scripted("x")
    for body in ("{", "[]", '"x"', "", "null", b"\xff\xfe", "[" * 2000):
        response = server.post(PATH, body)
        assert response.status_code == 400, body
        assert response.json()["error"]["type"] == "invalid_request_error"
    for odd in ('{"model": "tiny", "messages": [], "\\ud800": 1}', '{"model": "\\ud800"}'):
        assert server.post(PATH, odd).status_code == 400


def test_unknown_model_is_404() -> None:
    server = Scripted("x", served_model_names=("alpha", "beta"))
    response = server.post(PATH, BODY)
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"
    assert "'alpha'" in response.json()["error"]["message"]
    assert server.post(PATH, {**BODY, "model": "beta"}).json()["model"] == "beta"


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (ContextLengthError("too long"), 400, "context_length_exceeded"),
        (QueueFullError("full", 2.0), 429, "queue_full"),
        (EngineLostError("restarting"), 503, "engine_unavailable"),
        (ValueError("a secret"), 500, None),
    ],
)
def test_what_the_engine_refuses_has_its_status(
    error: Exception, status: int, code: str | None, is_stream: bool
) -> None:
    server = Scripted(error)
    response = server.post(PATH, {**BODY, "stream": is_stream})
    assert response.status_code == status
    assert response.json()["error"]["code"] == code
    assert "secret" not in response.text
    assert ("retry-after" in response.headers) is (status in (429, 503))
    assert server.metrics.seen == [(PATH, "refused" if status < 500 else "error")]


def test_failure_in_mid_stream_is_an_error_object_and_the_end() -> None:
    script = "some text here and more!!The device is gone."
    server = Scripted(script)
    response = server.post(PATH, {**BODY, "stream": True})
    events = [data for _, data in read_events(response.text)]
    assert response.status_code == 200 and len(events) > 2
    assert events[-1]["error"]["message"] == "The device is gone."
    assert events[-1]["error"]["type"] == "server_error"
    assert server.metrics.seen == [(PATH, "error")]
    assert Scripted(script).post(PATH, BODY).status_code == 500


def test_leaving_client_cancels_the_request() -> None:
    server = Scripted("a very long answer " * 10)

    async def run(is_stream: bool) -> None:
        started, body = asyncio.Event(), json.dumps({**BODY, "stream": is_stream}).encode()
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def pause(step: int) -> None:
            if step == 2:
                started.set()
                await asyncio.sleep(60)

        async def receive() -> Any:
            if messages:
                return messages.pop()
            await started.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None: ...

        server.engine.pause = pause
        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": PATH, "headers": headers}
        scope |= {"query_string": b"", "asgi": {"spec_version": "2.3"}, "http_version": "1.1"}
        try:
            async with asyncio.timeout(10):
                await server.app(scope, receive, send)
        except Exception as error:
            assert type(error).__name__ == "ClientDisconnectedError"

    for is_stream in (True, False):
        asyncio.run(run(is_stream))
    assert len(server.engine.cancelled) == 2
    assert server.metrics.seen == [(PATH, "cancelled")] * 2
