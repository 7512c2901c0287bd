"""Ollama's own Python client against a live server; skipped where it is not installed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e import test_api_clients
from tests.e2e.test_api_clients import CALLS, CHAT_TOOLS, EVERYTHING, KEY, USER, Live
from tests.unit.server.scripted import MODEL

ollama = pytest.importorskip("ollama")


live = test_api_clients.live


@pytest.fixture
def client(live: Live) -> Iterator[Any]:
    made = ollama.Client(live.url, headers={"Authorization": f"Bearer {KEY}"})
    yield made
    made._client.close()


def test_models(client: Any) -> None:
    assert [one.model for one in client.list().models] == [f"{MODEL}:latest"]
    assert client.ps().models[0].context_length == 4096
    assert client.show(MODEL).capabilities == ["completion", "tools", "thinking"]


@pytest.mark.parametrize("is_stream", [False, True])
def test_chat(live: Live, client: Any, is_stream: bool) -> None:
    live.play(EVERYTHING.replace("é", "é\u2028\x85"))
    options = {"num_ctx": 2048, "temperature": 0.2, "stop": ["zzz"]}
    asked = {"tools": CHAT_TOOLS, "think": True, "options": options, "keep_alive": "5m"}
    found = client.chat(f"{MODEL}:latest", USER, stream=is_stream, **asked)
    parts = list(found) if is_stream else [found]
    assert "".join(one.message.content or "" for one in parts) == "Well, é\u2028\x85 😀."
    assert "".join(one.message.thinking or "" for one in parts) == "let me see"
    calls = [call for one in parts for call in one.message.tool_calls or ()]
    assert [call.function.arguments for call in calls] == CALLS
    assert parts[-1].done and parts[-1].eval_count > 10 and parts[-1].total_duration > 0
    results = [{"role": "tool", "tool_name": "get_weather", "content": "fine"} for _ in calls]
    again = client.chat(MODEL, [*USER, parts[0].message, *results])
    assert again.done_reason == "stop"


def test_generate(live: Live, client: Any) -> None:
    live.play("Hello there")
    assert client.generate(MODEL, "hi", system="be brief").response == "Hello there"
    texts = [one.response for one in client.generate(MODEL, "hi", stream=True, raw=True)]
    assert "".join(texts) == "Hello there"
    assert client.generate(MODEL).done_reason == "load"


def test_refusals(client: Any) -> None:
    for ask in (
        lambda: client.pull("x"),
        lambda: client.push("x"),
        lambda: client.create("x", from_="y"),
        lambda: client.copy("x", "y"),
        lambda: client.delete("x"),
    ):
        with pytest.raises(ollama.ResponseError, match="over HTTP") as error:
            ask()
        assert error.value.status_code == 403
    with pytest.raises(ollama.ResponseError, match="Embeddings are not served"):
        client.embed(MODEL, "x")
    with pytest.raises(ollama.ResponseError, match="this server's context has 4096"):
        list(client.generate(MODEL, "x", stream=True, options={"num_ctx": 99999}))
    with pytest.raises(ollama.ResponseError, match="not found"):
        client.chat("other", USER)
