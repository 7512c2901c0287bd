"""Drafts under a grammar: a way through it, of tokens that the drafter thinks likely.

The device draws from the drafter's rows and knows no grammar; beside the token that it drew it
tells the likeliest ones of every row. Of these the host picks, place by place, what the request's
own draw would choose among those that the grammar allows there. A draft may be a guess: only what
the target draws must be exact. No torch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from flashdraft.core import Request, SamplingParams
from flashdraft.engine.drafts import BLOCK_SOURCE, Draft
from flashdraft.engine.sampling.grammar import Constraint, Mask
from flashdraft.kernels.draw.arithmetic import gumbel
from flashdraft.kernels.draw.noise import host_random_bits_at, noise_key
from flashdraft.kernels.draw.rule import LOWEST_TEMPERATURE, NO_TOKEN, has_penalties

GUESSED = 0.05  # confidence in a token that its own row does not offer

Ids = NDArray[np.int64]
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Candidates:
    """What a drafter's rows offer one request; all logits are raw."""

    tokens: Ids  # [width]: drawn as if there were no grammar
    logits: Floats  # [width]: theirs; -inf = none was drawn
    log_total: Floats  # [width]: the logarithm of the sum of exp(logit) over the row
    top_ids: Ids  # [width, n]: the likeliest; -1 where there are fewer
    top_logits: Floats  # [width, n]


def draft_within(
    constraint: Constraint, request: Request, history: Sequence[int], candidates: Candidates
) -> Draft:
    """A draft that the grammar lets through, after the output tokens `history`.

    Row j of the candidates stands for the j-th draft token. What the grammar forces comes first,
    and is sure; then what was drawn, if it is allowed; then the best of the others that are, and
    at last one of another row. The draft ends with a stop token, or where no candidate is allowed.

    Among fewer tokens the draw would still choose the one that it chose among all, unless filters
    have let others in: that is put up with, for it takes no mask, and the target waits. Penalties
    are another matter: they know the tokens drafted before, and all is picked by its mask.
    """
    tokens: list[int] = []
    confidence: list[float] = []
    forced: list[int] = []
    drawn, chances = _drawn(candidates)
    trusts_draw = not has_penalties(request.params)
    picker: _Picker | None = None
    with constraint.guard():
        constraint.seek(history)
        while (place := len(tokens)) < len(drawn):
            forced = forced or constraint.forced()
            if forced:  # surer than anything that the drafter says
                token, chance = forced.pop(0), 1.0
                is_taken = constraint.take(token)
            else:
                token, chance = drawn[place], chances[place]
                is_taken = trusts_draw and token != NO_TOKEN and constraint.take(token)
            if not is_taken:
                forced = []
                picker = picker or _Picker(request, history, candidates)
                token, chance = picker.pick(tokens, constraint.allowed())
                if token == NO_TOKEN or not constraint.take(token):
                    break
            tokens.append(token)
            confidence.append(chance)
            if token in constraint.stop_ids or constraint.is_over():
                break
    return Draft(tokens, confidence, BLOCK_SOURCE)


def _drawn(candidates: Candidates) -> tuple[list[int], list[float]]:
    """The drawn tokens, -1 for none, and how likely the drafter thinks them."""
    is_drawn = np.isfinite(candidates.logits)
    with np.errstate(all="ignore"):  # a broken row has no total
        chances = np.exp(candidates.logits - candidates.log_total)
    return np.where(is_drawn, candidates.tokens, NO_TOKEN).tolist(), chances.tolist()


class _Picker:
    """Chooses from a row's candidates by the rule of kernels/draw, with the target's own noise.

    It is the rule as long as every token that counts is a candidate. Of what is allowed but is
    none, it knows nothing: top-p takes the candidates for all there is, noise lifts no token from
    behind them, nor a bias one that was not drawn.
    """

    def __init__(self, request: Request, history: Sequence[int], candidates: Candidates) -> None:
        self._params = request.params
        self._counts = Counter(history) if has_penalties(request.params) else None
        self._prompt = frozenset(request.prompt_ids if self._counts is not None else ())
        drawn = candidates.tokens[:, None]
        is_another = (candidates.top_ids != drawn).all(axis=1, keepdims=True)
        ids = np.concatenate([np.where(is_another, drawn, NO_TOKEN), candidates.top_ids], axis=1)
        logits = np.concatenate([candidates.logits[:, None], candidates.top_logits], axis=1)
        ids[np.isneginf(logits)] = NO_TOKEN
        with np.errstate(all="ignore"):  # a broken row has no candidates
            chances = np.exp(logits.astype(np.float64) - candidates.log_total[:, None])
        chances[ids == NO_TOKEN] = 0.0
        self._ids: list[list[int]] = ids.tolist()
        self._logits: list[list[float]] = logits.tolist()
        self._chances: list[list[float]] = chances.tolist()
        self._unseen: list[float] = np.maximum(0.0, 1.0 - chances.sum(axis=1)).tolist()
        self._noise: list[list[float]] = []
        if not request.params.is_greedy:
            first = len(request.prompt_ids) + len(history)
            keys = [noise_key(request.seed, first + place) for place in range(len(ids))]
            bits = host_random_bits_at(np.array(keys, dtype=np.int64)[:, None], ids)
            self._noise = gumbel(bits).tolist()

    def pick(self, drafted: Sequence[int], mask: Mask) -> tuple[int, float]:
        """The token that follows those drafted, and how likely it is among all that is allowed.

        -1 if none that the mask allows is known.
        """
        place, bits = len(drafted), mask.tobytes()
        ids, logits = self._ids[place], self._logits[place]
        found = [i for i, token in enumerate(ids) if token >= 0 and _has(bits, token)]
        if not found:
            return self._guess(bits)
        # the largest first, the lower id first among equals
        ranked = sorted((-self._adjust(ids[i], logits[i], drafted), ids[i], i) for i in found)
        best = ranked[0][2]
        if self._noise:
            noise, least = self._noise[place], ranked[0][0]
            heat = max(self._params.temperature, LOWEST_TEMPERATURE)
            scaled = _filter([(least - value) / heat for value, _, _ in ranked], self._params)
            kept = zip(scaled, ranked[: len(scaled)], strict=True)
            best = min((-x - noise[i], token, i) for x, (_, token, i) in kept)[2]
        return ids[best], self._confidence(place, best, found, bits)

    def _guess(self, bits: bytes) -> tuple[int, float]:
        """The allowed token that is likeliest in any row: a drafter may be off by a place."""
        rows = zip(self._ids, self._chances, strict=True)
        pairs = [pair for ids, chances in rows for pair in zip(chances, ids, strict=True)]
        allowed = [(-chance, token) for chance, token in pairs if token >= 0 and _has(bits, token)]
        return (min(allowed)[1], GUESSED) if allowed else (NO_TOKEN, 0.0)

    def _adjust(self, token: int, logit: float, drafted: Sequence[int]) -> float:
        """Bias and penalties."""
        params = self._params
        value = logit + params.logit_bias.get(token, 0.0)
        if self._counts is None:
            return value
        count, penalty = self._counts[token] + drafted.count(token), params.repetition_penalty
        if count or token in self._prompt:
            value = value / penalty if value > 0 else value * penalty
        return value - count * params.frequency_penalty - (count > 0) * params.presence_penalty

    def _confidence(self, place: int, best: int, found: list[int], bits: bytes) -> float:
        """The chance of a candidate among all that is allowed.

        Of what the row gives to tokens that are no candidates, the grammar is taken to allow as
        large a part as of the vocabulary.
        """
        chances = self._chances[place]
        share = int.from_bytes(bits, "little").bit_count() / (8 * len(bits))
        total = sum(chances[i] for i in found) + share * self._unseen[place]
        return chances[best] / total if total > 0.0 else 0.0


def _has(bits: bytes, token: int) -> int:
    return bits[token >> 3] >> (token & 7) & 1


def _filter(scaled: list[float], params: SamplingParams) -> list[float]:
    """What min-p, then top-k, then top-p leave of values that fall from 0."""
    if params.min_p > 0.0:
        least = math.log(params.min_p)
        scaled = [x for x in scaled if x >= least]
    if params.top_k > 0:
        scaled = scaled[: params.top_k]
    if params.top_p < 1.0:
        reached = list(accumulate(map(math.exp, scaled)))
        enough = params.top_p * reached[-1]
        scaled = scaled[: 1 + sum(weight < enough for weight in reached[:-1])]
    return scaled
