"""What prompt rows cost beside those who decode, and how many of them ride in a step. No torch.

Up to where reading the weights hides them rows are free; beyond it a step's time grows with all its
rows alike. So a prompt is spread over a few steps, where it fills what is free first, and a step
has no more of it than the others may wait for. The limit grows with what waits: prompts that queue
up cost throughput as well. Times are those of real steps, by the context that their prompts had.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_GAP_S = 0.07  # between two tokens of a request, while little waits
LONGEST_GAP_S = 0.15  # and however much does
PATIENCE = 4096  # waiting tokens that double the limit
SPREAD = 1  # steps over which a prompt is spread, at least
MIN_ROWS = 32  # in any case: prompts move on
FADE = 0.95  # of what is known, with every step
PRIOR = 0.1  # observations that the first guess counts for
FIRST_GUESS_S = 1e-4  # a row, before any was timed


@dataclass
class _Line:
    """seconds = base + rows * slope, fitted to what was seen, the newest most.

    Where all steps had as many rows the base is taken to be small.
    """

    slope: float
    weight: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0

    def add(self, rows: int, seconds: float) -> None:
        x = float(rows)
        self.weight, self.x, self.y = (
            FADE * self.weight + 1.0,
            FADE * self.x + x,
            FADE * self.y + seconds,
        )
        self.xx, self.xy = FADE * self.xx + x * x, FADE * self.xy + x * seconds

    def fit(self) -> tuple[float, float]:
        """Base and slope, neither below nothing."""
        if not self.weight:
            return 0.0, self.slope
        scale = PRIOR * self.xx / self.weight
        weight, xx = self.weight + PRIOR, self.xx + scale
        xy = self.xy + scale * self.slope
        determinant = weight * xx - self.x * self.x
        slope = max((weight * xy - self.x * self.y) / determinant, 1e-3 * self.slope)
        return max((self.y - slope * self.x) / weight, 0.0), slope


class PromptBudget:
    """Prompt rows that the next step may have, and what a step with them takes."""

    def __init__(self, max_rows: int, spread: int = SPREAD) -> None:
        self._max_rows, self._spread = max_rows, spread
        self._lines: dict[int, _Line] = {}  # by the context's order of magnitude

    def rows(self, others_s: float, num_others: int, context: int, prompts: list[int]) -> int:
        """Rows for prompts of these lengths, at a context, beside rows that take `others_s` alone.

        0 seconds stand for nobody: a lone prompt runs at full speed.
        """
        if others_s <= 0.0:
            return self._max_rows
        base, slope = self._line(context).fit()
        limit = min(MAX_GAP_S * (1.0 + sum(prompts) / PATIENCE), LONGEST_GAP_S)
        # where others are slow all have to wait
        most = int(max(limit - base, 1.25 * others_s - base) / slope) - num_others
        free = int((others_s - base) / slope) - num_others
        wanted = sum(-(-length // self._spread) for length in prompts)
        return max(MIN_ROWS, min(max(free, wanted), most, self._max_rows))

    def seconds(self, num_rows: int, context: int) -> float:
        """What the target takes for so many rows of prompts and others together."""
        base, slope = self._line(context).fit()
        return base + slope * num_rows

    def remember(self, num_rows: int, context: int, seconds: float) -> None:
        """Take in what a step with prompts took the target."""
        line = self._line(context)
        if not line.weight:
            line.slope = seconds / num_rows
        line.add(num_rows, seconds)
        self._lines[_bucket(context)] = line

    def _line(self, context: int) -> _Line:
        bucket = _bucket(context)
        if not self._lines:
            return _Line(FIRST_GUESS_S)
        nearest = min(self._lines, key=lambda known: abs(known - bucket))
        if nearest != bucket:
            return _Line(self._lines[nearest].fit()[1])
        return self._lines[bucket]


def _bucket(context: int) -> int:
    """Contexts that differ by less than a factor of two, from 2048 on, are alike."""
    return max(0, context.bit_length() - 11)
