"""CUDA graphs, moments and transfers: what lets the host run ahead of the device. No models.

On a device without streams of its own (a CPU) everything happens at once, and nothing waits.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Any, Generic, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

log = logging.getLogger(__name__)

RUNS_BEFORE = 1  # a function is captured
MOST_GRAPHS = 64  # those that were not used for longest give way

Key = TypeVar("Key", bound=Hashable)
Result = TypeVar("Result")


class Graphs(Generic[Key]):
    """Functions by key, each captured as a CUDA graph when it is run for the second time.

    The first run compiles what there is to compile, and one that is needed once is not worth the
    capture. What captured functions allocate lives in one pool: the next one that is replayed
    may overwrite it. Off CUDA, functions are simply run.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.captures = device.type == "cuda"
        self._pool = self._new_pool()
        self._graphs: OrderedDict[Key, tuple[torch.cuda.CUDAGraph, Any]] = OrderedDict()
        self._num_runs: Counter[Key] = Counter()
        self.failed: set[Key] = set()  # what cannot be captured is run as it is

    def _new_pool(self) -> Any:
        return torch.cuda.graph_pool_handle() if self._device.type == "cuda" else None

    def __len__(self) -> int:
        return len(self._graphs)

    def __iter__(self) -> Iterator[Key]:
        """The keys of what is captured."""
        return iter(self._graphs)

    def is_ready(self, key: Key) -> bool:
        """Whether a call will take as long as any later one: nothing is left to be captured."""
        return key in self._graphs or key in self.failed or not self.captures

    def call(self, key: Key, function: Callable[[], Result]) -> Result:
        """Run the function, or its graph; read the result before anything else is replayed."""
        if not self.is_ready(key) and self._num_runs[key] >= RUNS_BEFORE:
            self._capture(key, function)
        if key in self._graphs:
            self._graphs.move_to_end(key)
            graph, result = self._graphs[key]
            graph.replay()
            return cast(Result, result)
        self._num_runs[key] += 1
        return function()

    def _capture(self, key: Key, function: Callable[[], Any]) -> None:
        begin = time.perf_counter()
        try:
            self._graphs[key] = self._record(function)
        except RuntimeError as error:  # no input may stop the engine: go on without this graph
            self.failed.add(key)
            self._pool = self._new_pool()  # the other one counts as in use
            log.warning("%s cannot be captured as a CUDA graph, it is slower: %s", key, error)
            return
        if len(self._graphs) > MOST_GRAPHS:
            self._graphs.popitem(last=False)
        log.debug("captured %s in %.2f s", key, time.perf_counter() - begin)

    def _record(self, function: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self._device)
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            graph.capture_begin(pool=self._pool)
            try:
                result = function()
            finally:
                graph.capture_end()
        torch.cuda.current_stream(self._device).wait_stream(stream)
        return graph, result


class Mark:
    """A moment in the device's stream of work."""

    def __init__(self, device: torch.device) -> None:
        self._event: torch.cuda.Event | None = None
        self._time = time.perf_counter()
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(device))

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()

    def seconds_until(self, later: Mark) -> float:
        if self._event is None or later._event is None:
            return later._time - self._time
        return self._event.elapsed_time(later._event) / 1000.0


class Clock:
    """Begin and end of a step on the device."""

    def __init__(self, begin: Mark, end: Mark, is_typical: bool) -> None:
        self._begin, self._end, self.is_typical = begin, end, is_typical

    def wait(self) -> None:
        self._end.wait()

    @property
    def elapsed(self) -> float:
        return self._begin.seconds_until(self._end)


class Staging:
    """A ring of pinned buffers between host and device, so that no copy makes anyone wait.

    A buffer is used again `count` transfers later; by then its last transfer is waited for.
    """

    def __init__(self, device: torch.device, count: int) -> None:
        self._device = device
        self._buffers: list[Tensor | None] = [None] * count
        self._marks: list[Mark | None] = [None] * count
        self._next = 0

    def send(self, values: NDArray[np.int64]) -> Tensor:
        """The values on the device."""
        if self._device.type != "cuda":
            return torch.from_numpy(values.copy()).to(self._device)
        buffer = self._take(values.size).view(values.shape)
        buffer.numpy()[...] = values
        result = buffer.to(self._device, non_blocking=True)
        self._mark()
        return result

    def receive(self, values: Tensor) -> Tensor:
        """The values on the host, once the stream has come that far."""
        if self._device.type != "cuda":
            return values.clone()
        buffer = self._take(values.numel()).view(values.shape)
        buffer.copy_(values, non_blocking=True)
        self._mark()
        return buffer

    def _take(self, size: int) -> Tensor:
        place = self._next
        mark, buffer = self._marks[place], self._buffers[place]
        if mark is not None:
            mark.wait()
        if buffer is None or buffer.numel() < size:
            capacity = max(1024, 1 << (size - 1).bit_length())
            buffer = torch.empty(capacity, dtype=torch.int64, pin_memory=True)
            self._buffers[place] = buffer
        return buffer[:size]

    def _mark(self) -> None:
        self._marks[self._next] = Mark(self._device)
        self._next = (self._next + 1) % len(self._marks)
