"""An engine that says nothing: told to clients within seconds, and not yet given up."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from flashdraft.core import Request, SamplingParams
from flashdraft.errors import EngineLostError
from flashdraft.server.process.client import EngineClient, EngineState
from flashdraft.server.settings import ServerSettings
from tests.unit.server.live_server import CHAT, FAKE, HEALTH, Live, live, post, run

TOLD_S = 5.0  # within which a stopped engine is known
METRICS = HEALTH.replace(b"/health", b"/metrics")


async def health(one: Live, status: int, within_s: float) -> dict[str, Any]:
    """What /health says once it has this status."""
    async with asyncio.timeout(within_s):
        while True:
            found, headers, answer = await one.ask(HEALTH)
            if found == status:
                assert ("retry-after" in headers) == (status == 503)
                return dict(answer)
            await asyncio.sleep(0.05)


async def metric(one: Live, name: str) -> str:
    reader, writer = await one.connect(METRICS)
    with contextlib.closing(writer):
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(head.split("content-length: ")[1].split()[0])
        page = (await reader.readexactly(length)).decode()
    return next(line.split()[1] for line in page.splitlines() if line.startswith(name + " "))


@contextlib.contextmanager
def stopped(pid: int | None) -> Iterator[None]:
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def test_a_stopped_engine_is_told_and_loses_nothing_when_it_goes_on(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with live(tmp_path, step_s=0.005) as one:
            body = {"model": "fake", "prompt": "the", "max_tokens": 300, "stream": True}
            reader, writer = await one.connect(post("/v1/completions", body, Connection="close"))
            await reader.readuntil(b"data: ")
            with stopped(one.engine.pid):
                said = await health(one, 503, TOLD_S)
                assert said["status"] == "unresponsive"
                assert "has not answered for" in said["detail"]
                assert await metric(one, "flashdraft_engine_up") == "0"
                status, headers, answer = await one.ask(post("/v1/chat/completions", CHAT))
                assert status == 503 and answer["error"]["code"] == "engine_unavailable"
                assert int(headers["retry-after"]) > 0
            assert (await health(one, 200, 2.0))["status"] == "ready"
            assert await metric(one, "flashdraft_engine_up") == "1"
            rest = (await reader.read()).decode()
            writer.close()
            assert "t300 " in rest and "[DONE]" in rest
            assert (await one.ask(post("/v1/chat/completions", CHAT)))[0] == 200
            assert await metric(one, "flashdraft_engine_restarts_total") == "0"

    run(scenario)


@contextlib.asynccontextmanager
async def engine(tmp_path: Path, **settings: Any) -> AsyncIterator[EngineClient]:
    behaviour = settings.pop("behaviour", "normal")
    arguments = {"behaviour": behaviour, "lives": str(tmp_path / "lives")}
    client = EngineClient(arguments, ServerSettings(**settings), command=FAKE)
    await client.start()
    try:
        yield client
    finally:
        await client.stop()


def test_a_stopped_engine_without_work_is_started_again_at_its_limit(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with engine(tmp_path, engine_timeout_s=4.0) as client:
            first = client.pid
            with stopped(first):
                await wait_for(client, EngineState.UNRESPONSIVE)
                await wait_for(client, EngineState.RESTARTING)
                assert "not answered for 4 s" in client.detail
            await wait_for(client, EngineState.READY)
            assert client.pid != first and client.metrics.restarts.get() == 1

    run(scenario)


def test_an_engine_that_is_busy_for_long_is_not_taken_for_a_stopped_one(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with engine(tmp_path, behaviour="stalls", engine_timeout_s=6.0) as client:
            wanted = Request("r", (3, 4), SamplingParams(max_tokens=100), seed=1)
            states = set()
            with pytest.raises(EngineLostError, match="no step for 6 s"):
                async for _ in client.generate(wanted):
                    began = time.monotonic()
                    while client.metrics.completion_tokens.get() >= 2:
                        await asyncio.sleep(0.05)
                        if time.monotonic() - began > TOLD_S:
                            break
                        states.add(client.state)
            assert states == {EngineState.READY}

    run(scenario)


def test_a_stopped_engine_does_not_hold_up_the_end_of_the_server(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with engine(tmp_path) as client:
            with stopped(client.pid):
                await wait_for(client, EngineState.UNRESPONSIVE)
                began = time.monotonic()
                await client.stop()
                assert time.monotonic() - began < 2.0

    run(scenario)


async def wait_for(client: EngineClient, state: EngineState) -> None:
    async with asyncio.timeout(10):
        while client.state is not state:
            await asyncio.sleep(0.01)
