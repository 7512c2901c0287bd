"""A request's mailbox: however late it is read, what comes out joins to what went in."""

from __future__ import annotations

import asyncio
import dataclasses
import random

import pytest

from flashdraft.core import FinishReason, Generation, GenerationStats, TokenEvent, TokenLogprob
from flashdraft.errors import EngineLostError
from flashdraft.server.process.request_stream import MAX_SEPARATE, RequestStream, joined


def event(number: int, has_logprobs: bool, is_last: bool = False) -> TokenEvent:
    tokens = tuple(range(number, number + number % 4))
    generation = None
    if is_last:  # as the wire has it: History puts the tokens back
        generation = Generation("", [], FinishReason.STOP, GenerationStats())
    return TokenEvent(
        request_id="r",
        token_ids=tokens,
        text=f"{number} ",
        drafted=tuple(token % 2 == 0 for token in tokens),
        logprobs=tuple(TokenLogprob(-token, ()) for token in tokens) if has_logprobs else None,
        generation=generation,
        pieces=(f"{number} ", number),
    )


@pytest.mark.parametrize("seed", range(20))
def test_nothing_is_lost_or_moved(seed: int) -> None:
    rng = random.Random(seed)
    sent = [event(n, seed % 2 == 0, is_last=n == 60) for n in range(61)]

    async def scenario() -> list[TokenEvent]:
        stream = RequestStream("r", 10_000)
        found: list[TokenEvent] = []
        waiting = list(sent)
        while not found or found[-1].generation is None:
            for _ in range(rng.choice([1, 1, 30])):
                if waiting:
                    assert stream.put(waiting.pop(0))
            found.append(await stream.next())
        return found

    found = asyncio.run(scenario())
    whole = found[0]
    for one in found[1:]:
        whole = joined(whole, one)
    expected = sent[0]
    for one in sent[1:]:
        expected = joined(expected, one)
    generation = whole.generation
    assert generation is not None and generation.token_ids == list(expected.token_ids)
    assert generation.logprobs == (None if expected.logprobs is None else list(expected.logprobs))
    assert dataclasses.replace(whole, generation=None) == dataclasses.replace(
        expected, generation=None
    )


def test_a_reader_that_keeps_up_sees_every_step() -> None:
    async def scenario() -> None:
        stream = RequestStream("r", 10_000)
        for number in range(100):
            stream.put(event(number, False))
            assert await stream.next() == event(number, False)

    asyncio.run(scenario())


def test_too_much_is_refused_and_dropped() -> None:
    async def scenario() -> None:
        stream = RequestStream("r", 100)
        taken = 0
        while stream.put(event(3, False)):
            taken += 1
        assert taken == 33
        stream.fail(EngineLostError("gone"))
        with pytest.raises(EngineLostError):
            await stream.next()

    asyncio.run(scenario())


def test_a_failure_comes_after_what_had_come() -> None:
    async def scenario() -> None:
        stream = RequestStream("r", 100)
        for number in range(MAX_SEPARATE):
            stream.put(event(number, False))
        stream.fail(EngineLostError("gone"))
        for number in range(MAX_SEPARATE):
            assert (await stream.next()).text == f"{number} "
        with pytest.raises(EngineLostError):
            await stream.next()

    asyncio.run(scenario())
