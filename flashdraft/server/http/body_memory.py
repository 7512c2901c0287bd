"""The memory of bodies that are not parsed yet: how much all may take, and which one is dropped.

Each body has a limit of its own (body_limits.py); this is about their sum. A body that has arrived
whole counts until it is parsed, and is never dropped. A body that arrives slowly takes its memory
for long: where all of them together are too much, the one that began first is dropped, so that
whoever sends many slow bodies loses their own. Knows neither HTTP nor what bodies are.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator


class BodyMemoryFullError(Exception):
    """All bodies together are too much, and this one is dropped."""


class ShuttingDownError(Exception):
    """The server ends before the body has arrived."""


class IncomingBody:
    """A body that is still arriving."""

    def __init__(self, memory: BodyMemory, deadline: asyncio.Timeout) -> None:
        self.data = bytearray()
        self.is_dropped = False  # to make room for others
        self.is_shutting_down = False
        self._memory = memory
        self._deadline = deadline

    def add(self, chunk: bytes) -> None:
        """Take what arrived. Bodies that began earlier are dropped for it; if none is left, it is.

        Raises BodyMemoryFullError in that case.
        """
        if self.is_dropped:  # this arrived before its reader was woken
            raise BodyMemoryFullError
        self._memory.make_room(self, len(chunk))
        self.data += chunk
        self._memory.num_bytes += len(chunk)

    def clear(self) -> None:
        """Forget what has arrived."""
        self._memory.num_bytes -= len(self.data)
        self.data = bytearray()

    def drop(self) -> None:
        """Forget it all for good, and wake whoever waits for more."""
        self.is_dropped = True
        self.clear()
        self.stop_waiting()

    def stop_waiting(self) -> None:
        """Wait no longer for more of it."""
        if not self._deadline.expired():
            self._deadline.reschedule(asyncio.get_running_loop().time())


class UnparsedBody:
    """The memory of a body that has arrived whole."""

    def __init__(self, memory: BodyMemory, num_bytes: int) -> None:
        self._memory = memory
        self._num_bytes = num_bytes
        memory.num_bytes += num_bytes

    def release(self) -> None:
        """Count it no more: it is parsed, or its request has ended."""
        self._memory.num_bytes -= self._num_bytes
        self._num_bytes = 0


class BodyMemory:
    """The memory of all bodies of one server that are not parsed yet."""

    def __init__(self, max_bytes: int) -> None:
        self.num_bytes = 0  # that all of them have
        self._max_bytes = max_bytes
        self._incoming: dict[IncomingBody, None] = {}  # in the order they began

    @contextlib.asynccontextmanager
    async def receive(self, timeout_s: float) -> AsyncIterator[IncomingBody]:
        """A body that arrives within this block.

        Raises TimeoutError if it does not in time, BodyMemoryFullError or ShuttingDownError.
        """
        body: IncomingBody | None = None
        try:
            async with asyncio.timeout(timeout_s) as deadline:
                body = IncomingBody(self, deadline)
                self._incoming[body] = None
                yield body
        except TimeoutError:
            if body is not None and body.is_dropped:
                raise BodyMemoryFullError from None
            if body is not None and body.is_shutting_down:
                raise ShuttingDownError from None
            raise
        finally:
            if body is not None:
                del self._incoming[body]
                body.clear()

    @property
    def has_incoming(self) -> bool:
        """Whether any body is still arriving."""
        return bool(self._incoming)

    def shut_down(self) -> None:
        """Wait no longer for bodies that are still arriving: the server ends."""
        for body in self._incoming:
            body.is_shutting_down = True
            body.stop_waiting()

    def make_room(self, wanted_by: IncomingBody, count: int) -> None:
        """Drop the oldest incoming bodies until so many bytes fit."""
        if self.num_bytes + count <= self._max_bytes:
            return
        for body in self._incoming:
            if body is wanted_by:
                raise BodyMemoryFullError
            if body.data:
                body.drop()
            if self.num_bytes + count <= self._max_bytes:
                return
        raise BodyMemoryFullError
