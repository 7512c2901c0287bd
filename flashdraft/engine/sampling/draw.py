"""The draw: Gumbel-max over one row, after min-p, top-k and top-p.

Implementations of one rule. On the host, numpy looks only at the few tokens that can win; on a
device, torch looks at all of them and nothing waits for the device. Sums that decide (top-p) are
sums of integers, exact in any order. Nothing here knows of penalties, histories or requests.
"""

from __future__ import annotations

import math
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flashdraft.core import SamplingParams
from flashdraft.engine.sampling.noise import (
    LOWEST_NOISE,
    NUM_BITS,
    gumbel,
    host_gumbel,
    host_random_bits,
    host_random_bits_at,
    random_bits,
)

_WEIGHT_ONE = 2.0**40  # the most likely token's weight; a whole vocabulary sums to less than 2**63
_QUICK_CUTS = (-4.0, -8.0)  # top-p: the tokens within this of the best are usually enough
MAX_KEPT = 256  # the largest top_k that is drawn from on the device
DRAW_ROWS = 64  # rows whose noise is in memory at once
_LOWEST_TEMPERATURE = 1e-8  # below it float32 logits differ by nothing or by far too much anyway
_LOWEST_FLOAT = float(np.finfo(np.float32).min)


class Drawing(IntEnum):
    """How the tokens of a step are chosen: what the most demanding of its requests needs."""

    GREEDY = 0  # the likeliest, without writing the logits
    FREE = 1  # by noise, from the whole vocabulary
    FILTERED = 2  # by noise, from at most MAX_KEPT tokens


def draw(row: Tensor, params: SamplingParams, key: int) -> Tensor:
    """The winner of one row [vocab] of processed logits: a scalar, int64.

    Ties go to the lower id, in the filters too. Of a row without a finite maximum some id is
    returned; the caller finds out.
    """
    if row.device.type == "cpu":
        return torch.tensor(draw_on_host(row.float().numpy(), params, key))
    return draw_on_device(row, params, key)


def draw_on_device(row: Tensor, params: SamplingParams, key: int) -> Tensor:
    """The draw in torch, without waiting for the device."""
    scaled = row.float()
    scaled = (scaled - scaled.amax()) / _temperature(params)
    noise = gumbel(random_bits(key, len(scaled), scaled.device))
    if not filters(params):
        return (scaled + noise).argmax()
    if params.min_p > 0.0:
        scaled = scaled.masked_fill(scaled < math.log(params.min_p), -math.inf)
    ranked, order = scaled.sort(descending=True, stable=True)
    if 0 < params.top_k < len(scaled):
        ranked, order = ranked[: params.top_k], order[: params.top_k]
    rivals = ranked + noise[order]
    if params.top_p < 1.0:
        weights = ranked.exp().mul_(_WEIGHT_ONE).to(torch.int64)
        reached = weights.cumsum(0) - weights  # by the tokens before
        kept = reached.double() < weights.sum().double() * params.top_p
        rivals = rivals.masked_fill(~kept, -math.inf)
    return order.gather(0, rivals.argmax(0, keepdim=True))[0]  # order[scalar] would wait


class RowSettings(NamedTuple):
    """How each of many rows is drawn, [num_rows] each. A temperature of 0 takes the likeliest."""

    temperature: Tensor  # float32
    top_k: Tensor  # int64; no limit is the vocabulary's size
    top_p: Tensor  # float64
    least: Tensor  # float32: the logarithm of min_p, -inf for none
    key: Tensor  # int64

    @classmethod
    def columns(cls, params: SamplingParams, vocab_size: int) -> tuple[float, int, float, float]:
        """A request's own values of the first four."""
        top_k = params.top_k if 0 < params.top_k < vocab_size else vocab_size
        least = math.log(params.min_p) if params.min_p > 0.0 else -math.inf
        return params.temperature, top_k, params.top_p, least


def draw_rows(logits: Tensor, settings: RowSettings, max_kept: int | None) -> Tensor:
    """The winner of every row [num_rows, vocab], or -1 where there is none; as `draw_on_device`.

    `max_kept` bounds the top_k of every row that filters; None = no row does.
    """
    parts = [
        _draw_part(
            logits[first : first + DRAW_ROWS],
            RowSettings(*(one[first : first + DRAW_ROWS] for one in settings)),
            max_kept,
        )
        for first in range(0, len(logits), DRAW_ROWS)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _draw_part(logits: Tensor, settings: RowSettings, max_kept: int | None) -> Tensor:
    peaks, likeliest = logits.max(1)
    heat = settings.temperature.clamp(min=_LOWEST_TEMPERATURE).unsqueeze(1)
    scaled = (logits - peaks.unsqueeze(1)) / heat
    noise = gumbel(random_bits(settings.key.unsqueeze(1), logits.shape[1], logits.device))
    drawn = (scaled + noise).argmax(1)
    if max_kept is not None:
        scaled = scaled.masked_fill(scaled < settings.least.unsqueeze(1), -math.inf)
        ranked, order = _largest(scaled, max_kept)
        place = torch.arange(ranked.shape[1], device=logits.device)
        kept = place < settings.top_k.unsqueeze(1)
        weights = ranked.exp().mul_(_WEIGHT_ONE).to(torch.int64).masked_fill(~kept, 0)
        reached = (weights.cumsum(1) - weights).double()  # by the tokens before
        share = weights.sum(1, keepdim=True).double() * settings.top_p.unsqueeze(1)
        kept = kept & ((reached < share) | (settings.top_p.unsqueeze(1) >= 1.0))
        rivals = (ranked + noise.gather(1, order)).masked_fill(~kept, -math.inf)
        winner = order.gather(1, rivals.argmax(1, keepdim=True)).squeeze(1)
        drawn = torch.where(settings.top_k > max_kept, drawn, winner)
    drawn = torch.where(settings.temperature > 0, drawn, likeliest)
    return torch.where(peaks.isfinite(), drawn, -1)


def _largest(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The largest values of every row in order, and their columns; the first of equals first."""
    bits = (values + 0.0).view(torch.int32).to(torch.int64)  # + 0.0: there is one zero
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)  # as the values are
    columns = torch.arange(values.shape[1], device=values.device)
    tagged = (ordered << 32) | (values.shape[1] - 1 - columns)
    best = tagged.topk(min(count, values.shape[1]), dim=1).values
    order = values.shape[1] - 1 - (best & 0xFFFFFFFF)
    return values.gather(1, order), order


def draw_on_host(row: NDArray[np.float32], params: SamplingParams, key: int) -> int:
    """The draw in numpy."""
    peak = row.max()
    if not math.isfinite(peak):
        return 0
    # With the maximum at 0 no quotient overflows upwards; downwards is as good as masked.
    with np.errstate(over="ignore"):
        scaled = (row - peak) / np.float32(_temperature(params))
    if filters(params):
        ids = _kept(scaled, params)
        bits = host_random_bits_at(key, ids)
    else:
        bits = host_random_bits(key, len(scaled))
        ids = _contenders(scaled, bits)
        bits = bits[ids]
    return int(ids[np.argmax(scaled[ids] + host_gumbel(bits))])


def _temperature(params: SamplingParams) -> float:
    return max(params.temperature, _LOWEST_TEMPERATURE)


def filters(params: SamplingParams) -> bool:
    """Whether some tokens are left out before the draw."""
    return params.top_p < 1.0 or params.top_k > 0 or params.min_p > 0.0


def _contenders(scaled: NDArray[np.float32], bits: NDArray[np.int32]) -> NDArray[np.int64]:
    """Every token that can win an unfiltered draw, without the logarithms of all the others.

    The best token reaches at least LOWEST_NOISE. Whoever has both a scaled logit below `cut` and
    noise below `high` stays under that.
    """
    rare = 2.0**-7
    high = -math.log(-math.log1p(-rare)) + 0.01
    cut = LOWEST_NOISE - high
    return np.flatnonzero((scaled >= np.float32(cut)) | (bits < int(rare * 2**NUM_BITS)))


def _kept(scaled: NDArray[np.float32], params: SamplingParams) -> NDArray[np.int64]:
    """Ids that pass min-p, then top-k, then top-p."""
    top_k = params.top_k if 0 < params.top_k < len(scaled) else len(scaled)
    cut, total = _LOWEST_FLOAT, None
    if params.min_p > 0.0:
        cut = max(cut, math.log(params.min_p))
    if top_k < len(scaled):  # torch finds a few largest values much faster than numpy
        cut = max(cut, float(torch.from_numpy(scaled).topk(top_k).values[-1]))
    if cut == _LOWEST_FLOAT and params.top_p < 1.0:
        cut, total = _top_p_cut(scaled, params.top_p)
    ids = np.flatnonzero(scaled >= np.float32(cut))
    values = scaled[ids]
    if len(ids) <= top_k and params.top_p == 1.0:
        return ids
    ranked = -np.sort(-values)[:top_k]
    if params.top_p < 1.0:
        weights = _weigh(ranked)
        reached = np.cumsum(weights) - weights  # by the tokens before
        total = int(weights.sum()) if total is None else total
        ranked = ranked[reached < params.top_p * total]
    above, level = values > ranked[-1], values == ranked[-1]
    num_level = len(ranked) - np.count_nonzero(above)
    above[np.flatnonzero(level)[:num_level]] = True
    return ids[above]


def _top_p_cut(scaled: NDArray[np.float32], top_p: float) -> tuple[float, int]:
    """A value such that the tokens above it reach top_p, and the weight of the whole row."""
    weights = _weigh(scaled)
    total = int(weights.sum())
    for cut in _QUICK_CUTS:
        if int(weights[scaled >= np.float32(cut)].sum()) >= top_p * total:
            return cut, total
    # All tokens below this together weigh less than what top-p may leave out.
    spare = (1.0 - top_p) * total / _WEIGHT_ONE / len(scaled)
    return max(math.log(spare) - 0.01, _LOWEST_FLOAT), total


def _weigh(scaled: NDArray[np.float32]) -> NDArray[np.int64]:
    """Probabilities relative to the best token's as integers, whose sums are exact."""
    return (np.exp(scaled) * np.float32(_WEIGHT_ONE)).astype(np.int64)
