"""Many bodies at once, slowly: what they hold together is capped, and quick ones get through."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from flashdraft.server import limits
from flashdraft.server.arrivals import Arrivals, CrowdedOutError
from flashdraft.server.limits import Limits
from flashdraft.server.settings import ServerSettings
from tests.unit.server.asgi_client import make_scope
from tests.unit.server.live_server import CHAT, is_closed, live, post, read_answer, run

CHATS = "/v1/chat/completions"


def test_the_oldest_gives_way() -> None:
    async def scenario() -> None:
        arrivals = Arrivals(max_bytes=100)
        async with arrivals.begin(60) as second:
            second.add(b"x" * 30)
            with pytest.raises(CrowdedOutError):
                async with arrivals.begin(60) as third:
                    third.add(b"x" * 70)
                    assert arrivals.num_bytes == 100 and not second.is_crowded_out
                    third.add(b"x")
                    assert second.is_crowded_out and not third.is_crowded_out
                    assert arrivals.num_bytes == 71
                    third.add(b"x" * 30)  # more than all may have: nobody is left to give way
            assert arrivals.num_bytes == 0
            with pytest.raises(CrowdedOutError):  # it came before the reader was woken
                second.add(b"x")

    asyncio.run(scenario())


def test_an_older_sender_does_not_push_out_younger_ones() -> None:
    async def scenario() -> None:
        arrivals = Arrivals(max_bytes=100)
        with pytest.raises(CrowdedOutError):
            async with arrivals.begin(60) as old:
                old.add(b"x" * 50)
                async with arrivals.begin(60) as young:
                    young.add(b"x" * 50)
                    with pytest.raises(CrowdedOutError):
                        old.add(b"x")
                    assert young.data and not young.is_crowded_out
                    raise CrowdedOutError
        assert arrivals.num_bytes == 0

    asyncio.run(scenario())


def test_whoever_waits_is_woken_and_time_limits_stay_apart() -> None:
    async def scenario() -> None:
        arrivals = Arrivals(max_bytes=100)

        async def wait(timeout_s: float, size: int) -> str:
            try:
                async with arrivals.begin(timeout_s) as arrival:
                    arrival.add(b"x" * size)
                    await asyncio.sleep(60)
            except TimeoutError:
                return "late"
            except CrowdedOutError:
                return "crowded out"
            return "whole"

        waiting = [asyncio.create_task(wait(60, 60)), asyncio.create_task(wait(0.2, 30))]
        await asyncio.sleep(0.05)
        async with arrivals.begin(60) as quick:
            quick.add(b"x" * 20)
        assert await asyncio.gather(*waiting) == ["crowded out", "late"]
        assert arrivals.num_bytes == 0

    asyncio.run(asyncio.wait_for(scenario(), 20))


def test_a_body_whose_beginning_was_dropped_is_never_served() -> None:
    """The rest of a crowded-out body can come before its reader is woken."""

    async def scenario() -> list[tuple[int, bytes]]:
        served: list[bytes] = []

        async def echo(scope: Scope, receive: Receive, send: Send) -> None:
            served.append(await Request(scope, receive).body())
            await Response(b"")(scope, receive, send)

        layer = Limits(echo, ServerSettings(max_body_bytes=100, max_arriving_bytes=100))

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
    monkeypatch.setattr(limits, "DISCARD_S", 0.3)
    size, count, most = 40_000, 60, 410_000

    async def scenario() -> None:
        settings = {"max_body_bytes": 50_000, "max_arriving_bytes": most}
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
