"""Several answers to one request and a queue that is nearly full: all of them, or 429 at once."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from flashdraft.server.process.queue_places import QueuePlaces
from tests.unit.server.live_server import CHAT, LONG, Live, live, post, run

CHATS = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
PROMPTS = {"model": "fake", "prompt": ["the", "quick", "the", "quick", "the"], "max_tokens": 3}
MOST = {"max_queue": 1}  # with the fake engine's batch of two: three places


async def occupy(one: Live, count: int) -> list[asyncio.StreamWriter]:
    """Streams that go on for long."""
    body = {**CHAT, "max_tokens": LONG, "stream": True}
    opened = [await one.connect(post(CHATS, body)) for _ in range(count)]
    for reader, _ in opened:
        await reader.readuntil(b"data:")
    return [writer for _, writer in opened]


async def until_free(one: Live) -> None:
    while one.engine.num_open:
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"), [(CHATS, {**CHAT, "n": 3}), (COMPLETIONS, PROMPTS)], ids=["n", "prompts"]
)
def test_it_is_refused_as_a_whole(
    tmp_path: Path, path: str, body: dict[str, Any], stream: bool
) -> None:
    async def scenario() -> None:
        async with live(tmp_path, step_s=0.02, **MOST) as one:
            writers = await occupy(one, 1)
            before = one.engine.metrics.queue_time.count
            status, headers, answer = await one.ask(post(path, {**body, "stream": stream}))
            assert status == 429 and int(headers["retry-after"]) >= 1
            assert answer["error"]["code"] == "queue_full"
            assert "needs 3 places" in answer["error"]["message"]
            # nothing of it has begun, and what fits is taken
            assert one.engine.num_open == 1 and one.engine.metrics.queue_time.count == before
            assert (await one.ask(post(CHATS, {**CHAT, "n": 2})))[0] == 200
            for writer in writers:
                writer.close()
            await until_free(one)
            status, _, answer = await one.ask(post(path, body))
            assert status == 200 and len(answer["choices"]) in (3, 5)

    run(scenario)


def test_under_a_rush_every_answer_is_whole_or_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with live(tmp_path, step_s=0.002, **MOST) as one:
            bodies = [post(CHATS, {**CHAT, "n": 1 + number % 3}) for number in range(30)]
            bodies += [post(COMPLETIONS, PROMPTS)] * 10
            found = await asyncio.gather(*(one.ask(body) for body in bodies))
            for number, (status, _, answer) in enumerate(found):
                assert status in (200, 429), answer
                if status == 200:
                    wanted = 1 + number % 3 if number < 30 else 5
                    reasons = [choice["finish_reason"] for choice in answer["choices"]]
                    assert reasons == ["length"] * wanted
            statuses = [status for status, _, _ in found]
            assert 0 < statuses.count(200) < len(statuses)
            # every place has come back
            assert (await one.ask(post(COMPLETIONS, PROMPTS)))[0] == 200

    run(scenario)


def test_places_come_back_when_clients_leave_and_answers_fail(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with live(tmp_path, step_s=0.005, **MOST) as one:
            body = {**CHAT, "n": 3, "max_tokens": LONG, "stream": True}
            reader, writer = await one.connect(post(CHATS, body))
            await reader.readuntil(b"data:")
            writer.close()
            await until_free(one)
            refused = {**PROMPTS, "prompt": [[3, 4], [99], [3, 4]]}  # which the fake refuses
            assert (await one.ask(post(COMPLETIONS, refused)))[0] == 400
            await until_free(one)
            assert (await one.ask(post(CHATS, {**CHAT, "n": 3})))[0] == 200

    run(scenario)


def test_places_that_are_no_longer_needed_are_given_back() -> None:
    places = QueuePlaces()
    with places.reserve(2), places.reserve(4) as reserved:
        assert places.num_taken == 6
        reserved.give_back_all_but(5)
        assert places.num_taken == 6
        reserved.give_back_all_but(1)
        reserved.give_back_all_but(3)
        assert places.num_taken == 3
    assert places.num_taken == 0
