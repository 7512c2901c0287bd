"""What a step costs: the target's pass and the drafter's, from start-up measurements. No torch."""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass


@dataclass(frozen=True)
class DraftCost:
    """What a drafter pass takes."""

    seconds: dict[int, float]  # by number of sequences, for whole blocks
    slot_share: float = 0.0  # of a pass, that goes into its draft tokens: less if fewer are asked
    max_drafts: int = 0  # draft tokens of a whole block


class CostModel:
    """Seconds of a target step by number of rows, and of a drafter pass by what it drafts."""

    def __init__(self, target: dict[int, float], drafter: DraftCost | None = None) -> None:
        assert target, "a step was never measured"
        self._target = _monotone(target)
        self._drafter = _monotone(drafter.seconds if drafter is not None else {})
        self._slot_share = drafter.slot_share if drafter is not None else 0.0
        self._max_drafts = drafter.max_drafts if drafter is not None else 0

    def target(self, num_rows: float) -> float:
        return _interpolate(self._target, num_rows)

    def drafter(self, num_sequences: int, num_slots: float = math.inf) -> float:
        """A pass for so many sequences that draws so many draft tokens in all."""
        if not self._drafter or not num_sequences:
            return 0.0
        whole = _interpolate(self._drafter, num_sequences)
        spared = 1.0 - min(1.0, num_slots / max(1, num_sequences * self._max_drafts))
        return whole * (1.0 - self._slot_share * spared)


def _monotone(points: dict[int, float]) -> list[tuple[int, float]]:
    """Sorted points whose cost never falls: a measurement's noise must not reward more rows."""
    result: list[tuple[int, float]] = []
    for rows, cost in sorted(points.items()):
        result.append((rows, max(cost, result[-1][1] if result else 0.0)))
    return result


def _interpolate(points: list[tuple[int, float]], x: float) -> float:
    place = bisect.bisect_left(points, (x, -math.inf))
    if place < len(points) and points[place][0] == x:
        return points[place][1]
    if place == 0:
        return points[0][1]
    if len(points) == 1:
        return points[0][1] * x / points[0][0]
    high = min(place, len(points) - 1)  # beyond the last point the last slope goes on
    (x0, y0), (x1, y1) = points[high - 1], points[high]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


# What a step costs on a GPU, in plain steps: weights are read once for all rows, up to where the
# arithmetic takes longer. A first guess that steps correct once they are timed.
GPU_COSTS = CostModel(
    {1: 1.0, 64: 1.1, 128: 1.3, 256: 2.0, 512: 3.6}, DraftCost({1: 0.1, 8: 0.13, 32: 0.3})
)
