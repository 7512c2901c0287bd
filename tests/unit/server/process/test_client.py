"""The front's end of the wire, against an engine's process that dies, hangs, lies and refuses."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from flashdraft.core import FinishReason, Request, SamplingParams, TokenEvent
from flashdraft.errors import (
    CapacityError,
    CheckpointError,
    ContextLengthError,
    EngineLostError,
    FlashdraftError,
    QueueFullError,
    RequestError,
)
from flashdraft.server.process.client import EngineClient, EngineState
from flashdraft.server.settings import ServerSettings
from tests.unit.server.live_server import FAKE

Scenario = Callable[[EngineClient], Awaitable[None]]


def request(name: str = "r", tokens: int = 5, prompt: tuple[int, ...] = (3, 4, 5)) -> Request:
    return Request(name, prompt, SamplingParams(max_tokens=tokens), seed=1)


async def answer(client: EngineClient, wanted: Request) -> list[TokenEvent]:
    return [event async for event in client.generate(wanted)]


async def finishes(client: EngineClient, tokens: int = 5) -> bool:
    """Whether an answer comes as it should."""
    generation = (await answer(client, request(tokens=tokens)))[-1].generation
    return generation is not None and generation.token_ids == list(range(1, tokens + 1))


async def until(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def engine(
    tmp_path: Path, behaviour: str = "normal", step_s: float = 0.005, **settings: Any
) -> AsyncIterator[EngineClient]:
    arguments = {"behaviour": behaviour, "lives": str(tmp_path / "lives"), "step_s": step_s}
    client = EngineClient(arguments, ServerSettings(**settings), command=FAKE)
    await client.start()
    pid = client.pid
    try:
        yield client
    finally:
        await client.stop()
        assert client.pid is None
        with pytest.raises(ProcessLookupError):
            os.kill(pid or 0, 0)


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(20):
            await scenario()

    asyncio.run(limited())


def test_answers_arrive_whole_and_side_by_side(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with engine(tmp_path) as client:
            assert client.state is EngineState.READY
            assert client.info.max_context == 64 and client.info.eos_token_ids == (1,)
            first, second = await asyncio.gather(
                answer(client, request("a", 5)), answer(client, request("b", 9))
            )
        for events, count in ((first, 5), (second, 9)):
            generation = events[-1].generation
            assert generation is not None
            assert generation.token_ids == list(range(1, count + 1))
            assert generation.drafted == [True] * count
            assert "".join(event.text for event in events) == generation.text
            assert generation.stats.histogram == {1: count}
        metrics = client.metrics
        assert metrics.completion_tokens.get() == 14
        assert metrics.generations.get("length") == 2
        assert metrics.ttft.count == metrics.duration.count == metrics.queue_time.count == 2
        assert metrics.inter_token.count == 12

    run(scenario)


@pytest.mark.parametrize(
    ("prompt", "kind"),
    [((99,), RequestError), ((99, 1), ContextLengthError), ((2,) * 64, ContextLengthError)],
)
def test_what_is_refused_keeps_its_kind(
    tmp_path: Path, prompt: tuple[int, ...], kind: type[FlashdraftError]
) -> None:
    async def scenario() -> None:
        async with engine(tmp_path) as client:
            with pytest.raises(kind) as caught:
                await answer(client, request(prompt=prompt))
            assert type(caught.value) is kind
            assert client.num_open == 0
            assert await finishes(client)

    run(scenario)


def test_closing_an_answer_cancels_it_in_the_engine(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with engine(tmp_path) as client:
            events = client.generate(request(tokens=100_000))
            async for _ in events:
                break
            await events.aclose()
            assert client.num_open == 0
            await until(lambda: client.metrics.generations.get("cancelled") == 1)
            task = asyncio.create_task(answer(client, request("t", tokens=100_000)))
            await until(lambda: client.num_open == 1)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await until(lambda: client.metrics.generations.get("cancelled") == 2)

    run(scenario)


@pytest.mark.parametrize("behaviour", ["dies", "garbage", "huge"])
def test_a_lost_engine_fails_its_requests_and_comes_back(tmp_path: Path, behaviour: str) -> None:
    async def scenario() -> None:
        async with engine(tmp_path, behaviour) as client:
            found: list[TokenEvent] = []
            with pytest.raises(EngineLostError) as caught:
                async for event in client.generate(request(tokens=100)):
                    found.append(event)
            assert [t for e in found for t in e.token_ids] == [1, 2]  # what had come is not lost
            assert caught.value.retry_after_s is not None
            assert client.state is EngineState.RESTARTING and "again" in client.detail
            with pytest.raises(EngineLostError):
                await answer(client, request())
            await until(lambda: client.state is EngineState.READY)
            assert await finishes(client)
            assert client.metrics.restarts.get() == 1 and client.metrics.engine_up.get() == 1

    run(scenario)


@pytest.mark.parametrize("behaviour", ["hangs", "stalls"])
def test_a_hung_engine_is_killed_and_comes_back(tmp_path: Path, behaviour: str) -> None:
    async def scenario() -> None:
        async with engine(tmp_path, behaviour, engine_timeout_s=0.8) as client:
            await asyncio.sleep(1.0)  # without work it is not hung
            assert client.state is EngineState.READY
            with pytest.raises(EngineLostError, match="no step for 0.8 s"):
                await answer(client, request(tokens=100))
            await until(lambda: client.state is EngineState.READY)
            assert await finishes(client)

    run(scenario)


def test_it_gives_up_after_too_many_deaths_in_a_row(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with engine(tmp_path, "always dies", max_restarts=1) as client:
            for expected in (EngineState.RESTARTING, EngineState.FAILED):
                with pytest.raises(EngineLostError):
                    await answer(client, request(tokens=100))
                assert client.state is expected
                if expected is EngineState.RESTARTING:
                    await until(lambda: client.state is EngineState.READY)
            assert "SIGKILL" in client.detail
            with pytest.raises(EngineLostError):
                await answer(client, request())

    run(scenario)


def test_an_answer_between_two_deaths_clears_the_record(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with engine(tmp_path, "always dies", max_restarts=1) as client:
            for _ in range(3):
                assert await finishes(client, 2)
                with pytest.raises(EngineLostError):
                    await answer(client, request(tokens=100))
                await until(lambda: client.state is EngineState.READY)

    run(scenario)


@pytest.mark.parametrize(
    ("behaviour", "kind", "text"),
    [("fails", CheckpointError, "Broken weights."), ("exits", EngineLostError, "exit code 7")],
)
def test_a_model_that_does_not_load_is_an_error_at_once(
    tmp_path: Path, behaviour: str, kind: type[FlashdraftError], text: str
) -> None:
    async def scenario() -> None:
        arguments = {"behaviour": behaviour, "lives": str(tmp_path / "lives")}
        client = EngineClient(arguments, ServerSettings(), command=FAKE)
        with pytest.raises(EngineLostError):
            _ = client.info
        with pytest.raises(kind, match=text):
            await client.start()
        await until(lambda: client.state is EngineState.FAILED)
        await client.stop()
        assert (tmp_path / "lives").read_text() == "1"

    run(scenario)


def test_a_command_that_cannot_run_is_an_error(tmp_path: Path) -> None:
    async def scenario() -> None:
        client = EngineClient({}, ServerSettings(), command=(str(tmp_path / "nothing"),))
        with pytest.raises(EngineLostError, match="cannot be started"):
            await client.start()
        await client.stop()

    run(scenario)


def test_a_full_queue_refuses_and_says_when(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with engine(tmp_path, max_queue=1) as client:
            tasks = [
                asyncio.create_task(answer(client, request(f"r{n}", 50)))
                for n in range(3)  # a batch of two, and one that waits
            ]
            await until(lambda: client.num_open == 3)
            with pytest.raises(QueueFullError) as caught:
                await answer(client, request("late"))
            assert 1 <= caught.value.retry_after_s <= 60
            assert isinstance(caught.value, CapacityError)
            await asyncio.gather(*tasks)
            assert await finishes(client)

    run(scenario)


def test_a_reader_that_falls_behind_is_cancelled(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with engine(tmp_path, step_s=0.001, max_buffered_tokens=300) as client:
            slow = client.generate(request("slow", tokens=100_000))
            await anext(slow)
            fast = await answer(client, request("fast", 500))  # the other one is not held up
            assert sum(len(event.token_ids) for event in fast) == 500
            await until(lambda: client.metrics.generations.get("cancelled") == 1)
            with pytest.raises(CapacityError, match="unread"):
                async for _ in slow:
                    pass

    run(scenario)


def test_a_reader_that_is_late_catches_up_with_a_larger_piece(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with engine(tmp_path, step_s=0.0) as client:
            events = client.generate(request("late", tokens=200))
            found = [await anext(events)]
            while client.metrics.generations.get("length") == 0:
                await asyncio.sleep(0.01)
            found += [event async for event in events]
            assert len(found) < 20
            whole = found[-1].generation
            assert whole is not None and whole.token_ids == list(range(1, 201))
            assert [token for event in found for token in event.token_ids] == whole.token_ids
            assert "".join(event.text for event in found) == whole.text

    run(scenario)


def test_an_answer_that_takes_too_long_is_cancelled(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with engine(tmp_path, request_timeout_s=0.2) as client:
            with pytest.raises(CapacityError, match="longer than 0.2 s"):
                await answer(client, request(tokens=100_000))
            await until(lambda: client.metrics.generations.get("cancelled") == 1)

    run(scenario)


def test_draining_finishes_what_runs_and_takes_nothing_new(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with engine(tmp_path) as client:
            task = asyncio.create_task(answer(client, request("a", 40)))
            await until(lambda: client.num_open == 1)
            drained = asyncio.create_task(client.drain(5))
            await until(lambda: client.state is EngineState.DRAINING)
            with pytest.raises(EngineLostError, match="shutting down"):
                await answer(client, request("b"))
            await drained
            events = await task
            assert events[-1].generation is not None
            assert events[-1].generation.finish_reason is FinishReason.LENGTH

    run(scenario)


def test_retry_after_looks_at_what_runs_and_not_at_short_answers_alone(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with engine(tmp_path, max_queue=0, step_s=0.1) as client:
            client._mean_duration_s = 0.1  # of many short ones
            running = [client.generate(request(name, tokens=1000)) for name in "ab"]
            for one in running:
                await anext(one)
            for stream in client._streams.values():
                stream.opened_at -= 40
            with pytest.raises(QueueFullError) as full:
                await answer(client, request("c"))
            assert 15 < full.value.retry_after_s < 30
            for one in running:
                await one.aclose()

    run(scenario)


def test_a_request_with_reserved_places_may_open_more_answers_in_a_drain(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        async with engine(tmp_path, step_s=0.02) as client:
            with client.reserve(1) as reserved:
                first = client.generate(request("a"), reserved)
                await anext(first)
                drained = asyncio.create_task(client.drain(10))
                await asyncio.sleep(0)
                assert len([event async for event in first]) == 4
                await asyncio.sleep(0.05)  # between two answers nothing is open
                assert not drained.done()
                assert len([event async for event in client.generate(request("b"), reserved)]) == 5
                with pytest.raises(EngineLostError):
                    await answer(client, request("c"))
            await asyncio.wait_for(drained, 1)

    run(scenario)


def test_an_engine_that_is_given_up_is_an_error_in_the_log_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with engine(tmp_path, "always dies", max_restarts=1) as client:
            waiting = asyncio.create_task(client.wait_given_up())
            for _ in range(2):
                assert not waiting.done()
                with pytest.raises(EngineLostError):
                    await answer(client, request(tokens=50))
                await until(lambda: client.state in (EngineState.READY, EngineState.FAILED))
            assert "2 times in a row" in await asyncio.wait_for(waiting, 5)

    run(scenario)
    errors = [one for one in caplog.records if one.levelname == "ERROR"]
    assert len(errors) == 1 and "given up" in errors[0].getMessage()


def test_draining_cancels_what_does_not_end_in_time(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with engine(tmp_path) as client:
            task = asyncio.create_task(answer(client, request("a", 100_000)))
            await until(lambda: client.num_open == 1)
            began = time.monotonic()
            await client.drain(0.2)
            assert time.monotonic() - began < 1.9
            with pytest.raises(EngineLostError, match="shutting down"):
                await task
            await until(lambda: client.metrics.generations.get("cancelled") == 1)

    run(scenario)


def test_stopping_fails_what_runs(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with engine(tmp_path) as client:
            task = asyncio.create_task(answer(client, request("a", 100_000)))
            await until(lambda: client.num_open == 1)
            await client.stop()
            with pytest.raises(EngineLostError):
                await task

    run(scenario)


def test_two_requests_of_one_name_are_told_apart(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with engine(tmp_path) as client:
            task = asyncio.create_task(answer(client, request("a", 30)))
            await until(lambda: client.num_open == 1)
            with pytest.raises(RequestError, match="already running"):
                await answer(client, request("a"))
            assert (await task)[-1].generation is not None

    run(scenario)
