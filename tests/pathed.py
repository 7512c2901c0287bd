"""Rows of drafters with heads: candidates, what a head says of them, and offers by hand."""

from __future__ import annotations

import math

import numpy as np
import torch

from flashdraft.kernels.draw.arithmetic import gumbel
from flashdraft.kernels.draw.noise import host_keys_from, host_random_bits_at
from flashdraft.kernels.draw.rule import LOWEST_TEMPERATURE
from flashdraft.kernels.paths import PathScores, SlotCandidates, list_candidates
from flashdraft.kernels.tree import DOUBT
from tests.grown import Drawn


def make_paths(
    drawn: Drawn, count: int, seed: int, is_sure: bool
) -> tuple[SlotCandidates, PathScores]:
    """So many of the likeliest beside what was drawn, and what a random head says of them."""
    candidates = list_candidates(drawn.draw, count)
    generator = torch.Generator().manual_seed(seed)
    shape = *candidates.tokens.shape, candidates.tokens.shape[1]
    added = 2.0 * torch.randn(shape, generator=generator)
    sure = torch.rand(shape[:2], generator=generator) if is_sure else None
    return candidates, PathScores(added, sure)


def offers_by_hand(
    drawn: Drawn, candidates: SlotCandidates, scores: PathScores, row: int, before: int, count: int
) -> list[tuple[int, float, int]]:
    """Tokens, confidence and numbers behind one of those before a row."""
    _, settings, rows = drawn
    slot, tokens = int(rows.owner[row]), candidates.tokens[row].tolist()
    numbers = [number for number, token in enumerate(tokens) if token >= 0]
    if not numbers:
        return [(0, 0.0, 0)] * count
    is_known = before < len(tokens)
    ids = np.array([tokens[number] for number in numbers])
    logits = candidates.logits[row].numpy()[numbers]
    values = logits + (scores.added[row, before].numpy()[numbers] if is_known else np.float32(0))
    heat = np.float32(settings.temperature[slot])
    if heat > 0:
        start, position = settings.noise[slot : slot + 1].numpy(), rows.positions[row].numpy()
        noise = gumbel(host_random_bits_at(host_keys_from(start, position), ids))
        with np.errstate(over="ignore"):
            scaled = (values - values.max()) / np.maximum(heat, np.float32(LOWEST_TEMPERATURE))
        worth = ((scaled + noise) / np.float32(DOUBT)).astype(np.float64)
        weights = np.exp(worth - worth.max())
        sure = weights / weights.sum()
    else:
        worth, total = values.astype(np.float64), float(candidates.log_total[row])
        rest = max(0.0, 1.0 - np.exp(logits.astype(np.float64) - total).sum())
        weights = np.exp(worth - total)
        sure = np.minimum(weights / (weights.sum() + rest), 1.0)
    ranked = worth.copy()
    if int(settings.flags[slot]) and numbers[0] == 0:
        ranked[0] = math.inf
    order = np.argsort(-ranked, kind="stable")
    if scores.sure is not None and is_known and sure[order[0]] > 0:
        said, first = float(scores.sure[row, before]), float(sure[order[0]])
        sure = sure * min((1 - said) / max(1 - first, 1e-6), 1.0)
        sure[order[0]] = said
    found = [(int(ids[one]), float(sure[one]), numbers[one]) for one in order[:count]]
    return found + [(0, 0.0, 0)] * (count - len(found))
