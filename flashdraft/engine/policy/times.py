"""What steps on the device take: as timed, and guesses for those that never ran. No torch.

A step's time is that of its draft, by slots, and that of the rest: alone by slots and rows, beside
prompts by all rows of the pass and by the context that the prompts had.
"""

from __future__ import annotations

import math
from typing import TypeVar

from flashdraft.engine.policy.costs import CostModel

FADE = 0.2  # of the newest time in a running mean
MOST_GROWTH = 2.0  # times a mean that a time counts: a moment's stall says nothing of later steps
UNIT_S = 0.02  # a plain step, before any was timed
MOST_BUCKETS = 16  # of contexts

Key = TypeVar("Key", int, tuple[int, int])


class StepTimes:
    """Running means of what was seen, and guesses from the nearest of it."""

    def __init__(self, costs: CostModel) -> None:
        self._costs = costs  # how times grow with rows, as a first guess
        self._alone: dict[tuple[int, int], float] = {}  # by slots and rows
        self._drafts: dict[tuple[int, int], float] = {}  # by slots and draft tokens
        self._beside: list[dict[int, float]] = [{} for _ in range(MOST_BUCKETS)]  # by context, rows

    def remember(
        self,
        batch: int,
        num_rows: int,
        width: int,
        draft_s: float,
        rest_s: float,
        pass_rows: int = 0,
        context: int = 0,
    ) -> None:
        """Take in a whole step; `pass_rows` are all rows of a pass that has some of prompts."""
        if width:
            self.remember_draft(batch, width, draft_s)
        if pass_rows:
            self.remember_beside(pass_rows, context, rest_s)
        else:
            self.remember_alone(batch, num_rows, rest_s)

    def remember_alone(self, batch: int, num_rows: int, seconds: float) -> None:
        """Take in a step without prompts, but for its draft."""
        _blend(self._alone, (batch, num_rows), seconds)

    def remember_draft(self, batch: int, width: int, seconds: float) -> None:
        """Take in a draft."""
        _blend(self._drafts, (batch, width), seconds)

    def remember_beside(self, num_rows: int, context: int, seconds: float) -> None:
        """Take in a step with prompts, but for its draft."""
        _blend(self._beside[_bucket(context)], num_rows, seconds)

    def knows_alone(self, batch: int, num_rows: int) -> bool:
        """Whether such a step was ever timed."""
        return (batch, num_rows) in self._alone

    def alone(self, batch: int, num_rows: int) -> float:
        """A step without prompts, but for its draft."""
        if (batch, num_rows) in self._alone:
            return self._alone[batch, num_rows]
        if not self._alone:
            return UNIT_S * self._costs.target(num_rows)
        mean = num_rows / batch
        near = min(self._alone, key=lambda one: _distance((one[0], one[1] / one[0]), (batch, mean)))
        return self._alone[near] * self._costs.target(num_rows) / self._costs.target(near[1])

    def draft(self, batch: int, width: int) -> float:
        """A draft of so many tokens for each of a batch."""
        if width == 0:
            return 0.0
        if (batch, width) in self._drafts:
            return self._drafts[batch, width]
        if not self._drafts:
            return self.alone(1, 1) * self._costs.drafter(batch) / self._costs.target(1)
        near = min(self._drafts, key=lambda one: _distance(one, (batch, width)))
        here, there = self._costs.drafter(batch), self._costs.drafter(near[0])
        return self._drafts[near] * (here / there if there else 1.0)  # lookups cost nothing

    def beside(self, num_rows: int, context: int) -> float:
        """A pass of so many rows, some of them of a prompt that has so much before it.

        What a longer context takes beyond a short one grows with it.
        """
        bucket = _bucket(context)
        if num_rows in self._beside[bucket]:
            return self._beside[bucket][num_rows]
        known = [one for one in range(MOST_BUCKETS) if self._beside[one]]
        if not known:
            return self.alone(1, num_rows)
        near = min(known, key=lambda one: (abs(one - bucket), one))
        seconds = self._scaled(near, num_rows)
        if near == bucket or near == known[0] or bucket < near:
            return seconds
        least = self._scaled(known[0], num_rows)
        return least + max(seconds - least, 0.0) * 2.0 ** (bucket - near)

    def _scaled(self, bucket: int, num_rows: int) -> float:
        """From the nearest number of rows: more of them take longer, fewer may take as long."""
        times = self._beside[bucket]
        if num_rows in times:
            return times[num_rows]
        near = min(times, key=lambda rows: abs(math.log(rows / num_rows)))
        if num_rows > near:
            return times[near] * num_rows / near
        return times[near] * self._costs.target(num_rows) / self._costs.target(near)

    def row_price(self) -> float:
        """What a row of a prompt takes where they are cheapest."""
        prices = [s / rows for times in self._beside for rows, s in times.items()]
        return min(prices, default=0.0)


def _blend(times: dict[Key, float], key: Key, seconds: float) -> None:
    last = times.get(key, seconds)
    times[key] = last + FADE * (min(seconds, MOST_GROWTH * last) - last)


def _bucket(context: int) -> int:
    """Contexts that differ by less than a factor of two, from 2048 on, are alike."""
    return min(max(0, context.bit_length() - 11), MOST_BUCKETS - 1)


def _distance(one: tuple[int, float], other: tuple[int, float]) -> tuple[float, float]:
    """First of the slots, then of the rows or draft tokens of each."""
    return abs(math.log(one[0] / other[0])), abs(math.log(one[1] / other[1]))
