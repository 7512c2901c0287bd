"""Bodies that are not parsed yet: how much of them is held in all, and which one gives way.

Each body has a limit of its own (body_limits.py); this is about their sum. One that has come whole
counts until it is parsed, and gives way no more. A body that comes slowly
holds its memory for long, so where they are too much together the one that began first is given up,
and those who send many slow bodies stand in their own way. Knows neither HTTP nor what bodies are.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator


class CrowdedOutError(Exception):
    """The bodies on their way are too much together, and this one gives way."""


class ShuttingDownError(Exception):
    """The server ends before the body has come."""


class Arrival:
    """One body, as far as it has come."""

    def __init__(self, arrivals: Arrivals, deadline: asyncio.Timeout) -> None:
        self.data = bytearray()
        self.is_crowded_out = False
        self.is_given_up = False  # for the server's end
        self._arrivals = arrivals
        self._deadline = deadline

    def add(self, chunk: bytes) -> None:
        """Take what came. Bodies that began earlier give way to it; if none is left, it does."""
        if self.is_crowded_out:  # this came before its reader was woken
            raise CrowdedOutError
        self._arrivals.make_room(self, len(chunk))
        self.data += chunk
        self._arrivals.num_bytes += len(chunk)

    def drop(self) -> None:
        """Forget what has come."""
        self._arrivals.num_bytes -= len(self.data)
        self.data = bytearray()

    def give_way(self) -> None:
        """Drop it all, and wake whoever waits for more."""
        self.is_crowded_out = True
        self.drop()
        self.wake()

    def wake(self) -> None:
        """End the wait for more."""
        if not self._deadline.expired():
            self._deadline.reschedule(asyncio.get_running_loop().time())


class Held:
    """A body that has come whole."""

    def __init__(self, arrivals: Arrivals, num_bytes: int) -> None:
        self._arrivals = arrivals
        self._num_bytes = num_bytes
        arrivals.num_bytes += num_bytes

    def release(self) -> None:
        """Its bytes are no longer held, or count no more."""
        self._arrivals.num_bytes -= self._num_bytes
        self._num_bytes = 0


class Arrivals:
    """All bodies on their way to one server."""

    def __init__(self, max_bytes: int) -> None:
        self.num_bytes = 0  # that all of them hold
        self._max_bytes = max_bytes
        self._open: dict[Arrival, None] = {}  # in the order they began

    @contextlib.asynccontextmanager
    async def begin(self, timeout_s: float) -> AsyncIterator[Arrival]:
        """A body that comes within this block: TimeoutError if not in time, or CrowdedOutError."""
        arrival: Arrival | None = None
        try:
            async with asyncio.timeout(timeout_s) as deadline:
                arrival = Arrival(self, deadline)
                self._open[arrival] = None
                yield arrival
        except TimeoutError:
            if arrival is not None and arrival.is_crowded_out:
                raise CrowdedOutError from None
            if arrival is not None and arrival.is_given_up:
                raise ShuttingDownError from None
            raise
        finally:
            if arrival is not None:
                del self._open[arrival]
                arrival.drop()

    @property
    def is_waiting(self) -> bool:
        """Whether any is on its way."""
        return bool(self._open)

    def give_up(self) -> None:
        """Wait no longer for any that is on its way: the server ends."""
        for one in self._open:
            one.is_given_up = True
            one.wake()

    def make_room(self, wanted_by: Arrival, count: int) -> None:
        """Let the oldest bodies give way until so many bytes fit."""
        if self.num_bytes + count <= self._max_bytes:
            return
        for one in self._open:
            if one is wanted_by:
                raise CrowdedOutError
            if one.data:
                one.give_way()
            if self.num_bytes + count <= self._max_bytes:
                return
        raise CrowdedOutError
