"""Places in the engine and its queue: one for every answer, held by the request that asks for it.

A request that wants several answers holds as many places as it will use at once before it asks for
the first, so that it is refused as a whole or not at all. Knows neither requests nor the engine.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


class Hold:
    """Some places that are taken, for as long as they are needed."""

    def __init__(self, places: Places, count: int) -> None:
        self._places = places
        self._count = 0
        self._change(count)

    def keep(self, count: int) -> None:
        """Give back all but so many."""
        self._change(min(self._count, count))

    def _change(self, count: int) -> None:
        self._places.num_taken += count - self._count
        self._count = count


class Places:
    """How many places are taken."""

    def __init__(self) -> None:
        self.num_taken = 0

    @contextlib.contextmanager
    def hold(self, count: int) -> Iterator[Hold]:
        """Take places; whoever calls has seen that they are free."""
        hold = Hold(self, count)
        try:
            yield hold
        finally:
            hold.keep(0)
