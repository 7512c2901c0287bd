"""Log-probabilities of a prompt's own tokens, from rows that the prefill computes anyway."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flashdraft.core import SamplingParams
from flashdraft.engine.step.result import pack_scores
from flashdraft.engine.step.shape import PromptChunk
from flashdraft.kernels.draw.rule import DrawnRows, SlotRequest, SlotSettings
from flashdraft.models.layers import Target

ROWS_AT_ONCE = 16  # logits of a long chunk over a large vocabulary would fill the memory


def score_prompts(
    target: Target,
    hidden: Tensor,
    chunks: Sequence[PromptChunk],
    send: Callable[[NDArray[np.int64]], Tensor],
    describe: Callable[[Tensor, Tensor], DrawnRows] = DrawnRows,
) -> list[Tensor | None]:
    """What the target thinks of the tokens of these chunks, where that is wanted; None elsewhere.

    hidden [rows, hidden_size] are the chunks' rows, one after another.
    """
    scores: list[Tensor | None] = []
    first = 0
    for chunk in chunks:
        scored, begin = chunk.scored, first
        first += len(chunk.tokens)
        if scored is None:
            scores.append(None)
            continue
        begin += scored.first
        tokens = send(np.asarray(scored.tokens, dtype=np.int64))
        rows = hidden[begin : begin + len(tokens)]
        scores.append(score_rows(target, rows, tokens, scored.num_top, describe))
    return scores


def score_rows(
    target: Target,
    hidden: Tensor,
    tokens: Tensor,
    num_top: int,
    describe: Callable[[Tensor, Tensor], DrawnRows] = DrawnRows,
) -> Tensor:
    """What the target thinks of tokens [rows], as of those that it draws: [rows, SCORE_COLUMNS].

    The logits of a few rows at a time are there, and none of them leaves the device.
    """
    size, device = target.config.vocab_size, hidden.device
    settings = SlotSettings.allocate(1, size, device, has_tables=False)
    settings.set({0: SlotRequest(SamplingParams(logprobs=num_top), 0, ())})
    pieces = [torch.split(one, ROWS_AT_ONCE) for one in (hidden, tokens)]
    scores = []
    for rows, own in zip(*pieces, strict=True):
        logits, zeros = target.logits(rows), torch.zeros_like(own)
        drawn = target.kernels.draw(logits, settings, describe(zeros, zeros))
        logit = logits.gather(1, own.unsqueeze(1)).squeeze(1)
        scores.append(pack_scores(drawn._replace(logit=logit)))
    return torch.cat(scores)
