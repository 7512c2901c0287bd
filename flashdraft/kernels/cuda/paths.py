# Triton's decorators carry no types that mypy can see.
# mypy: disallow-untyped-decorators=False
"""Paths through a block's slots (kernels/paths.py), as two launches.

Candidates are put in order by a program for each row and each of those that may stand before it; a
chain is followed by a program for each slot.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashdraft.kernels import paths as rule
from flashdraft.kernels.cuda.draw.arithmetic import UNFUSED, gumbel, noise_key, random_bits
from flashdraft.kernels.draw.rule import LOWEST_TEMPERATURE, DrawnRows, SlotSettings
from flashdraft.kernels.paths import PathOffers, PathScores, SlotCandidates
from flashdraft.kernels.tree import DOUBT as _DOUBT

DOUBT = tl.constexpr(_DOUBT)
COLDEST = tl.constexpr(LOWEST_TEMPERATURE)
LEAST_LEFT = tl.constexpr(rule.LEAST_LEFT)
LEAST_LANES = 16  # fewer take as long, and would be compiled apart


def offer_paths(
    candidates: SlotCandidates,
    scores: PathScores,
    settings: SlotSettings,
    rows: DrawnRows,
    count: int,
) -> PathOffers:
    """`Kernels.offer_paths`."""
    num_rows, num_candidates = candidates.tokens.shape
    device, num_before = candidates.tokens.device, num_candidates + 1
    added, sure = scores
    assert count <= num_candidates and added.shape[1:] == (num_candidates, num_candidates)
    assert all(one.is_contiguous() for one in (*candidates, added))
    shape = num_rows, num_before, count
    offers = PathOffers(
        torch.empty(shape, dtype=torch.int64, device=device),
        torch.empty(shape, dtype=torch.float32, device=device),
        torch.empty(shape, dtype=torch.int64, device=device),
    )
    told = settings.temperature, settings.noise, settings.flags, rows.owner, rows.positions
    _offer_paths[(num_rows, num_before)](
        candidates,
        added,
        candidates.logits if sure is None else sure.contiguous(),
        *told,
        offers,
        num_candidates,
        count,
        IS_SURE=sure is not None,
        LANES=max(LEAST_LANES, triton.next_power_of_2(num_candidates)),
        num_warps=1,
        **UNFUSED,
    )
    return offers


@triton.jit(do_not_specialize=["num_candidates", "count"])
def _offer_paths(
    candidates: SlotCandidates,
    added: tl.tensor,
    said: tl.tensor,
    temperature: tl.tensor,
    noise: tl.tensor,
    flags: tl.tensor,
    owner: tl.tensor,
    positions: tl.tensor,
    offers: PathOffers,
    num_candidates: tl.tensor,
    count: tl.tensor,
    IS_SURE: tl.constexpr,
    LANES: tl.constexpr,
) -> None:
    row, before, place = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, LANES)
    slot, is_lane = tl.load(owner + row), place < num_candidates
    is_known = before + place * 0 < num_candidates
    own = row * num_candidates + place
    ids = tl.load(candidates.tokens + own, mask=is_lane, other=-1)
    there = ids >= 0
    logits = tl.load(candidates.logits + own, mask=there, other=float("-inf"))
    cell = (row * num_candidates + before) * num_candidates + place
    gain = tl.load(added + cell, mask=there & is_known, other=0.0)
    is_number = (gain > float("-inf")) & (gain < float("inf"))
    values = logits + tl.where(is_number, gain, 0.0)
    peak = tl.max(values, 0)
    heat = tl.load(temperature + slot)
    key = noise_key(tl.load(noise + slot), tl.load(positions + row))
    scaled = tl.div_rn(values - peak, tl.maximum(heat, COLDEST))
    drawn_by = tl.div_rn(scaled + gumbel(random_bits(key, ids.to(tl.int32))), DOUBT)
    best = tl.max(tl.where(there, drawn_by, float("-inf")), 0)
    shares = tl.where(there, tl.exp(drawn_by - best), 0.0)
    shares = tl.div_rn(shares, tl.sum(shares, 0))
    chances = _chances(values, peak, logits, tl.load(candidates.log_total + row), there)
    sure = tl.where(heat > 0, shares, chances)
    sure = tl.where((sure >= 0.0) & (sure < float("inf")), tl.minimum(sure, 1.0), 0.0)
    worth = tl.where(heat > 0, drawn_by, values)
    is_changed = tl.load(flags + slot) != 0
    worth = tl.where((place == 0) & is_changed, float("inf"), worth)
    # everybody goes behind those that are better
    other = tl.where(there, worth, float("-inf"))[None, :]
    is_equal_before = (other == worth[:, None]) & (place[None, :] < place[:, None])
    is_before = ((other > worth[:, None]) | is_equal_before) & there[None, :]
    rank = tl.sum(is_before.to(tl.int32), 1)
    if IS_SURE:
        first = tl.sum(tl.where(there & (rank == 0), sure, 0.0), 0)
        opinion = tl.load(said + row * num_candidates + tl.minimum(before, num_candidates - 1))
        is_said = (before < num_candidates) & (first > 0.0) & (opinion >= 0.0)
        opinion = tl.where(is_said, opinion, first)
        left = tl.div_rn(1.0 - opinion, tl.maximum(1.0 - first, LEAST_LEFT))
        sure = tl.where(rank == 0, opinion, sure * tl.minimum(left, 1.0))
    start = (row * (num_candidates + 1) + before) * count
    is_told = there & (rank < count)
    tl.store(offers.tokens + start + rank, ids, mask=is_told)
    tl.store(offers.confidence + start + rank, sure, mask=is_told)
    tl.store(offers.numbers + start + rank, place.to(tl.int64), mask=is_told)
    is_spare = (place >= tl.sum(there.to(tl.int32), 0)) & (place < count)
    tl.store(offers.tokens + start + place, tl.zeros_like(ids), mask=is_spare)
    tl.store(offers.confidence + start + place, tl.zeros_like(sure), mask=is_spare)
    tl.store(offers.numbers + start + place, tl.zeros_like(ids), mask=is_spare)


@triton.jit
def _chances(
    values: tl.tensor, peak: tl.tensor, logits: tl.tensor, total: tl.tensor, there: tl.tensor
) -> tl.tensor:
    """Chances of candidates of which some got likelier, the rest of the vocabulary none."""
    top = tl.maximum(peak, total)
    rest = tl.maximum(1.0 - tl.sum(tl.where(there, tl.exp(logits - total), 0.0), 0), 0.0)
    weights = tl.where(there, tl.exp(values - top), 0.0)
    return tl.div_rn(weights, tl.sum(weights, 0) + rest * tl.exp(total - top))


def follow(offers: PathOffers, width: int) -> tuple[Tensor, Tensor]:
    """`Kernels.follow`."""
    num_rows, num_before, count = offers.tokens.shape
    num_slots = num_rows // width
    tokens = torch.empty(num_slots, width, dtype=torch.int64, device=offers.tokens.device)
    confidence = torch.empty_like(tokens, dtype=torch.float32)
    sizes = width, num_before, count
    _follow[(num_slots,)](offers, tokens, confidence, *sizes, num_warps=1)
    return tokens, confidence


@triton.jit(do_not_specialize=["width", "num_before", "count"])
def _follow(
    offers: PathOffers,
    tokens: tl.tensor,
    confidence: tl.tensor,
    width: tl.tensor,
    num_before: tl.tensor,
    count: tl.tensor,
) -> None:
    row = tl.program_id(0).to(tl.int64) * width
    before = row * 0  # the anchor, of which every list says the same
    for _ in range(width):
        first = (row * num_before + before) * count
        tl.store(tokens + row, tl.load(offers.tokens + first))
        tl.store(confidence + row, tl.load(offers.confidence + first))
        before = tl.load(offers.numbers + first)
        row += 1
