"""What a step looks like before it runs: how many rows of whom, and which chunks of prompts.

Captured steps come in few shapes: so many slots, so many rows. Who has how many of the rows, what
they are set to and whether a grammar has its say is data, and what is left over is of nobody.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from flashdraft.core import PlacedPicture
from flashdraft.engine.draft.guided import MOST_GUIDED

STEP_ROWS = (4, 8, 16, 32, 64, 128, 192, 256, 384, 512)
"""Rows of those that verify drafts; without drafts there is one for every slot."""
MIXED_ROWS = (128, 192, 256, 384, 704, 1024)
"""Rows of the captured passes that have some of prompts."""
LONE_ROWS = (1536,)
"""The same, where nobody decodes beside them."""
ROWS_BETWEEN = (192, 384)
"""Of these, what many slots do without where trees take graphs of their own."""
TREE_ROWS = 128
"""Rows up to which trees may have more than chains of all requests would."""
MAX_CHUNKS = 8  # of prompts in a step
MANY_ROWS = 704  # more of them may take the device longer than the host
FEW_SLOTS = 8  # up to so many that decode beside prompts, attention is planned for few
MANY_SLOTS = 32  # with more of them, batches and rows come in fewer sizes


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
    pictures: Sequence[PlacedPicture] = ()  # placed in the chunk, all of each


class StepShape(NamedTuple):
    """What the captured pieces of a step are fixed to."""

    batch: int  # slots that take part: the first ones
    num_rows: int  # anchors and draft tokens that they verify together
    width: int = 0  # draft tokens filled in for each of them; 0 = none
    is_given: bool = False  # the host makes the drafts, and says how many of each are verified

    @property
    def draft_key(self) -> tuple[int, int]:
        """What the draft is fixed to."""
        return self.batch, self.width

    @property
    def most_verified(self) -> int:
        """Draft tokens of one sequence."""
        return min(self.width, max(0, self.num_rows - 1))


def most_rows(batch: int, max_width: int, num_nodes: int) -> int:
    """Of a step of so many requests, whose drafts are so long and trees so large."""
    chains = batch * (1 + max_width)
    return max(chains, min(batch * (1 + num_nodes), TREE_ROWS))


def most_guided(max_width: int, num_nodes: int) -> int:
    """Of a slot's rows, those that a grammar may have masks for: its drafts are not larger."""
    return 1 + max(max_width, min(MOST_GUIDED, num_nodes))


@dataclass(frozen=True)
class StepSizes:
    """The shapes of steps that are ever captured, for an engine of so many slots."""

    max_batch: int
    max_width: int  # draft tokens of a whole block
    num_nodes: int = 0  # of a tree, where drafts are trees

    @cached_property
    def batches(self) -> list[int]:
        """Slots that take part."""
        factor, sizes = 2 if self.max_batch <= MANY_SLOTS else 4, [1]
        while sizes[-1] * factor < self.max_batch:
            sizes.append(sizes[-1] * factor)
        return [*sizes, self.max_batch] if self.max_batch > 1 else sizes

    def batch_for(self, count: int) -> int:
        """The smallest batch for so many."""
        return next(size for size in (0, *self.batches) if size >= count)

    def rows_for(self, batch: int) -> list[int]:
        """Rows of a batch's steps, fewest first: without drafts, and with some."""
        most, left_out = self.most_rows(batch), tuple[int, ...]()
        if self.num_nodes > self.max_width and batch > FEW_SLOTS:
            left_out = ROWS_BETWEEN
        fitting = (rows for rows in STEP_ROWS if batch < rows <= most)
        return [batch, *(rows for rows in fitting if rows not in left_out)]

    def most_rows(self, batch: int) -> int:
        """Rows of the largest step of a batch."""
        return most_rows(batch, self.max_width, self.num_nodes)

    def widths_for(self, batch: int, num_rows: int) -> list[int]:
        """How many draft tokens may be filled in for each where so many rows are verified.

        Some may verify more than the mean. A whole block, half of one where many have little, or
        either where halves are just enough.
        """
        if num_rows <= batch:
            return [0]
        half, drafted = self.max_width // 2, num_rows - batch
        if batch <= FEW_SLOTS or half <= 1 or drafted > half * batch:
            return [self.max_width]
        return [half] if 4 * drafted <= 3 * half * batch else [half, self.max_width]

    @cached_property
    def drawn(self) -> list[int]:
        """Rows that tokens are drawn from."""
        found = {rows for batch in self.batches for rows in self.rows_for(batch)}
        return sorted(found - {2} if 4 in found else found)  # two take as long as four

    @property
    def shapes(self) -> list[StepShape]:
        """All steps without prompts, largest first."""
        return [
            StepShape(batch, rows, self.widths_for(batch, rows)[-1])
            for batch in reversed(self.batches)
            for rows in reversed(self.rows_for(batch))
        ]
