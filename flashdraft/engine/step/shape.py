"""What a step looks like before it runs: how many rows of whom, and which chunks of prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Slots of the captured steps."""
MAX_CHUNKS = 8  # of prompts in a step
MIXED_ROWS = (64, 128, 192, 256, 320, 384, 512, 640, 768, 1024, 1536)
"""Rows of the captured passes that have some of prompts; what is left is filled up."""
MANY_ROWS = 768  # more of them take the device longer than the host


class ScoredRows(NamedTuple):
    """Rows of a chunk, and the tokens that follow each of them in the prompt."""

    first: int
    tokens: Sequence[int]
    num_top: int  # of the likeliest tokens, beside the prompt's own


class PromptChunk(NamedTuple):
    """Tokens that a step computes for a slot that sleeps."""

    slot: int
    start: int  # position of the first of them
    tokens: Sequence[int]
    emits: bool  # they end with the anchor: a token comes out, and the slot wakes
    scored: ScoredRows | None = None  # rows whose next tokens' log-probabilities are wanted


class StepShape(NamedTuple):
    """What the captured pieces of a step are fixed to."""

    batch: int  # slots that take part
    num_slots: int  # draft tokens verified, of all sequences together
    width: int  # draft tokens that the drafter fills in for each sequence; 0 = it does not run
    is_greedy: bool = True  # everybody takes the likeliest: the logits need not be written
    is_guided: bool = False  # a grammar has its say on some rows
    is_given: bool = False  # the host makes the drafts, and says how many of each are verified

    @property
    def num_rows(self) -> int:
        return self.batch + self.num_slots

    @property
    def draft_key(self) -> tuple[int, int, bool]:
        """What the draft is fixed to."""
        return self.batch, self.width, self.is_greedy


def smallest_batch(count: int) -> int:
    """The smallest batch that is captured for so many sequences."""
    if count == 0:
        return 0
    return next((size for size in BATCHES if size >= count), count)
