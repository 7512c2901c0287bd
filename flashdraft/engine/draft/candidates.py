"""What a drafter's rows offer one request, and which of it the request's own draw would choose.

The device draws from the drafter's rows and knows no grammar; beside the token that it drew it
tells the likeliest ones of every row. Here they are put in order, as they are or as far as a mask
allows them: by chance for a greedy request, by the noise of their positions for a sampled one. No
torch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flashdraft.core import Request, SamplingParams
from flashdraft.engine.sampling.grammar import Mask
from flashdraft.kernels.draw.arithmetic import gumbel
from flashdraft.kernels.draw.noise import host_random_bits_at, noise_key
from flashdraft.kernels.draw.rule import LOWEST_TEMPERATURE, NO_TOKEN, has_penalties
from flashdraft.kernels.tree import DOUBT

GUESSED = 0.05  # confidence in a token that its own row does not offer

Ids = NDArray[np.int64]
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Candidates:
    """What a drafter's rows offer one request; all logits are raw."""

    tokens: Ids  # [width]: drawn as if there were no grammar; -1 = nobody says which
    logits: Floats  # [width]: theirs; -inf = none was drawn
    log_total: Floats  # [width]: the logarithm of the sum of exp(logit) over the row
    top_ids: Ids  # [width, n]: the likeliest; -1 where there are fewer
    top_logits: Floats  # [width, n]

    def first(self, depth: int) -> Candidates:
        """Those of the first places."""
        tokens, top_ids = self.tokens[:depth], self.top_ids[:depth]
        logits, log_total = self.logits[:depth], self.log_total[:depth]
        return Candidates(tokens, logits, log_total, top_ids, self.top_logits[:depth])

    @property
    def undrawn(self) -> Candidates:
        """The likeliest alone, where what was drawn is not at hand."""
        none = np.full_like(self.tokens, NO_TOKEN)
        lowest = np.full_like(self.logits, -np.inf)
        return Candidates(none, lowest, self.log_total, self.top_ids, self.top_logits)


class Option(NamedTuple):
    """A token that may come next, and how sure the drafter is of it."""

    token: int
    confidence: float


class Ranking:
    """Chooses from candidates by the rule of kernels/draw, with the target's own noise.

    It is the rule as long as every token that counts is a candidate. Of what is allowed but is
    none, it knows nothing: top-p takes the candidates for all there is, noise lifts no token from
    behind them, nor a bias one that was not drawn.
    """

    def __init__(
        self, request: Request, history: Sequence[int], candidates: Candidates, most: int
    ) -> None:
        """`most` options of a place; if it is but one, its confidence knows no noise."""
        self.depth = len(candidates.tokens)
        self._request, self._params, self._most = request, request.params, most
        self._counts = Counter(history) if has_penalties(request.params) else None
        self._prompt = frozenset(request.prompt_ids if self._counts is not None else ())
        self._first = len(request.prompt_ids) + len(history)  # the first place's position
        self._candidates = candidates
        is_drawn = np.isfinite(candidates.logits)
        with np.errstate(all="ignore"):  # a broken row has no total
            chances = np.exp(candidates.logits - candidates.log_total)
        self._drawn: list[int] = np.where(is_drawn, candidates.tokens, NO_TOKEN).tolist()
        self._sure: list[float] = chances.tolist()

    def offered(self, place: int) -> list[Option]:
        """What may come whatever a grammar says: what was drawn, and the best of the others.

        Among fewer tokens the draw would still choose the one that it chose among all, unless
        filters have let others in: that is put up with, for it takes no mask, and the target
        waits. Penalties are another matter: they know the tokens drafted before. Then, and where
        nothing was drawn, nothing may.
        """
        drawn = self._drawn[place]
        if self._counts is not None:
            return []
        if self._most == 1:
            return [] if drawn == NO_TOKEN else [Option(drawn, self._sure[place])]
        ids, logits = self._table.ids[place], self._table.logits[place]
        values = {i: logits[i] for i, token in enumerate(ids) if token != NO_TOKEN}
        best = next((i for i in values if ids[i] == drawn), None)
        return self._order(place, values, best, 1.0)

    def within(self, mask: Mask, drafted: Sequence[int]) -> list[Option]:
        """Behind the tokens drafted, the best first, of those that the mask allows.

        The first is the rule's own choice. Where the place has none, it is one of another place;
        where no place has any, there are none.
        """
        place, bits = len(drafted), mask.tobytes()
        ids, logits = self._table.ids[place], self._table.logits[place]
        found = [i for i, token in enumerate(ids) if token >= 0 and _has(bits, token)]
        if not found:
            return self._guess(bits)
        values = {i: self._adjust(ids[i], logits[i], drafted) for i in found}
        chances = self._table.chances[place]
        # of what the row gives to tokens that are no candidates, the grammar is taken to allow as
        # large a part as of the vocabulary
        share = int.from_bytes(bits, "little").bit_count() / (8 * len(bits))
        total = sum(chances[i] for i in found) + share * self._table.unseen[place]
        return self._order(place, values, self._pick(place, values), total)

    def _order(
        self, place: int, values: Mapping[int, float], best: int | None, total: float
    ) -> list[Option]:
        """The best one and then the others, of logits by number; their chances sum to `total`."""
        ids, chances = self._table.ids[place], self._table.chances[place]
        sure = {i: chances[i] / total if total > 0.0 else 0.0 for i in values}
        if self._most == 1:
            assert best is not None, "one of a place's candidates is chosen"
            return [Option(ids[best], sure[best])]
        worth = dict(values)
        if not self._params.is_greedy and values:
            peak, heat, noise = max(values.values()), self._heat, self._noise[place]
            worth = {i: ((value - peak) / heat + noise[i]) / DOUBT for i, value in values.items()}
            highest = max(worth.values())
            shares = {i: math.exp(score - highest) for i, score in worth.items()}
            sum_of_all = sum(shares.values())
            sure = {i: share / sum_of_all for i, share in shares.items()}
        order = sorted(values, key=lambda i: (i != best, -worth[i], ids[i]))
        return [Option(ids[i], sure[i]) for i in order[: self._most]]

    def _pick(self, place: int, values: Mapping[int, float]) -> int:
        """What the draw chooses; the largest first, the lower id first among equals."""
        ids = self._table.ids[place]
        ranked = sorted((-value, ids[i], i) for i, value in values.items())
        if self._params.is_greedy:
            return ranked[0][2]
        noise, least = self._noise[place], ranked[0][0]
        scaled = _filter([(least - value) / self._heat for value, _, _ in ranked], self._params)
        kept = zip(scaled, ranked[: len(scaled)], strict=True)
        return min((-x - noise[i], token, i) for x, (_, token, i) in kept)[2]

    def _guess(self, bits: bytes) -> list[Option]:
        """The allowed token that is likeliest in any row: a drafter may be off by a place."""
        rows = zip(self._table.ids, self._table.chances, strict=True)
        pairs = [pair for ids, chances in rows for pair in zip(chances, ids, strict=True)]
        allowed = [(-chance, token) for chance, token in pairs if token >= 0 and _has(bits, token)]
        return [Option(min(allowed)[1], GUESSED)] if allowed else []

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

    @property
    def _heat(self) -> float:
        return max(self._params.temperature, LOWEST_TEMPERATURE)

    @cached_property
    def _table(self) -> _Table:
        return _Table.of(self._candidates)

    @cached_property
    def _noise(self) -> list[list[float]]:
        """Of every candidate, as the target's draw has it there."""
        ids, seed = np.asarray(self._table.ids, dtype=np.int64), self._request.seed
        keys = [noise_key(seed, self._first + place) for place in range(len(ids))]
        bits = host_random_bits_at(np.array(keys, dtype=np.int64)[:, None], ids)
        return list(gumbel(bits).tolist())


class _Table(NamedTuple):
    """Candidates by place: a drawn one that is not among the likeliest, and those."""

    ids: list[list[int]]  # -1 = there is none
    logits: list[list[float]]
    chances: list[list[float]]
    unseen: list[float]  # what a row gives to all others

    @classmethod
    def of(cls, candidates: Candidates) -> _Table:
        drawn = candidates.tokens[:, None]
        is_another = (candidates.top_ids != drawn).all(axis=1, keepdims=True)
        ids = np.concatenate([np.where(is_another, drawn, NO_TOKEN), candidates.top_ids], axis=1)
        logits = np.concatenate([candidates.logits[:, None], candidates.top_logits], axis=1)
        ids[np.isneginf(logits)] = NO_TOKEN
        with np.errstate(all="ignore"):  # a broken row has no candidates
            chances = np.exp(logits.astype(np.float64) - candidates.log_total[:, None])
        chances[ids == NO_TOKEN] = 0.0
        unseen = np.maximum(0.0, 1.0 - chances.sum(axis=1))
        return cls(ids.tolist(), logits.tolist(), chances.tolist(), unseen.tolist())


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
