"""How many prompt tokens ride in a step beside those who decode. No torch.

Up to where the weights' reading hides them prompt rows are free; beyond it every row costs the
others time, so a chunk is sized by what rows took at their context, under a limit on the gap that
the others see. The limit grows with what waits: prompts that queue up cost throughput as well.
"""

from __future__ import annotations

MAX_GAP_S = 0.07  # between two tokens of a request, while little waits
LONGEST_GAP_S = 0.15  # and however much does
PATIENCE = 2048  # waiting tokens that double the limit
MIN_ROWS = 32  # in any case: prompts move on
FADE = 0.3  # of the newest figure in a running mean
FIRST_GUESS_S = 1e-4  # a prompt token, before any was timed


class PromptBudget:
    """Prompt rows that the next step may have."""

    def __init__(self, max_rows: int) -> None:
        self._max_rows = max_rows
        self._row_s: dict[int, float] = {}  # seconds a row, by the context's order of magnitude

    def rows(self, others_s: float, context: int, num_waiting: int) -> int:
        """Rows for prompts at a context, in a step that takes those who decode `others_s`.

        0 seconds stand for nobody: a lone prompt runs at full speed.
        """
        if others_s <= 0.0:
            return self._max_rows
        limit = min(MAX_GAP_S * (1.0 + num_waiting / PATIENCE), LONGEST_GAP_S)
        spare = max(limit - others_s, 0.25 * others_s)  # where others are slow all have to wait
        rows = int(spare / self._guess(context))
        return max(MIN_ROWS, min(rows, self._max_rows))

    def remember(self, rows: int, context: int, seconds: float) -> None:
        """Take in what so many rows added to a step."""
        bucket, one = _bucket(context), max(seconds / rows, 1e-7)
        last = self._row_s.get(bucket, one)
        self._row_s[bucket] = last + FADE * (one - last)

    def _guess(self, context: int) -> float:
        bucket = _bucket(context)
        if not self._row_s:
            return FIRST_GUESS_S
        nearest = min(self._row_s, key=lambda known: abs(known - bucket))
        return self._row_s[nearest]


def _bucket(context: int) -> int:
    """Contexts that differ by less than a factor of two, from 1024 on, are alike."""
    return max(0, context.bit_length() - 10)
