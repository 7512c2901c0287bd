"""Many bodies at once, slowly: what they hold together is capped, and quick ones get through."""

from __future__ import annotations

import asyncio
import tracemalloc
from pathlib import Path

import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from flashdraft.server.http import body_limits
from flashdraft.server.http.body_limits import BodyLimits
from flashdraft.server.http.body_memory import BodyMemory, BodyMemoryFullError
from flashdraft.server.http.errors import UNPARSED_BODY
from flashdraft.server.settings import ServerSettings
from tests.unit.server.asgi_client import make_scope
from tests.unit.server.live_server import CHAT, is_closed, live, post, read_answer, run

CHATS = "/v1/chat/completions"


def test_the_oldest_is_dropped() -> None:
    async def scenario() -> None:
        memory = BodyMemory(max_bytes=100)
        async with memory.receive(60) as second:
            second.add(b"x" * 30)
            with pytest.raises(BodyMemoryFullError):
                async with memory.receive(60) as third:
                    third.add(b"x" * 70)
                    assert memory.num_bytes == 100 and not second.is_dropped
                    third.add(b"x")
                    assert second.is_dropped and not third.is_dropped
                    assert memory.num_bytes == 71
                    third.add(b"x" * 30)  # more than all may have: none is left to drop
            assert memory.num_bytes == 0
            with pytest.raises(BodyMemoryFullError):  # it came before the reader was woken
                second.add(b"x")

    asyncio.run(scenario())


def test_an_older_sender_does_not_push_out_younger_ones() -> None:
    async def scenario() -> None:
        memory = BodyMemory(max_bytes=100)
        with pytest.raises(BodyMemoryFullError):
            async with memory.receive(60) as old:
                old.add(b"x" * 50)
                async with memory.receive(60) as young:
                    young.add(b"x" * 50)
                    with pytest.raises(BodyMemoryFullError):
                        old.add(b"x")
                    assert young.data and not young.is_dropped
                    raise BodyMemoryFullError
        assert memory.num_bytes == 0

    asyncio.run(scenario())


def test_whoever_waits_is_woken_and_time_limits_stay_apart() -> None:
    async def scenario() -> None:
        memory = BodyMemory(max_bytes=100)

        async def wait(timeout_s: float, size: int) -> str:
            try:
                async with memory.receive(timeout_s) as body:
                    body.add(b"x" * size)
                    await asyncio.sleep(60)
            except TimeoutError:
                return "late"
            except BodyMemoryFullError:
                return "dropped"
            return "whole"

        waiting = [asyncio.create_task(wait(60, 60)), asyncio.create_task(wait(0.2, 30))]
        await asyncio.sleep(0.05)
        async with memory.receive(60) as quick:
            quick.add(b"x" * 20)
        assert await asyncio.gather(*waiting) == ["dropped", "late"]
        assert memory.num_bytes == 0

    asyncio.run(asyncio.wait_for(scenario(), 20))


def test_a_body_whose_beginning_was_dropped_is_never_served() -> None:
    """The rest of a dropped body can arrive before its reader is woken."""

    async def scenario() -> list[tuple[int, bytes]]:
        served: list[bytes] = []

        async def echo(scope: Scope, receive: Receive, send: Send) -> None:
            served.append(await Request(scope, receive).body())
            await Response(b"")(scope, receive, send)

        layer = BodyLimits(echo, ServerSettings(max_body_bytes=100, max_body_memory_bytes=100))

        async def ask(source: asyncio.Queue[Message]) -> int:
            statuses: list[int] = []

            async def send(message: Message) -> None:
                statuses.extend([message["status"]] if "status" in message else [])

            await layer(make_scope("POST", "/v1/completions", ()), source.get, send)
            return statuses[0]

        first: asyncio.Queue[Message] = asyncio.Queue()
        second: asyncio.Queue[Message] = asyncio.Queue()
        tasks = [asyncio.create_task(ask(queue)) for queue in (first, second)]
        first.put_nowait({"type": "http.request", "body": b"1" * 60, "more_body": True})
        await asyncio.sleep(0.01)
        second.put_nowait({"type": "http.request", "body": b"2" * 60, "more_body": False})
        first.put_nowait({"type": "http.request", "body": b"1" * 10, "more_body": False})
        statuses = await asyncio.gather(*tasks)
        return list(zip(statuses, [b"1" * 70, b"2" * 60], strict=True)) + [
            (0, body) for body in served
        ]

    found = asyncio.run(asyncio.wait_for(scenario(), 20))
    assert found[0][0] == 503 and found[1][0] == 200
    assert [body for status, body in found if status == 0] == [b"2" * 60]


def test_many_slow_bodies_hold_little_and_lock_nobody_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(body_limits, "DISCARD_S", 0.3)
    size, count, most = 40_000, 60, 410_000

    async def scenario() -> None:
        settings = {"max_body_bytes": 50_000, "max_body_memory_bytes": most}
        async with live(tmp_path, **settings) as one:
            begun = post(CHATS, {"a": "x" * size}, length=size + 5_000)
            slow = [await one.connect(begun) for _ in range(count)]
            refused = 0
            for reader, _ in slow[: count - most // size]:
                status, headers, answer = await asyncio.wait_for(read_answer(reader), 15)
                assert status == 503 and int(headers["retry-after"]) > 0
                assert answer["error"]["code"] == "busy"
                assert str(most) in answer["error"]["message"]
                assert await is_closed(reader)
                refused += 1
            assert refused == count - most // size  # the youngest ten still fit
            status, _, answer = await one.ask(post(CHATS, CHAT))
            assert status == 200 and answer["usage"]["completion_tokens"] == 3
            for _, writer in slow:
                writer.close()
            lines = [line for line in one.lines if line["event"] == "request"]
            assert sum(line["status"] == 503 for line in lines) == refused

    run(scenario)


def test_a_body_counts_until_it_is_parsed() -> None:
    """One that has come whole, and waits or is looked at, leaves less room for others."""

    async def scenario() -> None:
        parsed, done = asyncio.Event(), asyncio.Event()
        held: list[int] = []

        async def slow(scope: Scope, receive: Receive, send: Send) -> None:
            await parsed.wait()
            await Request(scope, receive).body()
            scope[UNPARSED_BODY].release()
            held.append(memory.num_bytes)
            await done.wait()
            await Response(b"")(scope, receive, send)

        memory = BodyMemory(100)
        layer = BodyLimits(
            slow, ServerSettings(max_body_bytes=100, max_body_memory_bytes=100), memory
        )

        async def ask(size: int) -> int:
            statuses: list[int] = []

            async def receive() -> Message:
                return {"type": "http.request", "body": b"1" * size, "more_body": False}

            async def send(message: Message) -> None:
                statuses.extend([message["status"]] if "status" in message else [])

            await layer(make_scope("POST", "/v1/completions", ()), receive, send)
            return statuses[0]

        first = asyncio.create_task(ask(80))
        await asyncio.sleep(0.01)
        assert memory.num_bytes == 80
        assert await ask(30) == 503
        parsed.set()
        await asyncio.sleep(0.01)
        assert held == [0]
        second = asyncio.create_task(ask(30))
        await asyncio.sleep(0.01)
        done.set()
        assert [await first, await second] == [200, 200]
        assert memory.num_bytes == 0

    asyncio.run(asyncio.wait_for(scenario(), 20))


def test_a_body_still_on_its_way_when_the_server_ends_is_told_so(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with live(tmp_path) as one:
            reader, _ = await one.connect(post(CHATS, CHAT, length=5_000))
            while not one.body_memory.has_incoming:
                await asyncio.sleep(0.01)
            one.body_memory.shut_down()
            status, headers, answer = await asyncio.wait_for(read_answer(reader), 5)
            assert status == 503 and int(headers["retry-after"]) > 0
            assert "shutting down" in answer["error"]["message"]
            assert await is_closed(reader)
            assert (await one.ask(post(CHATS, CHAT)))[0] == 200
            assert not [line for line in one.lines if "exception" in line]

    run(scenario)


def test_a_request_that_is_cut_off_at_the_end_leaves_no_trace(tmp_path: Path) -> None:
    lines = []

    async def scenario() -> None:
        async with live(tmp_path) as one:
            lines.append(one.lines)
            reader, _ = await one.connect(post(CHATS, CHAT, length=5_000))
            while not one.body_memory.has_incoming:
                await asyncio.sleep(0.01)
        assert await is_closed(reader)

    run(scenario)
    assert not [line for line in lines[0] if "exception" in line or line.get("status") == 500]


@pytest.mark.parametrize("path", [CHATS, "/v1/messages"])
def test_what_has_no_effect_is_not_kept_while_the_answer_runs(tmp_path: Path, path: str) -> None:
    async def scenario() -> None:
        async with live(tmp_path, step_s=0.05) as one:
            body = {**CHAT, "max_tokens": 1000, "metadata": {"a": "x" * 2_000_000}}
            tracemalloc.start()
            try:
                asked = [await one.connect(post(path, body)) for _ in range(6)]
                async with asyncio.timeout(20):
                    while one.engine.num_open < len(asked):
                        await asyncio.sleep(0.01)
                assert tracemalloc.get_traced_memory()[0] < 4_000_000
            finally:
                tracemalloc.stop()
            for _, writer in asked:
                writer.close()

    run(scenario)
