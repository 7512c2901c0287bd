"""Sampling: from a row of the target's logits to its token, as a pure function of the row.

Token = argmax(processed logits / temperature + noise(seed, position)); the drafter's rows are
sampled with the same noise, so that both tend to choose alike. Every sampled row is computed by
itself, hence its token does not depend on its neighbours, on drafting or on the batch. Nothing here
knows of caches or models.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from flashdraft.core import SamplingParams, TokenLogprob
from flashdraft.engine.sampling.draw import draw
from flashdraft.engine.sampling.grammar import Constraint
from flashdraft.engine.sampling.mask import apply_masks
from flashdraft.engine.sampling.noise import noise_key
from flashdraft.errors import FlashdraftError, RequestError

# NaN is what a flipped bit makes of a number, more often than anything a request can ask for
BROKEN_LOGITS = (
    "Most likely a file of the model is damaged (`flashdraft doctor --verify-files` finds out), or "
    "its numbers are too large for the dtype: try float32."
)
ArgMax = Callable[[Tensor], Tensor]  # [num_rows, vocab] -> [num_rows] int64, the first of equals


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

    def logprobs(self, place: int, token: int, num_top: int) -> TokenLogprob:
        """Of the token that was chosen from a row, and of the likeliest ones."""
        ...

    def is_sound(self, place: int) -> bool:
        """Whether a token could have been chosen from the row as it came."""
        ...


class LogitRows:
    """Scores from rows of raw logits [num_rows, vocab]."""

    def __init__(self, logits: Tensor) -> None:
        self._logits = logits

    def logprobs(self, place: int, token: int, num_top: int) -> TokenLogprob:
        return logprobs_of(self._logits[place], token, num_top)

    def is_sound(self, place: int) -> bool:
        return bool(self._logits[place].max().isfinite())


class Samples(NamedTuple):
    """The target's tokens. A row that is not sound has a meaningless token.

    Only committed rows matter: a row behind a rejected draft token follows a history that never
    happened, and plain decoding would not have seen it.
    """

    tokens: Tensor  # [num_rows] int64
    sound: Tensor  # [num_rows] bool


class Drafted(NamedTuple):
    """Draft tokens, and the logits that tell how likely each of them is."""

    tokens: Tensor  # [num_drafts] int64
    logits: Tensor  # [num_drafts, vocab]


class Emitted(NamedTuple):
    """What the penalties look at, for the history of one row."""

    ids: Tensor  # [num_ids] int64: every token with a penalty; repeats do no harm
    counts: Tensor  # [vocab] float32: how often each token was emitted


def validate_for_vocab(params: SamplingParams, vocab_size: int) -> None:
    """Refuse settings that name tokens outside the vocabulary."""
    for name, ids in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
        for token in ids:
            if not 0 <= token < vocab_size:
                raise RequestError(
                    f"{name} names token {token}; this model's ids end at {vocab_size - 1}. "
                    "Use ids of its own tokenizer."
                )


def is_sound(logits: Tensor, likeliest: Tensor) -> Tensor:
    """Whether a token can be chosen from each row, given the index of its largest value."""
    if not len(logits):
        return likeliest.bool()
    return logits.gather(1, likeliest.unsqueeze(1)).squeeze(1).isfinite()


class RequestSampler:
    """One request's settings, ready to be applied to rows of logits; made once per request.

    `needs_logits_processing` is False where the token is the plain argmax of the raw logits;
    `adjusts` is True where `process` changes them before the temperature does. A `constraint` masks
    the rows, and has its own word on stop tokens.
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
        self.params = params
        self.constraint = constraint
        self.seed = seed
        self.vocab_size = vocab_size
        self._device = device
        self._bias_ids = self._tensor(params.logit_bias)
        self._bias = torch.tensor(
            list(params.logit_bias.values()), dtype=torch.float32, device=device
        )
        self._stop_ids = self._tensor(sorted(stop_ids))
        self._penalises = (
            params.repetition_penalty != 1.0
            or params.frequency_penalty != 0.0
            or params.presence_penalty != 0.0
        )
        # The repetition penalty alone looks at the prompt.
        self._penalised_prompt = set(prompt_ids) if params.repetition_penalty != 1.0 else set()
        self._history: list[int]
        self._seen: set[int]
        self._ids: Tensor  # `_seen` as an index
        self._counts: Tensor  # of `_history`
        self._forget()
        self._masks_stops = constraint is None and params.min_tokens > 0 and len(self._stop_ids) > 0
        self.adjusts = self._penalises or bool(params.logit_bias) or self._masks_stops
        self.needs_logits_processing = (
            self.adjusts or not params.is_greedy or constraint is not None
        )

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

    def process(self, row: Tensor, output_ids: Sequence[int]) -> Tensor:
        """A copy of the row [vocab] after bias, min_tokens and penalties, as float32.

        `output_ids` are the tokens emitted before this row, without the prompt.
        """
        return self.adjust(row, self.emitted(output_ids), len(output_ids))

    def emitted(self, output_ids: Sequence[int]) -> Emitted | None:
        """The state of the penalties after these output tokens; None where there are none.

        It is valid until the next call. The counts of the last history are kept and extended; a
        history that does not continue it is counted anew, so a request that starts over is not
        miscounted.
        """
        if not self._penalises:
            return None
        num_counted = len(self._history)
        if list(output_ids[:num_counted]) != self._history:
            self._forget()
            num_counted = 0
        if len(output_ids) > num_counted:
            fresh = list(output_ids[num_counted:])
            self._history += fresh
            self._count(self._counts, self._tensor(fresh))
            unseen = set(fresh) - self._seen
            self._seen |= unseen
            self._ids = torch.cat([self._ids, self._tensor(unseen)])
        return Emitted(self._ids, self._counts)

    def follow(self, emitted: Emitted, token: Tensor) -> Emitted:
        """The state after one more token (a scalar), in a copy: a draft may yet be rejected."""
        counts = emitted.counts.clone()
        self._count(counts, token.view(1))
        return Emitted(torch.cat([emitted.ids, token.view(1)]), counts)

    def as_scalar(self, draft: int) -> Tensor:
        """A draft token as a scalar on the device."""
        # One outside the vocabulary is never accepted: what the rows behind it follow is no matter.
        inside = min(max(draft, 0), self.vocab_size - 1)
        return torch.full((), inside, dtype=torch.int64, device=self._device)

    def adjust(self, row: Tensor, emitted: Emitted | None, num_output: int) -> Tensor:
        """`process` for a history of num_output tokens that is counted already."""
        params = self.params
        row = row.to(torch.float32, copy=True)
        if params.logit_bias:
            row.index_add_(0, self._bias_ids, self._bias)
        if self._masks_stops and num_output < params.min_tokens:
            row.index_fill_(0, self._stop_ids, -math.inf)
        if emitted is None:
            return row
        values, counts = row[emitted.ids], emitted.counts[emitted.ids]
        if params.repetition_penalty != 1.0:
            penalty = params.repetition_penalty
            values = torch.where(values > 0, values / penalty, values * penalty)
        if params.frequency_penalty != 0.0:
            values = values - counts * params.frequency_penalty
        if params.presence_penalty != 0.0:
            values = values - (counts > 0) * params.presence_penalty
        row[emitted.ids] = values
        return row

    def _forget(self) -> None:
        self._history = []
        self._seen = set(self._penalised_prompt)
        self._ids = self._tensor(self._seen)
        num_counts = self.vocab_size if self._penalises else 0
        self._counts = torch.zeros(num_counts, device=self._device)

    def _tensor(self, ids: Collection[int]) -> Tensor:
        """Ids as an index; one outside the vocabulary (a placeholder) has no logit to change."""
        inside = [token for token in ids if 0 <= token < self.vocab_size]
        return torch.tensor(inside, dtype=torch.int64, device=self._device)

    def _count(self, counts: Tensor, tokens: Tensor) -> None:
        counts.index_add_(0, tokens, torch.ones(len(tokens), device=self._device))


def sample_rows(
    logits: Tensor,
    sampler: RequestSampler,
    history: Sequence[int],
    drafts: Sequence[int],
    first_position: int,
    argmax: ArgMax,
) -> Samples:
    """The target's own token for every row of one request's verify step.

    Row j of logits [num_rows, vocab] predicts the token at absolute position first_position + j;
    it follows the output tokens `history` and then drafts[:j]. A row that a grammar does not lead
    to is not sound.
    """
    if sampler.constraint is None:
        return _sample(logits, sampler, history, drafts, first_position, argmax)
    masks = sampler.constraint.masks(history, drafts[: len(logits) - 1])
    masked = apply_masks(logits[: len(masks)], masks)
    reached = _sample(masked, sampler, history, drafts, first_position, argmax)
    likeliest = argmax(logits)
    sound = is_sound(logits, likeliest)  # a mask must not hide that the logits are broken
    likeliest[: len(masks)] = reached.tokens
    sound[: len(masks)] &= reached.sound
    sound[len(masks) :] = False
    return Samples(likeliest, sound)


def draft_rows(
    logits: Tensor,
    sampler: RequestSampler,
    history: Sequence[int],
    first_position: int,
    argmax: ArgMax,
) -> Drafted:
    """Draft tokens from a drafter's logits over the target's vocabulary: one per row, or fewer.

    Slot j stands for absolute position first_position + j and is sampled with the noise and the
    settings the target will use there; it follows `history` and the draft tokens before it. Under a
    grammar the draft is a way through it, and ends where the drafter knows none.
    """
    if sampler.constraint is not None:
        return _draft_in_grammar(
            logits, sampler, sampler.constraint, history, first_position, argmax
        )
    return Drafted(_sample(logits, sampler, history, None, first_position, argmax).tokens, logits)


def _draft_in_grammar(
    logits: Tensor,
    sampler: RequestSampler,
    constraint: Constraint,
    history: Sequence[int],
    first_position: int,
    argmax: ArgMax,
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
                sample = _sample(row, sampler, past, [], first_position + place, argmax)
                if not bool(sample.sound[0]):  # it is blind here: it knows fewer tokens, or broke
                    break
                token = int(sample.tokens[0])
            tokens.append(token)
            rows.append(row)
            if token in constraint.stop_ids or not constraint.follow(token):
                break
    ids = torch.tensor(tokens, dtype=torch.int64, device=logits.device)
    return Drafted(ids, torch.cat(rows) if rows else logits[:0])


def logprobs_of(row: Tensor, token: int, num_top: int) -> TokenLogprob:
    """Log-softmax of a row of raw logits [vocab]: of one token and of the num_top likeliest."""
    logprobs = row.to(torch.float64, copy=True).log_softmax(0)
    top: list[tuple[int, float]] = []
    if num_top > 0:
        least = logprobs.topk(min(num_top, len(logprobs))).values[-1]
        # More than num_top where the last ones tie: the lower ids come first, as in argmax.
        ids = ((logprobs >= least) & (logprobs > -math.inf)).nonzero().squeeze(1)
        pairs = zip(ids.tolist(), logprobs[ids].tolist(), strict=True)
        top = sorted(pairs, key=lambda pair: -pair[1])[:num_top]
    return TokenLogprob(float(logprobs[token]), tuple(top))


def _sample(
    logits: Tensor,
    sampler: RequestSampler,
    history: Sequence[int],
    drafts: Sequence[int] | None,
    first_position: int,
    argmax: ArgMax,
) -> Samples:
    """Sample every row; without `drafts` each row follows the samples before it."""
    num_rows = logits.shape[0]
    likeliest = argmax(logits)
    sound = is_sound(logits, likeliest)
    if num_rows == 0 or (sampler.params.is_greedy and not sampler.adjusts):
        return Samples(likeliest, sound)
    tokens: list[Tensor] = []
    peaks: list[Tensor] = []
    emitted = sampler.emitted(history)
    for j in range(num_rows):
        row = logits[j]
        if sampler.adjusts:
            if emitted is not None and j > 0:
                token = tokens[-1] if drafts is None else sampler.as_scalar(drafts[j - 1])
                emitted = sampler.follow(emitted, token)
            row = sampler.adjust(row, emitted, len(history) + j)
            peaks.append(row.amax())
        if sampler.params.is_greedy:
            tokens.append(argmax(row.unsqueeze(0))[0])
        else:
            tokens.append(draw(row, sampler.params, noise_key(sampler.seed, first_position + j)))
    if peaks:
        sound = sound & torch.isfinite(torch.stack(peaks))
    return Samples(torch.stack(tokens), sound)
