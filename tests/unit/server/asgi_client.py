"""Calls an ASGI application without a network: one request, its whole answer."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp, Message, Scope


@dataclass
class Answer:
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    num_received: int = 0  # bytes of the request's body that the application asked for

    def json(self) -> Any:
        return json.loads(self.body)


def make_scope(method: str, path: str, headers: Iterable[tuple[str, str]]) -> Scope:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(k.lower().encode("latin-1"), v.encode("latin-1")) for k, v in headers],
        "client": ("127.0.0.1", 5000),
        "server": ("127.0.0.1", 8000),
    }


async def call_async(
    app: ASGIApp,
    method: str = "GET",
    path: str = "/",
    headers: Mapping[str, str] | Iterable[tuple[str, str]] = (("host", "127.0.0.1:8000"),),
    chunks: Iterable[bytes] = (b"",),
) -> Answer:
    answer = Answer()
    parts = list(chunks)
    gone = asyncio.Event()

    async def receive() -> Message:
        if parts:
            body = parts.pop(0)
            answer.num_received += len(body)
            return {"type": "http.request", "body": body, "more_body": bool(parts)}
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            answer.status = message["status"]
            answer.headers = {k.decode(): v.decode() for k, v in message["headers"]}
        else:
            answer.body += message.get("body", b"")

    pairs = headers.items() if isinstance(headers, Mapping) else headers
    await app(make_scope(method, path, pairs), receive, send)
    return answer


def call(app: ASGIApp, *arguments: Any, **named: Any) -> Answer:
    return asyncio.run(call_async(app, *arguments, **named))


def call_and_watch(
    app: ASGIApp,
    path: str,
    headers: Iterable[tuple[str, str]],
    data: bytes,
    meanwhile: Callable[[], Awaitable[None]] | None = None,
) -> tuple[Answer, float]:
    """Post some bytes; the answer, and the longest that the event loop let anybody wait.

    `meanwhile` is done over and over while the request is served, and is part of what is timed.
    """

    async def watch(done: asyncio.Event) -> float:
        worst = 0.0
        while not done.is_set():
            began = time.perf_counter()
            if meanwhile is not None:
                await meanwhile()
            await asyncio.sleep(0.002)
            worst = max(worst, time.perf_counter() - began)
        return worst

    async def ask() -> tuple[Answer, float]:
        done = asyncio.Event()
        watching = asyncio.create_task(watch(done))
        await asyncio.sleep(0.01)
        answer = await call_async(app, "POST", path, headers, [data])
        await asyncio.sleep(0)
        done.set()
        return answer, await watching

    return asyncio.run(ask())
