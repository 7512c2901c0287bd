"""Bodies: their size while they arrive, their depth before they are parsed, and slow clients."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterable
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from flashdraft.server.http import body_limits
from flashdraft.server.http.body_limits import BodyLimits, ClientTooSlowError, is_deeper_than
from flashdraft.server.settings import ServerSettings
from flashdraft.server.telemetry.logs import begin_record, current_record
from tests.unit.server.asgi_client import Answer, call, make_scope


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    body = await Request(scope, receive).body()
    await Response(body)(scope, receive, send)


def post(chunks: Iterable[bytes], headers: dict[str, str] | None = None, **s: Any) -> Answer:
    return call(
        BodyLimits(echo, ServerSettings(**s)), "POST", "/v1/completions", headers or {}, chunks
    )


def test_a_body_arrives_as_it_was_sent() -> None:
    chunks = [b'{"a": ', b'"', "ü".encode()[:1], "ü".encode()[1:], b'"}']
    assert post(chunks).body == b"".join(chunks)
    assert post([b""]).status == 200


@pytest.mark.parametrize("declared", [None, "10", "999999"])
def test_the_cap_holds_whatever_the_header_says(declared: str | None) -> None:
    headers = {} if declared is None else {"content-length": declared}
    answer = post([b"x" * 400] * 4, headers, max_body_bytes=1000)
    assert answer.status == 413 and "1000 bytes" in answer.json()["error"]["message"]
    assert answer.headers["connection"] == "close"
    assert answer.num_received == 1600  # the sender is heard out, or it would not hear us
    assert post([b'"' + b"x" * 998 + b'"'], headers, max_body_bytes=1000).status in (200, 413)


def test_a_body_at_the_cap_passes() -> None:
    assert post([b"1" * 600, b"1" * 400], max_body_bytes=1000).status == 200


def test_an_endless_body_is_not_read_to_its_end() -> None:
    answer = post([b"x" * 1000] * 1000, max_body_bytes=1000)
    assert answer.status == 413 and answer.num_received < 20_000


def test_a_sender_that_asks_first_is_refused_before_it_sends() -> None:
    headers = {"content-length": "5000", "expect": "100-continue"}
    answer = post([b"x" * 5000], headers, max_body_bytes=1000)
    assert answer.status == 413 and answer.num_received == 0


def test_what_is_no_utf8_is_refused() -> None:
    answer = post([b'{"a": "\xff"}'])
    assert answer.status == 400 and "byte 7" in answer.json()["error"]["message"]


def test_compressed_bodies_are_refused() -> None:
    assert post([b"{}"], {"content-encoding": "gzip"}).status == 415


@pytest.mark.parametrize("size", [100, 300_000])
def test_depth_is_refused_before_parsing(size: int) -> None:
    answer = post([b'{"a":' * size])
    assert answer.status == 400 and "64 levels" in answer.json()["error"]["message"]
    assert post([json.dumps([[[["[" * size]]]]).encode()]).status == 200


@pytest.mark.parametrize(
    ("text", "depth"),
    [
        (b"", 0),
        (b"[]", 1),
        (b"[{}]", 2),
        (b"[[],[]]", 2),
        (b'["[[[[", "\\"[[[["]', 1),
        (b'["\\\\", []]', 2),
        (b'{"a": [1, {"b": 2}]}', 3),
        (b'"[[[[', 0),
        (b"]]][[[", 3 - 3),
    ],
)
def test_depth_is_counted_outside_strings(text: bytes, depth: int) -> None:
    assert not is_deeper_than(text, depth)
    assert depth == 0 or is_deeper_than(text, depth - 1)


@pytest.mark.parametrize(
    "bomb", ['"' * 2**22, '\\"' * 2**21, '"\\', "[]" * 2**22, '[""],' * 2**20, '"' + "a" * 2**22]
)
def test_the_scan_takes_linear_time(bomb: str) -> None:
    body = b"[]" * 100 + bomb.encode()  # enough brackets for a closer look
    began = time.process_time()
    assert not is_deeper_than(body, 64)
    assert time.process_time() - began < 2


def test_a_body_that_never_comes_times_out() -> None:
    async def scenario() -> list[Message]:
        sent: list[Message] = []

        async def receive() -> Message:
            await asyncio.sleep(60)
            raise AssertionError

        async def send(message: Message) -> None:
            sent.append(message)

        layer = BodyLimits(echo, ServerSettings(body_timeout_s=0.05))
        await layer(make_scope("POST", "/", ()), receive, send)
        return sent

    assert asyncio.run(scenario())[0]["status"] == 408


def test_a_client_that_leaves_before_its_body_gets_no_answer() -> None:
    async def scenario() -> list[Message]:
        sent: list[Message] = []

        async def receive() -> Message:
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            sent.append(message)

        await BodyLimits(echo, ServerSettings())(make_scope("POST", "/", ()), receive, send)
        return sent

    assert asyncio.run(scenario()) == []


def test_a_client_that_does_not_read_is_given_up() -> None:
    async def scenario() -> None:
        async def receive() -> Message:
            return {"type": "http.request", "body": b"1"}

        async def send(message: Message) -> None:
            await asyncio.sleep(60)

        layer = BodyLimits(echo, ServerSettings(write_timeout_s=0.05))
        with pytest.raises(ClientTooSlowError):
            await layer(make_scope("POST", "/", ()), receive, send)

    asyncio.run(scenario())


@pytest.mark.parametrize("log_prompts", [False, True])
def test_bodies_are_recorded_only_if_asked(log_prompts: bool) -> None:
    async def recorded(scope: Scope, receive: Receive, send: Send) -> None:
        record = current_record()
        await Response(str(record.body if record else None))(scope, receive, send)

    async def outer(scope: Scope, receive: Receive, send: Send) -> None:
        begin_record("POST", "/")
        layer = BodyLimits(recorded, ServerSettings(log_prompts=log_prompts))
        await layer(scope, receive, send)

    answer = call(outer, "POST", "/", (), [b'{"prompt": "mine"}'])
    assert answer.body == (b'{"prompt": "mine"}' if log_prompts else b"None")


def test_discarding_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_limits, "DISCARD_S", 0.05)

    async def scenario() -> int:
        sent: list[Message] = []
        parts = [b"x" * 2000]

        async def receive() -> Message:
            if parts:
                return {"type": "http.request", "body": parts.pop(), "more_body": True}
            await asyncio.sleep(60)
            raise AssertionError

        async def send(message: Message) -> None:
            sent.append(message)

        layer = BodyLimits(echo, ServerSettings(max_body_bytes=1000))
        await layer(make_scope("POST", "/", ()), receive, send)
        return int(sent[0]["status"])

    assert asyncio.run(scenario()) == 413
