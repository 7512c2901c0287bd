"""Draft slots go to those that are likeliest to survive, and to whom they are promised."""

from __future__ import annotations

import pytest
import torch

from flashdraft.engine.policy.verify import BUCKET_EDGES
from flashdraft.engine.step.shares import Shares, share_slots


@pytest.mark.parametrize("num_slots", [0, 1, 4, 7, 12])
def test_the_likeliest_slots_win(num_slots):
    survival = torch.tensor([[0.9, 0.5, 0.1, 0.05], [0.3, 0.2, 0.15, 0.15], [0.0, 0.0, 0.0, 0.0]])
    counts = share_slots(survival, num_slots)
    assert counts.sum() == num_slots
    taken = [value for s, n in enumerate(counts.tolist()) for value in survival[s, :n].tolist()]
    left = [value for s, n in enumerate(counts.tolist()) for value in survival[s, n:].tolist()]
    assert min(taken, default=1.0) >= max(left, default=0.0)


def test_whole_blocks_need_no_contest():
    assert share_slots(torch.rand(2, 3), 6).tolist() == [3, 3]


def test_a_fixed_share_comes_first_and_no_more_than_it_while_others_want_slots():
    survival = torch.tensor([[0.9, 0.8, 0.7], [0.6, 0.5, 0.4], [0.99, 0.98, 0.97]])
    limits = torch.tensor([-1, 2, 0])
    assert share_slots(survival, 2, limits).tolist() == [0, 2, 0]
    assert share_slots(survival, 4, limits).tolist() == [2, 2, 0]
    assert share_slots(survival, 5, limits).tolist() == [3, 2, 0]
    assert share_slots(survival, 6, limits).sum() == 6  # a row too many belongs to somebody


def test_survival_is_a_product_of_chances_by_source_and_confidence():
    shares = Shares(torch.device("cpu"))
    chances = torch.linspace(0.1, 0.9, 2 * (len(BUCKET_EDGES) + 1)).view(2, -1)
    shares.set_chances(chances)
    survival = shares.survival(torch.tensor([[0.0, 0.5], [0.0, 0.5]]), torch.tensor([0, 1]))
    low, middle = 0, 6  # 0.5 is an edge: it belongs to what begins there
    for source in (0, 1):
        expected = [chances[source, low], chances[source, low] * chances[source, middle]]
        assert survival[source].tolist() == pytest.approx([float(x) for x in expected])
