"""What a request brings to the draw, and drafts by it: its settings, its history, its grammar.

What a row becomes is the rule of kernels/draw. The drafter's rows are drawn with the noise that the
target's will be, so that both tend to choose alike. Nothing here knows of caches or models.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from flashdraft.core import SamplingParams, TokenLogprob
from flashdraft.engine.sampling.grammar import Constraint
from flashdraft.engine.sampling.mask import apply_masks
from flashdraft.errors import FlashdraftError, RequestError
from flashdraft.kernels.draw.rule import (
    NO_TOKEN,
    Draw,
    DrawnRows,
    SlotRequest,
    SlotSettings,
    has_penalties,
)

# NaN is what a flipped bit makes of a number, more often than anything a request can ask for
BROKEN_LOGITS = (
    "Most likely a file of the model is damaged (`flashdraft doctor --verify-files` finds out), or "
    "its numbers are too large for the dtype: try float32."
)


class Chooser(Protocol):
    """The kernels that choose tokens (`Kernels` has them)."""

    def argmax(self, x: Tensor) -> Tensor: ...

    def draw(self, logits: Tensor, settings: SlotSettings, rows: DrawnRows) -> Draw: ...


class LogitsError(FlashdraftError):
    """A row of logits from which no token can be chosen: by the model's fault, or the request's."""

    def __init__(self, position: int, was_sound: bool, sampler: RequestSampler) -> None:
        """`was_sound` says whether a token could have been chosen from the row as it came."""
        settings = sampler.settings_in_force if was_sound else []
        if settings:
            text = f"At position {position} {' and '.join(settings)} leave no token to choose."
        else:
            text = f"The logits at position {position} hold NaN or infinity. {BROKEN_LOGITS}"
        super().__init__(text)


class RowScores(Protocol):
    """What the target thinks of tokens, row by row, before any setting changes it."""

    def logprobs(self, place: int, num_top: int) -> TokenLogprob:
        """Of the token that was chosen from a row, and of the likeliest ones."""
        ...


class Drafted(NamedTuple):
    """Draft tokens, and the logits that tell how likely each of them is."""

    tokens: Tensor  # [num_drafts] int64
    logits: Tensor  # [num_drafts, vocab]


def validate_for_vocab(params: SamplingParams, vocab_size: int) -> None:
    """Refuse settings that name tokens outside the vocabulary."""
    for name, ids in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
        for token in ids:
            if not 0 <= token < vocab_size:
                raise RequestError(
                    f"{name} names token {token}; this model's ids end at {vocab_size - 1}. "
                    "Use ids of its own tokenizer."
                )


class RequestSampler:
    """One request's settings, ready to be applied to rows of logits; made once per request.

    `adjusts` is True where logits are changed before the temperature does so. A `constraint` masks
    the rows, and has its own word on stop tokens. Nothing is sent to the device before it is asked.
    """

    def __init__(
        self,
        params: SamplingParams,
        seed: int,
        vocab_size: int,
        stop_ids: Collection[int],
        prompt_ids: Sequence[int],
        device: torch.device,
        constraint: Constraint | None = None,
    ) -> None:
        self.params, self.seed, self.vocab_size = params, seed, vocab_size
        self.constraint = constraint
        self._device = device
        self._request = SlotRequest(
            params, seed, prompt_ids, stop_ids, is_constrained=constraint is not None
        )
        self._settings: SlotSettings | None = None
        self._history: list[int] = []  # output tokens that are counted
        self._penalises = has_penalties(params)
        self._masks_stops = constraint is None and params.min_tokens > 0 and bool(stop_ids)
        self.adjusts = self._penalises or bool(params.logit_bias) or self._masks_stops

    @property
    def settings_in_force(self) -> list[str]:
        """What the request asks for that changes or masks the target's logits, by name."""
        params = self.params
        named = {
            "logit_bias": bool(params.logit_bias),
            "min_tokens": self._masks_stops,
            "the penalties": self._penalises,
            "the grammar": self.constraint is not None,
        }
        return [name for name, is_used in named.items() if is_used]

    def slot_request(self, output_ids: Sequence[int]) -> SlotRequest:
        """What a slot must know of the request, once these tokens are put out."""
        return self._request._replace(output_ids=output_ids)

    def settings_after(self, output_ids: Sequence[int]) -> SlotSettings:
        """The settings of a slot 0, after these output tokens; valid until the next call.

        The counts of the last history are kept and extended; a history that does not continue it is
        counted anew, so a request that starts over is not miscounted.
        """
        counted = len(self._history)
        if self._settings is None:
            self._settings = SlotSettings.allocate(1, self.vocab_size, self._device, self.adjusts)
        elif not self._penalises or output_ids[:counted] == self._history:
            fresh = list(output_ids[counted:])
            if fresh and self._penalises:
                self._history += fresh
                tokens = torch.tensor([fresh], device=self._device)
                zero = torch.zeros(1, dtype=torch.int64, device=self._device)
                self._settings.count(zero, tokens, zero + len(fresh))
            return self._settings
        self._history = list(output_ids)
        self._settings.set({0: self.slot_request(output_ids)})
        return self._settings


def draft_rows(
    logits: Tensor,
    sampler: RequestSampler,
    history: Sequence[int],
    first_position: int,
    kernels: Chooser,
) -> Drafted:
    """Draft tokens from a drafter's logits over the target's vocabulary: one per row, or fewer.

    Slot j stands for absolute position first_position + j and is sampled with the noise and the
    settings the target will use there, its penalties as after `history`. Under a grammar the draft
    is a way through it, and ends where the drafter knows none.
    """
    if sampler.constraint is not None:
        return _draft_in_grammar(
            logits, sampler, sampler.constraint, history, first_position, kernels
        )
    tokens = _sample(logits, sampler, history, first_position, kernels)
    return Drafted(tokens.clamp(min=0), logits)


def _draft_in_grammar(
    logits: Tensor,
    sampler: RequestSampler,
    constraint: Constraint,
    history: Sequence[int],
    first_position: int,
    kernels: Chooser,
) -> Drafted:
    """One row after the other: what may come next depends on what was drafted before."""
    tokens: list[int] = []
    rows: list[Tensor] = []
    forced: list[int] = []
    with constraint.guard():
        constraint.seek(history)
        while len(tokens) < len(logits):
            place = len(tokens)
            forced = forced or constraint.forced()
            if forced:  # surer than anything that the drafter says
                token = forced.pop(0)
                row = torch.full_like(logits[:1], -math.inf)
                row[0, token] = 0.0
            else:
                row = apply_masks(logits[place : place + 1], [constraint.allowed()])
                past = [*history, *tokens]
                token = int(_sample(row, sampler, past, first_position + place, kernels)[0])
                if token == NO_TOKEN:  # it is blind here: it knows fewer tokens, or broke
                    break
            tokens.append(token)
            rows.append(row)
            if token in constraint.stop_ids or not constraint.follow(token):
                break
    ids = torch.tensor(tokens, dtype=torch.int64, device=logits.device)
    return Drafted(ids, torch.cat(rows) if rows else logits[:0])


def _sample(
    logits: Tensor,
    sampler: RequestSampler,
    history: Sequence[int],
    first_position: int,
    kernels: Chooser,
) -> Tensor:
    """A token from every row, -1 where none can be chosen; all follow the same history."""
    num_rows = logits.shape[0]
    if num_rows == 0 or (sampler.params.is_greedy and not sampler.adjusts):
        likeliest = kernels.argmax(logits)
        if not num_rows:
            return likeliest
        peaks = logits.gather(1, likeliest.unsqueeze(1)).squeeze(1)
        return torch.where(peaks.isfinite(), likeliest, NO_TOKEN)
    owner = torch.zeros(num_rows, dtype=torch.int64, device=logits.device)
    place = torch.arange(num_rows, device=logits.device)
    rows = DrawnRows(owner, first_position + place, totals=False)
    return kernels.draw(logits, sampler.settings_after(history), rows).tokens
