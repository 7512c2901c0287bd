"""Walks that were measured: how far a target went through trees, and how far along their chains.

A walk is a pair (d, l): of the l accepted nodes of a step the first d lie on the chain, which is
what the chain alone would have brought in that very state. Trees of fewer nodes than the chain is
seeded from may hold only its beginning: there d is the least that it would have brought. A
document of tree_length.py has the walks of every kind (greedy, sampled), task and tree, as "d,l".
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Walk = tuple[int, int]
Histogram = Mapping[Walk, float]  # how often, or how likely

STEEPEST = 20.0  # of what a tilt looks for: e^20 for every token


def describe(walks: Iterable[Walk]) -> dict[str, int]:
    """As a document has them."""
    return {f"{d},{length}": count for (d, length), count in sorted(Counter(walks).items())}


@dataclass(frozen=True)
class Walks:
    """Walks of one kind through trees of several sizes."""

    by_size: Mapping[int, Histogram]  # draft tokens of a tree, fewest first

    @classmethod
    def read(cls, path: Path, kind: str) -> Walks:
        """Those of a document, all tasks together."""
        tasks: dict[str, Any] = json.loads(path.read_text())["walks"][kind]
        found: dict[int, Counter[Walk]] = {}
        for sizes in tasks.values():
            for size, counts in sizes.items():
                own = found.setdefault(int(size), Counter())
                for pair, count in counts.items():
                    d, length = map(int, pair.split(","))
                    own[d, length] += count
        return cls(dict(sorted(found.items())))

    @property
    def largest(self) -> Histogram:
        """Of the largest trees, which have the whole chain."""
        return self.by_size[max(self.by_size)]

    @property
    def chain_mean(self) -> float:
        """Tokens that the chain alone brings in a step, the bonus token included."""
        return 1.0 + _mean(self.largest, 0)

    def mean(self, size: int) -> float:
        """The same of trees of a size."""
        return 1.0 + _mean(self.by_size[size], 1)

    def tilted(self, chain_mean: float) -> Walks:
        """The same pairs, weighted by exp(t · d): t such that the chain alone brings so much."""
        steepness = _steepness(self.largest, chain_mean)
        return Walks({size: _tilt(one, steepness) for size, one in self.by_size.items()})


def _tilt(histogram: Histogram, steepness: float) -> Histogram:
    most = max(d for d, _ in histogram)
    weights = {
        pair: count * math.exp(steepness * (pair[0] - (most if steepness > 0 else 0)))
        for pair, count in histogram.items()
    }
    total = sum(weights.values())
    return {pair: weight / total for pair, weight in weights.items()}


def _steepness(histogram: Histogram, chain_mean: float) -> float:
    low, high = -STEEPEST, STEEPEST
    least, most = (1.0 + _mean(_tilt(histogram, end), 0) for end in (low, high))
    if not least <= chain_mean <= most:
        raise ValueError(f"no tilt makes a chain of {chain_mean}: {least:.3f} to {most:.3f} can be")
    for _ in range(80):
        middle = (low + high) / 2
        if 1.0 + _mean(_tilt(histogram, middle), 0) < chain_mean:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _mean(histogram: Histogram, place: int) -> float:
    total = sum(histogram.values())
    return sum(pair[place] * count for pair, count in histogram.items()) / total
