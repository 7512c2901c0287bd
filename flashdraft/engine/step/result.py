"""What a step did: as the device writes it down, and as the host reads it.

A slot has a line (two counts, its samples, its draft tokens, their confidences), a row of the
target has a score. All of it is 64-bit words, so that it travels as it is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flashdraft.core import TokenLogprob
from flashdraft.kernels.draw.rule import MAX_TOP, Draw

SCORE_COLUMNS = 2 + 2 * MAX_TOP

Words = NDArray[np.int64]


class TokenScore(NamedTuple):
    """What the target thinks of the token it chose, and of the likeliest ones."""

    logit: float
    log_total: float  # the logarithm of the sum of exp(logit); not finite = the row is broken
    top_ids: Words
    top_logits: NDArray[np.float32]

    @classmethod
    def unpack(cls, words: Words) -> TokenScore:
        logit, log_total = _floats(words[:2]).tolist()
        return cls(logit, log_total, words[2 : 2 + MAX_TOP], _floats(words[2 + MAX_TOP :]))

    def logprobs(self, num_top: int) -> TokenLogprob:
        """The token's own, and those of the num_top likeliest."""
        ids, logits = self.top_ids[:num_top].tolist(), self.top_logits[:num_top].tolist()
        top = [(token, x - self.log_total) for token, x in zip(ids, logits, strict=True)]
        own = self.logit - self.log_total
        return TokenLogprob(own, tuple(pair for pair in top if pair[0] >= 0))


class TokenScores:
    """The scores of one sequence's rows, as the engine asks for them (`RowScores`)."""

    def __init__(self, rows: Words) -> None:
        self._rows = rows  # [num_rows, SCORE_COLUMNS]; few of them are ever asked for

    def logprobs(self, place: int, token: int, num_top: int) -> TokenLogprob:
        return TokenScore.unpack(self._rows[place]).logprobs(num_top)

    def is_sound(self, place: int) -> bool:
        return math.isfinite(TokenScore.unpack(self._rows[place]).log_total)


@dataclass
class SlotResult:
    """What a step did for one sequence."""

    num_accepted: int
    drafts: list[int]  # those that were verified
    samples: list[int]  # the target's tokens, one per row; -1 where none can be chosen
    confidence: list[float]  # of every draft token that was filled in, verified or not
    scores: TokenScores | None = None  # of the samples, where somebody asked


class StepResult(NamedTuple):
    """What a step did."""

    slots: list[SlotResult]
    woken: list[SlotResult]  # of the prompts that ended, in order


@dataclass(frozen=True)
class StepRecord:
    """What a step wrote down, on the host once the step is done."""

    lines: Tensor  # [batch, num_columns(width)]
    first_tokens: Tensor  # [num_woken]
    scores: Tensor | None  # [rows of all slots, then num_woken; SCORE_COLUMNS]
    width: int

    def read(self) -> StepResult:
        slots = [_read_line(line, self.width) for line in self.lines.numpy()]
        woken = [SlotResult(0, [], [token], []) for token in self.first_tokens.tolist()]
        if self.scores is not None:
            scores, first = self.scores.numpy(), 0
            for result in (*slots, *woken):
                result.scores = TokenScores(scores[first : first + len(result.samples)])
                first += len(result.samples)
        return StepResult(slots, woken)


def num_columns(width: int) -> int:
    """Of a slot's line."""
    return 2 + (1 + width) + 2 * width


def pack_lines(
    accepted: Tensor, widths: Tensor, samples: Tensor, drafts: Tensor, confidence: Tensor
) -> Tensor:
    """A line for each slot: [slots, num_columns(width)] int64."""
    counts = torch.stack([accepted, widths], dim=1)
    return torch.cat([counts, samples, drafts, _words(confidence)], dim=1)


def pack_scores(draw: Draw) -> Tensor:
    """A score for each row: [rows, SCORE_COLUMNS] int64."""
    own = torch.stack([draw.logit, draw.log_total], dim=1)
    return torch.cat([_words(own), draw.top_ids, _words(draw.top_logits)], dim=1)


def _read_line(line: Words, width: int) -> SlotResult:
    num_accepted, num_verified = int(line[0]), int(line[1])
    samples, drafts = line[2 : 3 + width], line[3 + width : 3 + 2 * width]
    return SlotResult(
        num_accepted,
        drafts[:num_verified].tolist(),
        samples[: 1 + num_verified].tolist(),
        _floats(line[3 + 2 * width :]).tolist(),
    )


def _words(floats: Tensor) -> Tensor:
    return floats.view(torch.int32).to(torch.int64)


def _floats(words: Words) -> NDArray[np.float32]:
    return words.astype(np.int32).view(np.float32)
