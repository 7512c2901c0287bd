"""Draft slots go to those that are likeliest to survive, and to whom they are promised."""

from __future__ import annotations

import pytest
import torch

from flashdraft.engine.policy.verify import BUCKET_EDGES
from flashdraft.engine.step.shares import Shares, share_rows

ALL = torch.tensor([1, 1, 1])
FREE = torch.tensor([-1, -1, -1])


@pytest.mark.parametrize("num_slots", [0, 1, 4, 7, 8])
def test_the_likeliest_slots_win(num_slots):
    survival = torch.tensor([[0.9, 0.5, 0.1, 0.05], [0.3, 0.2, 0.15, 0.15], [0.0, 0.0, 0.0, 0.0]])
    counts = share_rows(survival, 3 + num_slots, FREE, ALL) - 1  # everybody has an anchor
    assert counts.sum() == num_slots and counts.min() >= 0
    taken = [value for s, n in enumerate(counts.tolist()) for value in survival[s, :n].tolist()]
    left = [value for s, n in enumerate(counts.tolist()) for value in survival[s, n:].tolist()]
    assert min(taken, default=1.0) >= max(left, default=0.0)


def test_a_fixed_share_comes_first_and_no_more_than_it_while_others_want_slots():
    survival = torch.tensor([[0.9, 0.8, 0.7], [0.6, 0.5, 0.4], [0.99, 0.98, 0.97]])
    limits = torch.tensor([-1, 2, 0])
    assert share_rows(survival, 5, limits, ALL).tolist() == [1, 3, 1]
    assert share_rows(survival, 7, limits, ALL).tolist() == [3, 3, 1]
    assert share_rows(survival, 8, limits, ALL).tolist() == [4, 3, 1]
    assert share_rows(survival, 9, limits, ALL).sum() == 9  # a row too many belongs to somebody


def test_who_does_not_decode_has_what_nobody_wants():
    survival = torch.tensor([[0.9, 0.8, 0.0], [0.6, 0.5, 0.4], [0.3, 0.2, 0.1]])
    alive = torch.tensor([1, 0, 1])
    assert share_rows(survival, 2, FREE, alive).tolist() == [1, 0, 1]
    assert share_rows(survival, 7, FREE, alive).tolist() == [3, 0, 4]
    assert share_rows(survival, 8, FREE, alive).tolist() == [3, 1, 4]  # before what has no draft
    assert share_rows(survival, 12, FREE, alive).tolist() == [4, 4, 4]


def test_without_drafts_everybody_has_one_row_before_anybody_has_two():
    nothing = torch.zeros(4, 7)
    for alive in ([1, 1, 1, 1], [0, 1, 0, 1], [1, 0, 0, 0]):
        counts = share_rows(nothing, 4, torch.tensor([-1] * 4), torch.tensor(alive))
        assert counts.tolist() == [1, 1, 1, 1]


def test_survival_is_a_product_of_chances_by_source_and_confidence():
    shares = Shares(torch.device("cpu"))
    chances = torch.linspace(0.1, 0.9, 2 * (len(BUCKET_EDGES) + 1)).view(2, -1)
    shares.set_chances(chances)
    survival = shares.survival(torch.tensor([[0.01, 0.5], [0.01, 0.5]]), torch.tensor([0, 1]))
    low, middle = 0, 6  # 0.5 is an edge: it belongs to what begins there
    for source in (0, 1):
        expected = [chances[source, low], chances[source, low] * chances[source, middle]]
        assert survival[source].tolist() == pytest.approx([float(x) for x in expected])


def test_nothing_survives_where_nothing_was_drafted():
    survival = Shares(torch.device("cpu")).survival(
        torch.tensor([[0.5, 0.0, 0.5], [0.0, 0.0, 0.0]]), torch.tensor([0, 1])
    )
    assert survival.tolist() == [[0.5, 0.0, 0.0], [0.0, 0.0, 0.0]]
