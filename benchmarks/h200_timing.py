"""What the GPU benchmarks share: time from graph replays, compiling in parallel, a clean stop."""

from __future__ import annotations

import functools
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch

BANDWIDTH = 4.25e12  # bytes a second that this card was measured to read
L2_BYTES = 50 << 20
REPLAY_SECONDS = 0.004
MIN_CALLS = 8  # in one graph: the gap between two replays must not count


class Deadline:
    """When to stop starting new work."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def passed(self) -> bool:
        """Whether the time is over."""
        return time.monotonic() > self._end


def num_copies(num_bytes: int) -> int:
    """How many copies of an input are needed so that the next use finds none of it in the cache."""
    return max(1, min(320, -(-4 * L2_BYTES // num_bytes)))


def graph_microseconds(calls: Sequence[Callable[[], object]]) -> float:
    """Of one call, where all of them are replayed one after the other from one graph."""
    calls = list(calls) * -(-MIN_CALLS // len(calls))
    stream = _side_stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        calls[0]()
        stream.synchronize()
        graph.capture_begin()
        for call in calls:
            call()
        graph.capture_end()
        graph.replay()
        once = _replay_milliseconds(graph, 1)
        repeats = max(1, min(20, int(REPLAY_SECONDS * 1e3 / max(once, 1e-3))))
        elapsed = _replay_milliseconds(graph, repeats)
    return elapsed * 1e3 / (repeats * len(calls))


@functools.cache  # one for all: each stream keeps memory of its own
def _side_stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()


def _replay_milliseconds(graph: torch.cuda.CUDAGraph, repeats: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(repeats):
        graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def compile_in_parallel(launch: Callable[[Any], None], tasks: Iterable[Any]) -> float:
    """Fill Triton's cache on disk from many processes; returns the seconds it took.

    `launch(task)` makes one small launch that compiles what the benchmark will use. A task that
    cannot be compiled is left to the benchmark itself to report.
    """
    begin = time.monotonic()
    workers = max(1, min(14, (os.cpu_count() or 1) - 1))
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        for done in [pool.submit(launch, task) for task in tasks]:
            done.exception()
    return time.monotonic() - begin


def is_refusal(error: Exception) -> bool:
    """Whether Triton said that a plan does not fit the card, or could not compile it."""
    return type(error).__module__.startswith("triton") or "PassManager" in str(error)
