"""The rule in numpy, for the CPU: it looks only at the tokens that can win.

Rows are drawn one by one; the noise of all their contenders is made together, which changes no bit
of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flashdraft.kernels.draw.arithmetic import (
    LOWEST_NOISE,
    NUM_BITS,
    WEIGHT_BITS,
    WEIGHTLESS,
    gumbel,
    weigh,
)
from flashdraft.kernels.draw.noise import host_keys_from, host_random_bits, host_random_bits_at
from flashdraft.kernels.draw.rule import (
    BIASED,
    COUNT,
    LOWEST_TEMPERATURE,
    MAX_TOP,
    NO_TOKEN,
    PENALISED,
    PROMPT,
    STOP,
    STOPS_LATE,
    Draw,
    DrawnRows,
    SlotSettings,
)

Row = NDArray[np.float32]
Ids = NDArray[np.int64]
_QUICK_CUTS = (-4.0, -8.0)  # top-p: the tokens within this of the best are usually enough
_LOWEST_FLOAT = float(np.finfo(np.float32).min)
_RARE = 2.0**-7  # see `_contenders`


class _Contest(NamedTuple):
    """The tokens of one row that can win, in the order of their ids."""

    row: int
    ids: Ids
    scaled: Row
    bits: NDArray[np.int32]


def draw(
    logits: Tensor,
    settings: SlotSettings,
    rows: DrawnRows,
    argmax: Callable[[Tensor], Tensor] = lambda x: x.argmax(-1),
) -> Draw:
    """`Kernels.draw`; `argmax` finds the first of the largest of every row, NaN above all."""
    logits = logits.float().contiguous()
    raw, num_rows = logits.numpy(), len(logits)
    likeliest = argmax(logits).numpy() if num_rows else np.zeros(0, dtype=np.int64)
    slots = _Slots(settings, rows)
    is_sound = np.isfinite(raw[np.arange(num_rows), likeliest])
    tokens = np.where(is_sound, likeliest, NO_TOKEN)
    if is_sound.all() and not (rows.totals or slots.is_special.any() or slots.are_scored.any()):
        return Draw(torch.from_numpy(tokens), *_nothing(num_rows))
    contests: list[_Contest] = []
    with np.errstate(over="ignore", invalid="ignore"):
        for number in np.flatnonzero(is_sound & slots.is_special).tolist():
            tokens[number] = NO_TOKEN
            row, best = slots.adjust(number, raw[number], int(likeliest[number]))
            if not math.isfinite(row[best]):
                continue
            tokens[number] = best
            if slots.temperature[slots.owner[number]] > 0:
                contests.append(slots.find_contenders(number, row, row[best]))
    if contests:
        noise = gumbel(np.concatenate([contest.bits for contest in contests]))
        ends = np.cumsum([len(contest.ids) for contest in contests])
        for contest, end in zip(contests, ends, strict=True):
            rivals = contest.scaled + noise[end - len(contest.ids) : end]
            tokens[contest.row] = contest.ids[rivals.argmax()]
    return _describe(logits, tokens, likeliest, is_sound, slots, rows.totals)


class _Slots:
    """Settings and rows as numpy sees them."""

    def __init__(self, settings: SlotSettings, rows: DrawnRows) -> None:
        self.owner = rows.owner.numpy()
        self.positions = rows.positions.numpy()
        columns = settings.host
        self.temperature, self.num_top = columns["temperature"], columns["num_top"]
        self._top_k, self._top_p = columns["top_k"], columns["top_p"]
        self._least, self._flags = columns["least"], columns["flags"]
        self._settings = settings
        self._rows = rows
        flags, temperature = self._flags[self.owner], self.temperature[self.owner]
        self._mask_of = np.full(len(self.owner), -1)
        if rows.mask_of is not None:
            self._mask_of = rows.mask_of.numpy()
        # rows that are not simply their likeliest token
        self.is_special = (flags != 0) | (temperature > 0) | (self._mask_of >= 0)
        self.are_scored = self.num_top[self.owner] >= 0
        self._keys: Ids | None = None  # of the noise, once it is wanted

    def adjust(self, number: int, row: Row, best: int) -> tuple[Row, int]:
        """Steps 1 to 4 of the rule, and the first of the row's largest."""
        slot = self.owner[number]
        flags, settings, masks = int(self._flags[slot]), self._settings, self._rows.masks
        mask = int(self._mask_of[number])
        if flags == 0 and mask < 0:
            return row, best
        if mask >= 0 and masks is not None:
            words = masks[mask].numpy().view(np.uint8)
            allowed = np.unpackbits(words, count=len(row), bitorder="little").view(np.bool_)
            row = np.where(allowed, row, np.float32(-math.inf))
        if flags & BIASED:
            row = row + settings.bias[slot].numpy()
        facts = settings.facts[slot].numpy()
        if flags & STOPS_LATE and self.positions[number] < int(settings.free_from[slot]):
            row = np.where(facts & STOP, np.float32(-math.inf), row)
        if flags & PENALISED:
            row = self._penalise(number, slot, row, facts)
        return row, int(row.argmax())

    def _penalise(self, number: int, slot: int, row: Row, facts: NDArray[np.int32]) -> Row:
        settings, followed, words = self._settings, self._rows.followed, self._rows.ancestors
        if followed is not None and words is not None:
            drafts = followed[slot].numpy()
            on_path = (words[number].numpy() >> np.arange(1, 1 + len(drafts))) & 1 != 0
            drafts = drafts[on_path & (drafts >= 0) & (drafts < len(row))]
            if len(drafts):
                facts = facts.copy()
                np.add.at(facts, drafts, 1)
        ids = np.flatnonzero(facts & (COUNT | PROMPT))
        counts, values = facts[ids] & COUNT, row[ids]
        repetition, presence, frequency = (
            np.float32(one[slot])
            for one in (settings.repetition, settings.presence, settings.frequency)
        )
        values = np.where(values > 0, values / repetition, values * repetition)
        values = values - counts.astype(np.float32) * frequency
        row = row.copy()
        row[ids] = np.where(counts > 0, values - presence, values)
        return row

    def find_contenders(self, number: int, row: Row, peak: np.float32) -> _Contest:
        """Steps 5 and 6, and the random bits of what is left."""
        if self._keys is None:
            starts = self._settings.host["noise"][self.owner]
            self._keys = host_keys_from(starts, self.positions)
        slot, key = self.owner[number], int(self._keys[number])
        heat = max(self.temperature[slot], np.float32(LOWEST_TEMPERATURE))
        scaled: Row = (row - peak) / heat
        top_k, top_p, least = int(self._top_k[slot]), float(self._top_p[slot]), self._least[slot]
        if top_k < len(row) or top_p < 1.0 or least > -math.inf:
            ids = _kept(scaled, top_k, top_p, float(least))
            return _Contest(number, ids, scaled[ids], host_random_bits_at(key, ids))
        bits = host_random_bits(key, len(row))
        ids = _contenders(scaled, bits)
        return _Contest(number, ids, scaled[ids], bits[ids])


def _contenders(scaled: Row, bits: NDArray[np.int32]) -> Ids:
    """Every token that can win an unfiltered draw, without the logarithms of all the others.

    The best token reaches at least LOWEST_NOISE. Whoever has both a scaled logit below `cut` and
    noise below `high` stays under that.
    """
    high = -math.log(-math.log1p(-_RARE)) + 0.01
    cut = LOWEST_NOISE - high
    return np.flatnonzero((scaled >= np.float32(cut)) | (bits < int(_RARE * 2**NUM_BITS)))


def _kept(scaled: Row, top_k: int, top_p: float, least: float) -> Ids:
    """Ids that pass min-p, then top-k, then top-p."""
    cut, total = max(_LOWEST_FLOAT, least), None
    if top_k < len(scaled):  # torch finds a few largest values much faster than numpy
        cut = max(cut, float(torch.from_numpy(scaled).topk(top_k).values[-1]))
    if cut == _LOWEST_FLOAT and top_p < 1.0:
        cut, total = _top_p_cut(scaled, top_p)
    ids = np.flatnonzero(scaled >= np.float32(cut))
    values = scaled[ids]
    if len(ids) <= top_k and top_p >= 1.0:
        return ids
    ranked = -np.sort(-values)[:top_k]
    if top_p < 1.0:
        weights = weigh(ranked)
        reached = np.cumsum(weights) - weights  # by the tokens before
        total = int(weights.sum()) if total is None else total
        ranked = ranked[reached < top_p * total]
    above, level = values > ranked[-1], values == ranked[-1]
    num_level = len(ranked) - np.count_nonzero(above)
    above[np.flatnonzero(level)[:num_level]] = True
    return ids[above]


def _top_p_cut(scaled: Row, top_p: float) -> tuple[float, int]:
    """A value such that the tokens above it reach top_p, and the weight of the whole row."""
    values = scaled[scaled >= np.float32(WEIGHTLESS)]
    weights = weigh(values)
    total = int(weights.sum())
    for cut in _QUICK_CUTS:
        if int(weights[values >= np.float32(cut)].sum()) >= top_p * total:
            return cut, total
    # All tokens below this together weigh less than what top-p may leave out.
    spare = (1.0 - top_p) * total / 2**WEIGHT_BITS / len(scaled)
    return max(math.log(spare) - 0.01, _LOWEST_FLOAT), total


def _describe(
    logits: Tensor,
    tokens: Ids,
    likeliest: Ids,
    is_sound: NDArray[np.bool_],
    slots: _Slots,
    totals: bool,
) -> Draw:
    """The drawn tokens with what is said of them."""
    raw, num_rows = logits.numpy(), len(logits)
    logit = np.full(num_rows, -math.inf, dtype=np.float32)
    log_total = np.full(num_rows, math.nan, dtype=np.float32)
    top_ids = np.full((num_rows, MAX_TOP), NO_TOKEN, dtype=np.int64)
    top_logits = np.full((num_rows, MAX_TOP), -math.inf, dtype=np.float32)
    chosen = np.flatnonzero(tokens >= 0)
    logit[chosen] = raw[chosen, tokens[chosen]]
    wanted = totals | slots.are_scored | (tokens < 0)
    for number in np.flatnonzero(is_sound & wanted):
        num_top = slots.num_top[slots.owner[number]]
        log_total[number] = _log_total(logits[number], float(raw[number, likeliest[number]]))
        if num_top > 0 and tokens[number] >= 0:
            ids = _largest(logits[number], int(num_top))
            top_ids[number, : len(ids)] = ids
            top_logits[number, : len(ids)] = raw[number, ids]
    found: list[NDArray[Any]] = [tokens, logit, log_total, top_ids, top_logits]
    return Draw(*map(torch.from_numpy, found))


_UNKNOWN, _NO_ID, _NEVER = torch.tensor(math.nan), torch.tensor(NO_TOKEN), torch.tensor(-math.inf)


def _nothing(num_rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What is said of tokens that nobody asks about."""
    unknown, shape = _UNKNOWN.expand(num_rows), (num_rows, MAX_TOP)
    return unknown, unknown, _NO_ID.expand(shape), _NEVER.expand(shape)


def _log_total(row: Tensor, peak: float) -> float:
    # torch: numpy's exp is a scalar one on some processors. One row a call: the same bits in any
    # batch.
    return peak + math.log(float((row - peak).exp_().sum(dtype=torch.float64)))


def _largest(row: Tensor, count: int) -> Ids:
    """The likeliest ids, the first of them `count`, or fewer: those that are not impossible."""
    least = float(row.topk(min(count, len(row))).values[-1])
    values = row.numpy()
    ids = np.flatnonzero(values >= np.float32(max(least, _LOWEST_FLOAT)))
    return ids[np.argsort(-values[ids], kind="stable")[:count]]
