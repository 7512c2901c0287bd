"""A client that asks and never reads, over a real socket: it costs a bounded buffer and no more."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from flashdraft.models.tokenizer import Tokenizer
from flashdraft.server.answering.serving import Serving
from flashdraft.server.app import create_app
from flashdraft.server.process.client import EngineClient
from flashdraft.server.settings import ServerSettings
from tests.tiny import make_tiny_tokenizer
from tests.unit.server.live_server import FAKE

ENDLESS = 1_000_000


def question(max_tokens: int) -> bytes:
    body = json.dumps({"model": "fake", "prompt": "the", "max_tokens": max_tokens, "stream": True})
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode()


def ask_and_never_read(address: tuple[str, int]) -> socket.socket:
    deaf = socket.socket()
    deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    deaf.connect(address)
    deaf.sendall(question(ENDLESS))
    return deaf


@pytest.mark.parametrize(
    "limits", [{"max_buffered_tokens": 2000}, {"write_timeout_s": 0.5}], ids=["buffer", "time"]
)
def test_a_client_that_never_reads_is_cut_off_and_others_are_not(
    tmp_path: Path, limits: dict[str, Any]
) -> None:
    async def scenario() -> None:
        settings = ServerSettings(**limits)
        arguments = {"lives": str(tmp_path / "lives"), "step_s": 0, "max_context": 2 * ENDLESS}
        engine = EngineClient(arguments, settings, command=FAKE)
        lines: list[dict[str, Any]] = []
        serving = Serving(engine, Tokenizer(make_tiny_tokenizer()), settings, engine.metrics)
        config = uvicorn.Config(
            create_app(serving, lines.append), lifespan="off", log_config=None, http="h11"
        )
        config.timeout_graceful_shutdown = 1
        server = uvicorn.Server(config)
        listener = socket.create_server(("127.0.0.1", 0))
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
        await engine.start()
        task = asyncio.create_task(server._serve([listener]))
        try:
            address = listener.getsockname()
            deaf = ask_and_never_read(address)
            while engine.num_open == 0:
                await asyncio.sleep(0.01)
            reader, writer = await asyncio.open_connection(*address, limit=2**24)
            writer.write(question(300))
            assert b"t300 " in await reader.readuntil(b"[DONE]")
            while engine.metrics.generations.get("cancelled") == 0:
                await asyncio.sleep(0.02)
            if "write_timeout_s" in limits:
                while engine.num_open:
                    await asyncio.sleep(0.02)
            deaf.close()
            writer.close()
            while engine.num_open or len(lines) < 2:
                await asyncio.sleep(0.02)
            assert {line["complete"] for line in lines} == {True, False}
        finally:
            server.should_exit = True
            await task
            await engine.stop()

    async def limited() -> None:
        async with asyncio.timeout(30):
            await scenario()

    asyncio.run(limited())
