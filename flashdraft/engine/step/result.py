"""What a step did: as the device writes it down, and as the host reads it.

A slot has a line (four numbers, the samples of its path and their rows, its draft tokens with
their parents, confidences and sources), a row of the target has a score. All of it is 64-bit words,
so that it travels as it is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flashdraft.core import TokenLogprob
from flashdraft.engine.draft.candidates import Candidates
from flashdraft.engine.drafts import DEVICE_SOURCES, NODE_SOURCES, Draft
from flashdraft.kernels.advance import num_columns
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
    """What the target thinks of tokens, row by row, before any setting changes it."""

    def __init__(self, rows: Words) -> None:
        self._rows = rows  # [num_rows, SCORE_COLUMNS]; few of them are ever asked for

    def __len__(self) -> int:
        return len(self._rows)

    def logprobs(self, place: int, num_top: int) -> TokenLogprob:
        """Of the token that a row is about, and of the likeliest ones."""
        return TokenScore.unpack(self._rows[place]).logprobs(num_top)

    def is_sound(self, place: int) -> bool:
        """Whether a token could have been chosen from the row as it came."""
        return math.isfinite(TokenScore.unpack(self._rows[place]).log_total)


@dataclass
class SlotResult:
    """What a step did for one sequence."""

    num_accepted: int
    drafts: list[int]  # those that were verified
    samples: list[int]  # the target's tokens along its path; -1 where none can be chosen
    confidence: list[float]  # of every draft token that was filled in, verified or not
    scores: TokenScores | None = None  # of the samples, where somebody asked
    source: str = ""  # of the draft tokens, of a tree those of its chain
    num_rows: int = 1  # of the target: more than it verified where its request wants fewer
    parents: list[int] | None = None  # as confidence, of a tree: rows; None = a chain
    node_sources: list[str] | None = None  # likewise
    path: list[int] | None = None  # the rows behind which the samples stand; None = in order

    @property
    def draft(self) -> Draft:
        """What was filled in; its tokens are those that were verified."""
        more = self.parents, self.node_sources
        return Draft(self.drafts, self.confidence, self.source, *more)

    @property
    def tokens(self) -> list[int]:
        """What follows the answer: accepted draft tokens and one more, up to a row without any."""
        return list(takewhile(lambda token: token >= 0, self.samples[: self.num_accepted + 1]))

    @property
    def walk(self) -> tuple[int, int]:
        """Accepted nodes that lie on the chain, and all of them."""
        if self.parents is None or self.path is None:
            return self.num_accepted, self.num_accepted
        return self.num_accepted - self.draft.num_off_chain(self.path[1:]), self.num_accepted


class StepResult(NamedTuple):
    """What a step did."""

    slots: list[SlotResult]
    woken: list[SlotResult]  # of the prompts that ended, in order
    prompt_scores: list[TokenScores | None]  # of every prompt's tokens, where somebody asked


@dataclass(frozen=True)
class StepRecord:
    """What a step wrote down, on the host once the step is done."""

    lines: Tensor  # of the batch, as empty_lines makes them
    first_tokens: Tensor  # [num_woken]
    scores: Tensor | None  # [rows of all slots, then num_woken; SCORE_COLUMNS]
    width: int  # draft tokens that were filled in
    prompt_scores: Sequence[Tensor | None] = ()  # for each chunk of a prompt
    num_nodes: int = 0  # the most of a slot
    are_trees: bool = False  # they need not be chains

    def read_slots(self) -> list[SlotResult]:
        """What it did for those who decode, but for the scores."""
        return _read_lines(self.lines.numpy(), self.num_nodes, self.width, self.are_trees)

    def read(self) -> StepResult:
        slots = self.read_slots()
        woken = [SlotResult(0, [], [token], []) for token in self.first_tokens.tolist()]
        if self.scores is not None:
            scores, first = self.scores.numpy(), 0
            for result in (*slots, *woken):
                result.scores = _scores_of(result, scores[first : first + result.num_rows])
                first += result.num_rows
        prompts = [None if one is None else TokenScores(one.numpy()) for one in self.prompt_scores]
        return StepResult(slots, woken, prompts)


def _scores_of(result: SlotResult, rows: Words) -> TokenScores:
    """Of its samples; who has ended on the device may have no rows."""
    if result.path is None or not len(rows):
        return TokenScores(rows[: len(result.samples)])
    return TokenScores(rows[result.path])


def empty_lines(num_slots: int, width: int, num_nodes: int, device: torch.device) -> Tensor:
    """A line for each slot, of trees so deep and so large."""
    columns = num_columns(width, num_nodes)
    return torch.zeros(num_slots, columns, dtype=torch.int64, device=device)


def pack_scores(draw: Draw) -> Tensor:
    """A score for each row: [rows, SCORE_COLUMNS] int64."""
    own = torch.stack([draw.logit, draw.log_total], dim=1)
    return torch.cat([_words(own), draw.top_ids, _words(draw.top_logits)], dim=1)


def read_candidates(tokens: Words, scores: Words) -> Candidates:
    """A drafter's rows [width] with their scores [width, SCORE_COLUMNS]."""
    own, top_ids = _floats(scores[:, :2]), scores[:, 2 : 2 + MAX_TOP]
    return Candidates(tokens, own[:, 0], own[:, 1], top_ids, _floats(scores[:, 2 + MAX_TOP :]))


def _read_lines(lines: Words, num_nodes: int, width: int, are_trees: bool) -> list[SlotResult]:
    """Of chains so long as was filled in, or of trees."""
    first = lines.shape[1] - 3 * num_nodes  # of the nodes' columns
    behind, last = (4 + first) // 2, first + 2 * num_nodes
    sure, numbers = _floats(lines[:, last:]).tolist(), (lines[:, last:] >> 32).tolist()
    results = []
    for line, confidence, sources in zip(lines[:, :last].tolist(), sure, numbers, strict=True):
        num_accepted, num_verified, num_rows, source = line[:4]
        result = SlotResult(
            num_accepted,
            line[first : first + num_verified],
            line[4 : 5 + num_accepted],
            confidence[:width],
            source=DEVICE_SOURCES[source],
            num_rows=num_rows,
        )
        if are_trees:
            result.confidence = [one for one in confidence if one > 0.0]
            result.parents = line[first + num_nodes : last][: len(result.confidence)]
            result.node_sources = [NODE_SOURCES[one] for one in sources[: len(result.confidence)]]
            result.path = line[behind : behind + 1 + num_accepted]
        results.append(result)
    return results


def _words(floats: Tensor) -> Tensor:
    return floats.view(torch.int32).to(torch.int64)


def _floats(words: Words) -> NDArray[np.float32]:
    return words.astype(np.int32).view(np.float32)
