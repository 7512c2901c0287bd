"""A server on a real socket, before an engine that misbehaves on command; and a client in bytes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashdraft.models.tokenizer import Tokenizer
from flashdraft.server.answering.serving import Serving
from flashdraft.server.app import create_app
from flashdraft.server.http.body_memory import BodyMemory
from flashdraft.server.launch import make_server
from flashdraft.server.process.client import EngineClient
from flashdraft.server.settings import ServerSettings
from flashdraft.server.telemetry.logs import structured_logging
from tests.tiny import CHAT_TEMPLATE, SPECIAL_TOKENS, make_tiny_tokenizer

FAKE = (sys.executable, str(Path(__file__).with_name("fake_worker.py")))
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
LONG = 100_000  # tokens: more than any buffer holds
CHAT = {"model": "fake", "messages": [{"role": "user", "content": "the"}], "max_tokens": 3}


@dataclass
class Live:
    """A server that listens, and the lines of its log."""

    address: tuple[str, int]
    lines: list[dict[str, Any]]
    engine: EngineClient
    connections: Collection[Any]
    body_memory: BodyMemory

    async def connect(self, sent: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(*self.address)
        writer.write(sent)
        await writer.drain()
        return reader, writer

    async def ask(self, sent: bytes) -> tuple[int, dict[str, str], Any]:
        reader, writer = await self.connect(sent)
        answer = await read_answer(reader)
        writer.close()
        return answer


async def read_answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], Any]:
    status, *fields = (await reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
    headers = {name.lower(): value for name, value in (one.split(": ", 1) for one in fields)}
    body = await reader.readexactly(int(headers["content-length"]))
    return int(status.split()[1]), headers, json.loads(body)


def post(path: str, body: Any, length: int | None = None, **headers: str) -> bytes:
    data = json.dumps(body).encode()
    fields = {"Host": "localhost", "Content-Type": "application/json", **headers}
    fields["Content-Length"] = str(len(data) if length is None else length)
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + data


@contextlib.asynccontextmanager
async def live(tmp_path: Path, step_s: float = 0, **settings: Any) -> AsyncIterator[Live]:
    chosen = ServerSettings(**settings)
    arguments = {"lives": str(tmp_path / "lives"), "step_s": step_s, "max_context": 2 * LONG}
    engine = EngineClient(arguments, chosen, command=FAKE)
    tokenizer = Tokenizer(
        make_tiny_tokenizer(),
        special_tokens={"eos_token": SPECIAL_TOKENS[2]},
        chat_template=CHAT_TEMPLATE,
    )
    lines: list[dict[str, Any]] = []
    serving = Serving(engine, tokenizer, chosen, engine.metrics)
    app = create_app(serving, lines.append)
    server = make_server(app, chosen)
    server.config.timeout_graceful_shutdown = 1
    with structured_logging(lines.append), socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
        await engine.start()
        task = asyncio.create_task(server.serve([listener]))
        try:
            connections = server.server_state.connections
            yield Live(listener.getsockname(), lines, engine, connections, app.state.body_memory)
        finally:
            server.should_exit = True
            await task
            await engine.stop()


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(40):
            await scenario()

    asyncio.run(limited())


async def is_closed(reader: asyncio.StreamReader) -> bool:
    try:
        return await asyncio.wait_for(reader.read(), 15) == b""
    except ConnectionError:
        return True
