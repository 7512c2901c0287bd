"""The rule in plain torch: against today's sampler, softmax and the book."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from flashdraft.core import SamplingParams
from flashdraft.kernels.draw import host, reference
from flashdraft.kernels.draw.arithmetic import gumbel
from flashdraft.kernels.draw.noise import noise_key, random_bits
from flashdraft.kernels.draw.rule import DrawnRows, SlotRequest, SlotSettings
from tests.drawn import CPU, assert_equal, make_rows, pack_masks


def by_the_book(row: torch.Tensor, request: SlotRequest, history: list[int]) -> torch.Tensor:
    """Bias, min_tokens and penalties, one token after the other, in float32 as the rule is."""
    params, x = request.params, row.clone()
    inside = range(len(row))
    for token, bias in params.logit_bias.items():
        x[token] += bias
    if len(history) < params.min_tokens:
        for token in set(request.stop_ids) & set(inside):
            x[token] = -math.inf
    for token in set(inside) & ({*request.prompt_ids} | {*history}):
        if params.repetition_penalty != 1.0:
            penalty = torch.tensor(params.repetition_penalty)
            x[token] = x[token] / penalty if x[token] > 0 else x[token] * penalty
    for token in set(inside) & {*history}:
        x[token] -= torch.tensor(float(history.count(token))) * params.frequency_penalty
        x[token] -= params.presence_penalty
    return x


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("depth", [None, 2])
def test_adjusts_by_the_book(seed: int, depth: int | None) -> None:
    batch = make_rows(seed, 257, rows_each=4, depth=depth)
    adjusted = reference.adjust(batch.logits, batch.settings, batch.rows)
    for row, logits in enumerate(batch.logits):
        request = batch.requests[int(batch.rows.owner[row])]
        expected = by_the_book(logits, request, batch.history(row))
        torch.testing.assert_close(adjusted[row], expected, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_rows_share_masks_and_some_have_none() -> None:
    batch = make_rows(0, 77, num_slots=3)
    allowed = np.random.default_rng(0).random((2, 77)) < 0.5
    mask_of = torch.tensor([1, -1, 0, 1, -1, 1])
    rows = replace(batch.rows, masks=pack_masks(allowed), mask_of=mask_of)
    free = torch.where(mask_of.unsqueeze(1) < 0, True, torch.from_numpy(allowed)[mask_of])
    masked = batch.logits.masked_fill(~free, -math.inf)
    found = reference.adjust(batch.logits, batch.settings, rows)
    assert torch.equal(found, reference.adjust(masked, batch.settings, batch.rows))


@pytest.mark.parametrize("implementation", [host.draw, reference.draw])
def test_a_table_that_no_row_looks_into_changes_nothing(implementation: Any) -> None:
    batch = make_rows(1, 77)
    none = torch.full_like(batch.rows.owner, -1)
    rows = replace(batch.rows, masks=torch.zeros(1, 3, dtype=torch.int32), mask_of=none)
    found = implementation(batch.logits, batch.settings, rows)
    assert_equal(found, implementation(batch.logits, batch.settings, batch.rows))


@pytest.mark.parametrize("seed", range(6))
def test_draws_the_largest_of_what_the_filters_leave(seed: int) -> None:
    batch = make_rows(100 + seed, 1003, rows_each=4)
    drawn = reference.draw(batch.logits, batch.settings, batch.rows)
    for row, logits in enumerate(batch.logits):
        request = batch.requests[int(batch.rows.owner[row])]
        adjusted = reference.adjust(*batch.alone(row).drawable)[0]
        token, params = int(drawn.tokens[row]), request.params
        sound = bool(logits.max().isfinite() and adjusted.max().isfinite())
        assert (token >= 0) == sound
        if sound and params.is_greedy:
            assert token == int(adjusted.argmax())
        elif sound:
            warm = replace(params, temperature=max(params.temperature, 1e-8))
            p = torch.tensor(chances(adjusted.tolist(), warm))
            key = noise_key(request.seed, int(batch.rows.positions[row]))
            scaled = (adjusted - adjusted.max()) / max(params.temperature, 1e-8)
            rivals = scaled + gumbel(random_bits(key, 1003, CPU))
            best = rivals.masked_fill(p == 0.0, -math.inf).max()
            # within rounding of the best, and let through, or at the very edge of a filter
            assert p[token] > 0.0 or params.top_p < 1.0 or params.min_p > 0.0
            assert rivals[token] >= best - 1e-3 * max(1.0, float(best.abs()))


def chances(row: list[float], params: SamplingParams) -> list[float]:
    """What the draw should follow, by the book: temperature, min-p, top-k, top-p."""
    peak = max(row)
    p = [math.exp((x - peak) / params.temperature) for x in row]
    p = [x if x >= params.min_p * max(p) else 0.0 for x in p]
    order = sorted(range(len(p)), key=lambda i: (-p[i], i))
    if params.top_k:
        for i in order[params.top_k :]:
            p[i] = 0.0
    total, reached = sum(p), 0.0
    for i in order:
        if reached >= params.top_p * total:
            p[i] = 0.0
        reached += p[i]
    return [x / sum(p) for x in p]


@pytest.mark.parametrize(
    "setting",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.0, "top_p": 0.8},
        {"top_k": 3},
        {"min_p": 0.15},
        {"top_p": 0.7, "top_k": 5, "min_p": 0.02},
    ],
)
def test_draws_follow_the_exact_distribution(setting: dict[str, Any]) -> None:
    params = SamplingParams(**({"temperature": 1.0} | setting))
    row, num_draws, num_seeds = [1.1, -0.4, 2.0, 0.3, 1.9, -2.0, 0.9, 1.0], 40_000, 50
    settings = SlotSettings.allocate(num_seeds, len(row), CPU)
    settings.set({seed: SlotRequest(params, seed, []) for seed in range(num_seeds)})
    number = torch.arange(num_draws)
    rows = DrawnRows(number % num_seeds, number // num_seeds)
    drawn = reference.draw(torch.tensor(row).expand(num_draws, -1), settings, rows).tokens
    counts = np.bincount(drawn.numpy(), minlength=len(row))
    expected = np.array(chances(row, params)) * num_draws
    possible = expected > 0
    assert not counts[~possible].any()
    statistic = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    degrees = int(possible.sum()) - 1
    assert statistic < degrees + 4.5 * math.sqrt(2 * degrees)


@pytest.mark.parametrize(
    ("setting", "kept"),
    [
        ({"top_k": 2}, {0, 2}),  # of the three equal second bests the first
        ({"top_k": 100}, {0, 1, 2, 3, 4}),
        ({"top_p": 1e-9}, {2}),
        ({"top_p": 0.5}, {0, 2}),
        ({"min_p": 1.0}, {2}),
        ({"min_p": 0.5}, {0, 2, 3, 4}),
        ({"top_k": 3, "top_p": 0.74}, {0, 2}),
    ],
)
def test_filters_break_ties_by_the_lower_id(setting: dict[str, Any], kept: set[int]) -> None:
    logits = torch.log(torch.tensor([2.0, 1.0, 4.0, 2.0, 2.0])).expand(400, -1)
    settings = SlotSettings.allocate(1, 5, CPU)
    settings.set({0: SlotRequest(SamplingParams(temperature=1.0, **setting), 0, [])})
    rows = DrawnRows(torch.zeros(400, dtype=torch.int64), torch.arange(400))
    for implementation in (reference.draw, host.draw):
        assert set(implementation(logits, settings, rows).tokens.tolist()) == kept


@pytest.mark.parametrize("implementation", [reference.draw, host.draw])
def test_log_probabilities_are_those_of_a_double_softmax(implementation: Any) -> None:
    batch = make_rows(5, 3001, rows_each=4, logprobs=7)
    drawn = implementation(batch.logits, batch.settings, batch.rows)
    for row in (drawn.tokens >= 0).nonzero().squeeze(1).tolist():
        token, logits = int(drawn.tokens[row]), batch.logits[row]
        softmax = logits.double().log_softmax(0).tolist()
        top = sorted((i for i, x in enumerate(softmax) if x > -math.inf), key=lambda i: -softmax[i])
        # A total is a float32: that much of its last place is in every log-probability.
        allowed = 1e-6 * max(1.0, float(drawn.log_total[row].abs()) / 8)
        found = float(drawn.logit[row].double() - drawn.log_total[row].double())
        assert found == pytest.approx(softmax[token], abs=allowed)
        ids = drawn.top_ids[row][drawn.top_ids[row] >= 0].tolist()
        assert ids == top[:7]
        logprobs = drawn.top_logits[row].double() - drawn.log_total[row].double()
        expected = [softmax[i] for i in ids]
        assert logprobs[: len(ids)].tolist() == pytest.approx(expected, abs=allowed)


def test_pieces_of_a_batch_are_drawn_as_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = make_rows(9, 211, masked=True)
    whole = reference.draw(batch.logits, batch.settings, batch.rows)
    monkeypatch.setattr(reference, "MAX_CELLS", 211 * 5)
    parts = reference.draw(batch.logits, batch.settings, batch.rows)
    for one, other in zip(whole, parts, strict=True):
        assert torch.equal(one.nan_to_num(0.5), other.nan_to_num(0.5))
