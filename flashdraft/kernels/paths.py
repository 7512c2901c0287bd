"""Paths through a block's slots: candidates scored by what comes before them, and chains of them.

A drafter's head says what every candidate of a slot gains behind every candidate of the slot before
(`PathScores`). From that come, for each of those that may stand before, the candidates in order of
what they are worth there: a chain follows the first of each, a tree (tree.py) takes the others as
well. One rule, told here in tensors; a device may have it as kernels of its own
(`Kernels.offer_paths`, `Kernels.follow`). Nothing here waits for the device.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from flashdraft.kernels.draw.arithmetic import gumbel
from flashdraft.kernels.draw.noise import keys_from, random_bits_at
from flashdraft.kernels.draw.rule import LOWEST_TEMPERATURE, Draw, DrawnRows, SlotSettings
from flashdraft.kernels.tree import DOUBT, put_in_order, rank

LEAST_LEFT = 1e-6  # of a chance, to be shared


class SlotCandidates(NamedTuple):
    """What may stand in slots: what was drawn there, and the likeliest beside it."""

    tokens: Tensor  # [rows, count] int64; -1 = there is none
    logits: Tensor  # [rows, count] float32, raw; -inf where there is none
    log_total: Tensor  # [rows] float32: as a draw tells it


class PathScores(NamedTuple):
    """What a head says of slots, and of candidates behind candidates."""

    added: Tensor  # [rows, before, candidates] float32: to a candidate's logit, behind another
    # [rows, before] float32: that the target agrees with the best one; None where no head says so
    sure: Tensor | None


class PathOffers(NamedTuple):
    """Candidates for every row, behind each candidate before it, those worth most first.

    The last of those before is any token that is no candidate: what follows it is not scored.
    """

    tokens: Tensor  # [rows, before + 1, count] int64; 0 where there is none
    confidence: Tensor  # [rows, before + 1, count] float32; 0 where there is none
    numbers: Tensor  # [rows, before + 1, count] int64: their own among the candidates


def list_candidates(drawn: Draw, count: int) -> SlotCandidates:
    """What was drawn of a drafter's rows, and so many of the likeliest, from which it may be."""
    tokens = drawn.tokens.unsqueeze(1)
    likeliest = drawn.top_ids[:, :count]
    ids = torch.cat([tokens, likeliest.masked_fill(likeliest == tokens, -1)], dim=1)
    ids = ids.masked_fill(tokens < 0, -1)
    logits = torch.cat([drawn.logit.unsqueeze(1), drawn.top_logits[:, :count]], dim=1)
    return SlotCandidates(ids, logits.masked_fill(ids < 0, -math.inf), drawn.log_total)


def offer_paths(
    candidates: SlotCandidates,
    scores: PathScores,
    settings: SlotSettings,
    rows: DrawnRows,
    count: int,
) -> PathOffers:
    """`Kernels.offer_paths`.

    A greedy slot's candidate is worth its logit and what the head adds. Its confidence is its
    chance if the head spoke of no other token than candidates: what the rest had, it keeps. A
    sampled slot's is worth what the draw goes by, noise and all, and its confidence is its share of
    that. Where a request's settings change logits, the head does not know how: what was drawn is
    first. Where a head says how sure it is, that is the first one's confidence; the others share
    what is left. What is no number of a head's says nothing.
    """
    ids, logits, log_total = candidates
    added = torch.where(scores.added.isfinite(), scores.added, 0.0)
    added = F.pad(added, (0, 0, 0, 1))  # a row for those who are no candidates
    is_there = (ids >= 0).unsqueeze(1).expand_as(added)
    values = torch.where(is_there, logits.unsqueeze(1) + added, -math.inf)
    peak = values.amax(2, keepdim=True)
    heat = settings.temperature[rows.owner].view(-1, 1, 1)
    keys = keys_from(settings.noise[rows.owner], rows.positions).unsqueeze(1)
    noise = gumbel(random_bits_at(keys, ids)).unsqueeze(1)
    drawn_by = ((values - peak) / heat.clamp(min=LOWEST_TEMPERATURE) + noise) / DOUBT
    shares = drawn_by.masked_fill(~is_there, -math.inf).softmax(2)
    confidence = torch.where(heat > 0, shares, _chances(values, peak, logits, log_total))
    confidence = torch.where(confidence.isfinite(), confidence, 0.0).clamp(max=1.0)
    worth = torch.where(heat > 0, drawn_by, values)
    is_changed = (settings.flags[rows.owner] != 0).unsqueeze(1)
    worth[:, :, 0] = torch.where(is_changed, math.inf, worth[:, :, 0])
    places = rank(worth.flatten(0, 1), is_there.flatten(0, 1))
    number = torch.arange(ids.shape[1], device=ids.device)
    found = [
        put_in_order(one.expand_as(added).flatten(0, 1), places)[:, :count]
        for one in (ids.unsqueeze(1), confidence, number)
    ]
    tokens, confidence, numbers = (one.contiguous().view(*added.shape[:2], count) for one in found)
    if scores.sure is not None:
        confidence = _be_sure(confidence, F.pad(scores.sure, (0, 1)))
    return PathOffers(tokens, confidence, numbers)


def _chances(values: Tensor, peak: Tensor, logits: Tensor, log_total: Tensor) -> Tensor:
    """Chances of candidates of which some got likelier, the rest of the vocabulary none."""
    total = log_total.view(-1, 1, 1)
    top = torch.maximum(peak, total)
    rest = (1.0 - (logits - log_total.unsqueeze(1)).exp().sum(1)).clamp(min=0.0).view(-1, 1, 1)
    weights = (values - top).exp()
    return weights / (weights.sum(2, keepdim=True) + rest * (total - top).exp())


def _be_sure(confidence: Tensor, sure: Tensor) -> Tensor:
    """The first one's confidence as a head has it; behind the last one before it has no say."""
    first = confidence[..., :1]
    is_said = torch.ones_like(sure, dtype=torch.bool)
    is_said[:, -1] = False
    is_said &= (sure >= 0) & (first.squeeze(2) > 0)
    said = torch.where(is_said, sure, first.squeeze(2)).unsqueeze(2)
    left = ((1.0 - said) / (1.0 - first).clamp(min=LEAST_LEFT)).clamp(max=1.0)
    return torch.cat([said, confidence[..., 1:] * left], dim=2)


def follow(offers: PathOffers, width: int) -> tuple[Tensor, Tensor]:
    """`Kernels.follow`."""
    # [slots, width, before + 1]
    tokens, confidence, numbers = (one[..., 0].view(-1, width, one.shape[1]) for one in offers)
    before = numbers.new_zeros(len(numbers), 1)  # the anchor, of which every row says the same
    chain: list[tuple[Tensor, Tensor]] = []
    for place in range(width):
        chain.append((tokens[:, place].gather(1, before), confidence[:, place].gather(1, before)))
        before = numbers[:, place].gather(1, before)
    ids, sure = (torch.cat(one, dim=1) for one in zip(*chain, strict=True))
    return ids, sure
