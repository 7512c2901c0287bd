"""A client that leaves, over a real socket: its work ends at once, streamed or not."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from flashdraft.server.http.body_limits import BodyLimits
from flashdraft.server.http.disconnect import ClientDisconnectedError, run_until_disconnect
from flashdraft.server.http.request_records import RequestRecorder
from flashdraft.server.settings import ServerSettings
from flashdraft.server.telemetry.metrics import Metrics


class Work:
    """Something long that knows whether it was cancelled."""

    def __init__(self) -> None:
        self.began = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.lines: list[dict[str, object]] = []
        self.metrics = Metrics()

    async def run(self, seconds: float = 60) -> str:
        self.began.set()
        try:
            await asyncio.sleep(seconds)
            return "done"
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    def app(self) -> ASGIApp:
        async def whole(request: Request) -> Response:
            body = await request.body()
            return PlainTextResponse(await run_until_disconnect(request, self.run(float(body))))

        async def broken(request: Request) -> Response:
            async def fail() -> str:
                raise ValueError("broken")

            return PlainTextResponse(await run_until_disconnect(request, fail()))

        async def stream(request: Request) -> Response:
            async def parts() -> AsyncIterator[str]:
                yield "first"
                yield await self.run()

            return StreamingResponse(parts())

        routes = [
            Route(f"/{handler.__name__}", handler, methods=["POST"])
            for handler in (whole, broken, stream)
        ]
        app = Starlette(routes=routes)
        app.add_middleware(BodyLimits, settings=ServerSettings())
        app.add_middleware(RequestRecorder, metrics=self.metrics, sink=self.lines.append)
        return app


@contextlib.asynccontextmanager
async def serving(app: ASGIApp) -> AsyncIterator[tuple[str, int]]:
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(app, lifespan="off", log_config=None, http="h11")
    config.timeout_graceful_shutdown = 1
    server = uvicorn.Server(config)
    task = asyncio.create_task(server._serve([listener]))
    try:
        yield listener.getsockname()
    finally:
        server.should_exit = True
        await task


async def open_request(
    address: tuple[str, int], path: str, body: bytes
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection(*address)
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await writer.drain()
    return reader, writer


@pytest.mark.parametrize("path", ["/whole", "/stream"])
def test_leaving_cancels_the_work(path: str) -> None:
    async def scenario() -> None:
        work = Work()
        async with asyncio.timeout(10), serving(work.app()) as address:
            _, writer = await open_request(address, path, b"60")
            await work.began.wait()
            assert not work.cancelled.is_set()
            writer.transport.abort()
            async with asyncio.timeout(5):
                await work.cancelled.wait()
            while not work.lines:
                await asyncio.sleep(0.01)
            assert work.lines[0]["complete"] is False

    asyncio.run(scenario())


def test_staying_gets_the_answer() -> None:
    async def scenario() -> None:
        work = Work()
        async with asyncio.timeout(10), serving(work.app()) as address:
            reader, writer = await open_request(address, "/whole", b"0.05")
            answer = await reader.readuntil(b"done")
            assert answer.startswith(b"HTTP/1.1 200") and b"x-request-id: " in answer
            assert not work.cancelled.is_set()
            writer.close()
            assert work.lines[0]["status"] == 200 and work.lines[0]["complete"] is True

    asyncio.run(scenario())


def test_a_failure_inside_is_a_500_without_its_text() -> None:
    async def scenario() -> None:
        work = Work()
        async with asyncio.timeout(10), serving(work.app()) as address:
            reader, writer = await open_request(address, "/broken", b"")
            answer = await reader.readuntil(b"}}")
            assert answer.startswith(b"HTTP/1.1 500") and b"broken" not in answer
            assert work.lines[0]["error"] == "ValueError: broken"
            writer.close()

    asyncio.run(scenario())


def test_the_caller_being_cancelled_cancels_the_work() -> None:
    async def scenario() -> None:
        work = Work()

        async def receive() -> dict[str, object]:
            await asyncio.sleep(60)
            raise AssertionError

        request = Request({"type": "http", "headers": []}, receive)
        task = asyncio.create_task(run_until_disconnect(request, work.run()))
        await work.began.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert work.cancelled.is_set()

    asyncio.run(scenario())


def test_leaving_is_an_exception_of_its_own() -> None:
    async def scenario() -> None:
        async def receive() -> dict[str, object]:
            return {"type": "http.disconnect"}

        request = Request({"type": "http", "headers": []}, receive)
        with pytest.raises(ClientDisconnectedError):
            await run_until_disconnect(request, asyncio.sleep(60))

    asyncio.run(scenario())
