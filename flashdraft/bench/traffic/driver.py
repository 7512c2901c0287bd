"""Offers a load to a server: sends questions when they are due, and watches its own punctuality.

One thread, one loop. Questions that fail are counted and the load goes on; a server that answers
nothing any more, a refused key or an interrupt ends it, with what was measured.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

from flashdraft.bench.run.stream import AnswerError, BusyError
from flashdraft.bench.traffic.outcome import LoadRecord, Outcome, answered
from flashdraft.bench.traffic.questions import Questions
from flashdraft.bench.traffic.wire import Door
from flashdraft.errors import FlashdraftError

TICK_S = 0.01
MAX_FAILURES_IN_ROW = 50
MAX_BUSY_WAIT_S = 5.0  # of a client whose question was refused, before its next one
FAILURE_WAIT_S = 0.2
INTERRUPTED = "Interrupted; the figures are of what was answered until then."


def run_load(
    door: Door,
    questions: Questions,
    record: LoadRecord,
    limit_s: float,
    is_interrupted: Callable[[], bool] = lambda: False,
    on_tick: Callable[[LoadRecord], None] = lambda record: None,
) -> None:
    """Offer the record's load and fill the record; questions have `limit_s` each."""
    asyncio.run(_Driver(door, questions, record, limit_s).run(is_interrupted, on_tick))


class _Driver:
    """One load under way."""

    def __init__(
        self, door: Door, questions: Questions, record: LoadRecord, limit_s: float
    ) -> None:
        self._door, self._questions, self._record = door, questions, record
        self._limit_s = limit_s
        self._begin = 0.0
        self._num_in_row = 0  # failures
        self._stop = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()

    async def run(
        self, is_interrupted: Callable[[], bool], on_tick: Callable[[LoadRecord], None]
    ) -> None:
        record, cpu = self._record, time.process_time()
        self._begin = time.perf_counter()
        watch = asyncio.create_task(self._watch(is_interrupted, on_tick))
        send = asyncio.create_task(self._open() if record.load.clients is None else self._closed())
        stop = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({send, stop}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            every = [send, stop, watch, *self._tasks]
            for task in every:
                task.cancel()
            ends = await asyncio.gather(*every, return_exceptions=True)
            record.wall_s = self._now()
            limit_s = record.load.duration_s
            record.window_s = record.wall_s if limit_s is None else min(limit_s, record.wall_s)
            record.cpu_s = time.process_time() - cpu
        for end in ends:
            if isinstance(end, Exception):
                raise end

    def _now(self) -> float:
        return time.perf_counter() - self._begin

    # -- sending -------------------------------------------------------------------------------

    async def _open(self) -> None:
        """Questions when they are due, whatever is in flight."""
        record = self._record
        for due_s in record.load.arrivals():
            await asyncio.sleep(max(0.0, due_s - self._now()))
            record.lags.append(self._now() - due_s)
            self._start(self._one(record.num_sent, due_s))
            await asyncio.sleep(0)  # so that it has been sent, and counted, before the next
        if record.load.num_requests is None:
            await asyncio.sleep(max(0.0, (record.load.duration_s or 0.0) - self._now()))
        await asyncio.gather(*self._tasks)

    async def _closed(self) -> None:
        """Clients that ask again when they have their answer."""
        clients = self._record.load.clients or 0
        await asyncio.gather(*[self._start(self._client()) for _ in range(clients)])

    async def _client(self) -> None:
        record = self._record
        while record.load.may_send(record.num_sent, self._now()):
            wait_s = await self._one(record.num_sent, self._now())
            if wait_s:
                await asyncio.sleep(wait_s)

    def _start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _one(self, place: int, due_s: float) -> float:
        """Ask one question and note its outcome; seconds that its client should wait after it."""
        record = self._record
        record.num_sent += 1
        record.num_in_flight += 1
        record.most_in_flight = max(record.most_in_flight, record.num_in_flight)
        wait_s = 0.0
        try:
            answer = await self._door.ask(self._questions.body(place), self._limit_s)
            outcome = answered(answer, due_s, self._now(), self._begin)
        except (AnswerError, BusyError) as error:
            outcome = Outcome(due_s, self._now(), error=str(error))
            wait_s = FAILURE_WAIT_S
            if isinstance(error, BusyError):
                wait_s = min(MAX_BUSY_WAIT_S, error.wait_s if error.wait_s is not None else 1.0)
        except FlashdraftError as error:  # nobody is let in: no later question will be
            outcome = Outcome(due_s, self._now(), error=str(error))
            self._end(str(error))
        except asyncio.CancelledError:
            record.outcomes.append(Outcome(due_s, self._now(), is_finished=False))
            raise
        except Exception as error:  # an answer of no known form must not end the load
            what = f"the answer cannot be read: {type(error).__name__}: {error}"[:300]
            outcome = Outcome(due_s, self._now(), error=what)
        finally:
            record.num_in_flight -= 1
        record.outcomes.append(outcome)
        self._num_in_row = 0 if outcome.is_answered else self._num_in_row + 1
        if self._num_in_row >= MAX_FAILURES_IN_ROW:
            self._end(f"{self._num_in_row} requests in a row failed; the last: {outcome.error}.")
        return wait_s

    # -- watching ------------------------------------------------------------------------------

    def _end(self, why: str) -> None:
        self._record.stopped = self._record.stopped or why
        self._stop.set()

    async def _watch(
        self, is_interrupted: Callable[[], bool], on_tick: Callable[[LoadRecord], None]
    ) -> None:
        """How late the loop is, and whether somebody wants it to end."""
        record = self._record
        while True:
            before = time.perf_counter()
            await asyncio.sleep(TICK_S)
            record.lags.append(max(0.0, time.perf_counter() - before - TICK_S))
            on_tick(record)
            if is_interrupted():
                self._end(INTERRUPTED)
