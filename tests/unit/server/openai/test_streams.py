"""When streams begin, what they say while nothing happens, and that they are always closed."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from flashdraft.errors import QueueFullError
from flashdraft.server.app import create_app
from flashdraft.server.http import sse
from flashdraft.server.http.sse import ReadAhead
from flashdraft.server.telemetry.metrics import Metrics
from tests.unit.server.asgi_client import call
from tests.unit.server.scripted import Scripted
from tests.unit.server.sse_reading import read_chunks, read_events

USER = [{"role": "user", "content": "hi"}]
CHAT = {"model": "tiny", "messages": USER, "stream": True}
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"model": "tiny", "prompt": "hi", "stream": True},
    "/v1/responses": {"model": "tiny", "input": "hi", "stream": True},
    "/v1/messages": {**CHAT, "max_tokens": 50},
}


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "PATIENCE_S", 0.02)
    monkeypatch.setattr(sse, "KEEP_ALIVE_S", 0.02)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("route", ROUTES)
def test_a_silent_engine_keeps_the_stream_alive(route: str) -> None:
    server = Scripted("Hello")

    async def pause(step: int) -> None:
        await asyncio.sleep(0.15 if step == 0 else 0)

    server.engine.pause = pause
    response = server.post(route, ROUTES[route])
    assert response.status_code == 200
    if route == "/v1/messages":
        pings = [name for name, _ in read_events(response.text) if name == "ping"]
        assert len(pings) > 2
    else:
        assert response.text.count(": keep-alive") > 1
    assert "Hel" in response.text
    assert server.engine.cancelled == []


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("route", ROUTES)
def test_a_late_refusal_is_an_event(route: str) -> None:
    server = Scripted("Hello")

    async def pause(step: int) -> None:
        await asyncio.sleep(0.1)
        raise QueueFullError("The queue is full.", 1)

    server.engine.pause = pause
    response = server.post(route, ROUTES[route])
    assert response.status_code == 200
    _, last = read_events(response.text)[-1]
    assert "The queue is full." in str(last)
    assert server.metrics.seen == [(route, "refused")]


@pytest.mark.parametrize(
    ("script", "code"), [("a b c d e f!!gone", "generation_failed"), ("a", None)]
)
@pytest.mark.parametrize("route", ROUTES)
def test_the_log_knows_a_stream_that_broke(route: str, script: str, code: str | None) -> None:
    lines: list[dict[str, Any]] = []
    server = Scripted(script)
    app = create_app(dataclasses.replace(server.serving, metrics=Metrics()), lines.append)
    headers = {"host": "127.0.0.1", "content-type": "application/json"}
    answer = call(app, "POST", route, headers, [json.dumps(ROUTES[route]).encode()])
    (line,) = lines
    assert answer.status == line["status"] == 200
    assert line["complete"] is (code is None) and line.get("error") == code


def test_a_quick_stream_has_no_comments() -> None:
    text = Scripted("Hello").post("/v1/chat/completions", CHAT).text
    assert ": keep-alive" not in text and len(read_chunks(text)) > 2


def test_closing_in_the_middle_of_an_item_closes_the_source() -> None:
    closed = []

    async def numbers() -> AsyncGenerator[int]:
        try:
            yield 1
            await asyncio.sleep(60)
            yield 2
        finally:
            closed.append(True)

    async def run() -> None:
        ahead = ReadAhead(numbers())
        await ahead.first()
        assert await anext(ahead) == 1
        waiting = asyncio.ensure_future(anext(ahead))
        await asyncio.sleep(0.01)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await ahead.aclose()
        unread = ReadAhead(numbers())
        await unread.first()
        await unread.aclose()

    asyncio.run(run())
    assert closed == [True, True]
