"""Places in the engine and its queue: one for every answer, reserved by the request that asks.

A request that wants several answers reserves as many places as it will use at once before it asks
for the first, so that it is refused as a whole or not at all. It knows no requests and no engine.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


class ReservedPlaces:
    """The places that one request has reserved and not given back."""

    def __init__(self, queue: QueuePlaces, count: int) -> None:
        self._queue = queue
        self._count = 0
        self._set_count(count)

    def give_back_all_but(self, count: int) -> None:
        """Keep at most so many."""
        self._set_count(min(self._count, count))

    def _set_count(self, count: int) -> None:
        self._queue.num_taken += count - self._count
        self._count = count


class QueuePlaces:
    """How many places are taken, by all requests."""

    def __init__(self) -> None:
        self.num_taken = 0

    @contextlib.contextmanager
    def reserve(self, count: int) -> Iterator[ReservedPlaces]:
        """Take places; whoever calls has seen that they are free."""
        reserved = ReservedPlaces(self, count)
        try:
            yield reserved
        finally:
            reserved.give_back_all_but(0)
