"""What the model may be called, what is said of paths that there are not, and prompts too long."""

from __future__ import annotations

import json
from typing import Any

import pytest

from flashdraft.server.app import create_app
from tests.unit.server.asgi_client import Answer, call
from tests.unit.server.scripted import MODEL, Scripted

OWN = {"host": "127.0.0.1:8000", "content-type": "application/json"}
SAID = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": SAID},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": SAID, "max_tokens": 9},
}


def ask(
    method: str, path: str, body: Any = None, server: Scripted | None = None, **h: str
) -> Answer:
    server = server or Scripted("the quick")
    app = create_app(server.serving, lambda line: None)
    headers = {**OWN, **{name.replace("_", "-"): value for name, value in h.items()}}
    return call(app, method, path, headers, [b"" if body is None else json.dumps(body).encode()])


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("is_stream", [False, True])
def test_the_model_may_be_left_out_and_answers_carry_its_name(path: str, is_stream: bool) -> None:
    server = Scripted("the quick", served_model_names=("mine", "gpt-4o"))
    body = {**BODIES[path], "stream": is_stream}
    for given, told in (({}, "mine"), ({"model": None}, "mine"), ({"model": "gpt-4o"}, "gpt-4o")):
        response = server.post(path, {**body, **given})
        assert response.status_code == 200, response.text
        assert f'"model":"{told}"' in response.text
    unknown = server.post(path, {**body, "model": MODEL})
    assert unknown.status_code == 404
    message = unknown.json()["error"]["message"]
    assert "'mine', 'gpt-4o'" in message and "leave model out" in message


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/v1/chat/completion", "Did you mean /v1/chat/completions?"),
        ("/chat/completions", "Did you mean /v1/chat/completions?"),
        ("/v1/v1/messages", "Did you mean /v1/messages"),
        ("/v1/engines/x/generate", "There are /v1/models, /v1/chat/completions"),
        ("/wp-admin/setup.php", "GET /openapi.json lists all routes"),
        ("/" + "x" * 5000, "lists all routes"),
        ("/v1/embeddings", "Embeddings are not served"),
        ("/v1/audio/speech", "Audio is not served"),
        ("/v1/responses/resp_123", "Responses are not kept"),
    ],
)
def test_an_unknown_path_is_answered_with_a_pointer(path: str, words: str) -> None:
    answer = ask("POST", path, {"input": "hi"})
    error = answer.json()["error"]
    assert answer.status == 404 and words in error["message"] and len(error["message"]) < 600
    assert error["code"] in ("no_such_route", "not_served")
    theirs = ask("POST", path, {"input": "hi"}, anthropic_version="2023-06-01").json()
    assert theirs["type"] == "error" and theirs["error"]["type"] == "not_found_error"
    assert words in theirs["error"]["message"]


def test_what_a_path_says_of_itself_is_quoted() -> None:
    message = ask("GET", "/v1/\x1b[31m\n<script>").json()["error"]["message"]
    assert "\x1b" not in message and "\n" not in message


@pytest.mark.parametrize(
    ("method", "path", "status", "words"),
    [
        ("POST", "/api/embed", 404, "Embeddings are not served"),
        ("POST", "/api/embeddings", 404, "Embeddings are not served"),
        ("POST", "/api/pull", 403, "cannot be pulled"),
        ("POST", "/api/push", 403, "cannot be pushed"),
        ("POST", "/api/create", 403, "cannot be created"),
        ("POST", "/api/copy", 403, "cannot be copied"),
        ("DELETE", "/api/delete", 403, "cannot be deleted"),
        ("HEAD", "/api/blobs/sha256:00", 403, "cannot be sent"),
        ("POST", "/api/frobnicate", 404, "There is no route"),
    ],
)
def test_what_ollama_has_and_we_have_not(method: str, path: str, status: int, words: str) -> None:
    answer = ask(method, path, {"model": "x"})
    assert answer.status == status
    assert answer.json().keys() == {"error"} and words in answer.json()["error"]


def test_another_method_is_named() -> None:
    answer = ask("GET", "/v1/chat/completions")
    assert (answer.status, answer.headers["allow"]) == (405, "POST")
    assert answer.json()["error"]["message"] == "'/v1/chat/completions' takes POST, not GET."


@pytest.mark.parametrize("path", BODIES)
def test_a_prompt_beyond_the_context_is_refused_with_the_numbers(path: str) -> None:
    long = "the " * 5000
    name = next(name for name in ("messages", "prompt", "input") if name in BODIES[path])
    value: Any = [{"role": "user", "content": long}] if name == "messages" else long
    server = Scripted("the quick")
    response = server.post(path, {**BODIES[path], name: value})
    assert response.status_code == 400 and server.engine.requests == []
    error = response.json()["error"]
    assert "4096" in error["message"] and "Shorten" in error["message"]
    assert error.get("code", "context_length_exceeded") == "context_length_exceeded"
