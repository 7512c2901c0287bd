"""Sends a source's requests through an engine, and writes down what happens.

One thread: what arrives during a step is submitted after it, and its time runs from when it was
due. Of the engine only what it shows to everybody is used.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from benchmarks.traffic.record import End, Piece, Record, StepMark, kind_of_step
from benchmarks.traffic.sources import Source
from flashdraft.engine.engine import Engine

LONGEST_NAP_S = 0.05


class TrafficError(RuntimeError):
    """A request ended as none should."""


def drive(
    engine: Engine, source: Source, record: Record, is_over: Callable[[Record], bool]
) -> None:
    """Run until `is_over` says so, or nothing runs and nothing will come; the rest is cancelled."""
    seen: set[str] = set()
    try:
        while not is_over(record):
            for arrival in source.due(time.perf_counter()):
                engine.submit(arrival.request)
                record.arrivals[arrival.request.id] = arrival.at
            if engine.has_work:
                _step(engine, source, record, seen)
                continue
            next_at = source.next_at()
            if next_at is None:
                return
            time.sleep(min(LONGEST_NAP_S, max(0.0, next_at - time.perf_counter())))
    finally:
        cancel_rest(engine, record)


def _step(engine: Engine, source: Source, record: Record, seen: set[str]) -> None:
    begin = time.perf_counter()
    events = engine.step()
    now = time.perf_counter()
    stats = engine.last_step
    record.steps.append(
        StepMark(
            begin,
            now,
            kind_of_step(stats),
            stats.num_prefill_tokens,
            tuple(stats.verify_lengths),
            stats.num_accepted,
            stats.draft_s + stats.verify_s,
        )
    )
    for event in events:
        name = event.request_id
        if event.token_ids:
            record.pieces.append(Piece(now, name, len(event.token_ids)))
            if name not in seen:
                seen.add(name)
                source.saw_first(name, now)
        if event.generation is not None:
            if event.generation.error is not None:
                raise TrafficError(f"request {name} failed: {event.generation.error}")
            record.ends.append(End(now, name, event.generation))
            source.saw_end(name, event.generation, now)


def cancel_rest(engine: Engine, record: Record) -> None:
    """End what still runs; the next run must find an empty engine."""
    ended = {end.request_id for end in record.ends}
    for name in record.arrivals:
        if name not in ended:
            engine.cancel(name)
    while engine.has_work:
        engine.step()
