"""Rows of a pass: draft tokens go to whom they are likeliest to be of use, and lie as by hand."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from flashdraft.kernels.layout import (
    DraftedSlots,
    PassRows,
    SlotTables,
    lay_out,
    share_rows,
    survival,
)
from tests.laid_out import make_rows, make_slots

CPU = torch.device("cpu")
ALL = [1, 1, 1]
FREE = [-1, -1, -1]


def share(wanted: Tensor, num_rows: int, limits: list[int], alive: list[int]) -> Tensor:
    """Shares where draft tokens survive with these chances, which fall along a slot's row."""
    before = torch.cat([torch.ones(len(wanted), 1), wanted[:, :-1]], dim=1)
    own = torch.where(before > 0, wanted / before, 0.0).double()
    values, confidence = own.unique(return_inverse=True)  # every chance is a bucket of its own
    edges = torch.arange(1.0, len(values)) / len(values)
    sure = (confidence + 0.5) / len(values)
    sure[own == 0] = 0.0
    sources = torch.zeros(len(wanted), dtype=torch.int64)
    drafted = DraftedSlots(
        sure.float(), sources, values.unsqueeze(0), edges, torch.tensor(limits), torch.tensor(alive)
    )
    found = survival(drafted.confidence, sources, drafted.chances, edges)
    torch.testing.assert_close(found, wanted.double(), rtol=1e-6, atol=1e-9)
    return share_rows(drafted, num_rows)


@pytest.mark.parametrize("num_slots", [0, 1, 4, 7, 8])
def test_the_likeliest_slots_win(num_slots):
    chances = torch.tensor([[0.9, 0.5, 0.1, 0.05], [0.3, 0.2, 0.15, 0.15], [0.0, 0.0, 0.0, 0.0]])
    counts = share(chances, 3 + num_slots, FREE, ALL) - 1  # everybody has an anchor
    assert counts.sum() == num_slots and counts.min() >= 0
    taken = [value for s, n in enumerate(counts.tolist()) for value in chances[s, :n].tolist()]
    left = [value for s, n in enumerate(counts.tolist()) for value in chances[s, n:].tolist()]
    assert min(taken, default=1.0) >= max(left, default=0.0)


def test_a_fixed_share_comes_first_and_no_more_than_it_while_others_want_slots():
    chances = torch.tensor([[0.9, 0.8, 0.7], [0.6, 0.5, 0.4], [0.99, 0.98, 0.97]])
    limits = [-1, 2, 0]
    assert share(chances, 5, limits, ALL).tolist() == [1, 3, 1]
    assert share(chances, 7, limits, ALL).tolist() == [3, 3, 1]
    assert share(chances, 8, limits, ALL).tolist() == [4, 3, 1]
    assert share(chances, 9, limits, ALL).sum() == 9  # a row too many belongs to somebody


def test_who_does_not_decode_has_what_nobody_wants():
    chances = torch.tensor([[0.9, 0.8, 0.0], [0.6, 0.5, 0.4], [0.3, 0.2, 0.1]])
    alive = [1, 0, 1]
    assert share(chances, 2, FREE, alive).tolist() == [1, 0, 1]
    assert share(chances, 7, FREE, alive).tolist() == [3, 0, 4]
    assert share(chances, 8, FREE, alive).tolist() == [3, 1, 4]  # before what has no draft
    assert share(chances, 12, FREE, alive).tolist() == [4, 4, 4]


def test_without_drafts_everybody_has_one_row_before_anybody_has_two():
    for alive in ([1, 1, 1, 1], [0, 1, 0, 1], [1, 0, 0, 0]):
        assert share(torch.zeros(4, 7), 4, [-1] * 4, alive).tolist() == [1, 1, 1, 1]


def test_who_is_equally_likely_gets_equally_many():
    chances = torch.tensor([0.5, 0.25, 0.125]).repeat(4, 1)
    assert share(chances, 8, [-1] * 4, [1] * 4).tolist() == [2, 2, 2, 2]
    assert share(chances, 10, [-1] * 4, [1] * 4).tolist() == [3, 3, 2, 2]


def test_survival_is_a_product_of_chances_by_source_and_confidence():
    edges = torch.tensor([0.25, 0.5])
    chances = torch.tensor([[0.1, 0.2, 0.3], [0.6, 0.7, 0.8]])
    confidence = torch.tensor([[0.01, 0.5], [0.01, 0.5]])
    found = survival(confidence, torch.tensor([0, 1]), chances, edges)
    # 0.5 is an edge: it belongs to what begins there
    expected = [[0.1, 0.1 * 0.3], [0.6, 0.6 * 0.8]]
    assert found.tolist() == [pytest.approx(one) for one in expected]


def test_nothing_survives_where_nothing_was_drafted():
    chances, edges = torch.full((1, 2), 0.5), torch.tensor([0.25])
    found = survival(
        torch.tensor([[0.5, 0.0, 0.5], [0.0, 0.0, 0.0]]), torch.tensor([0, 0]), chances, edges
    )
    assert found.tolist() == [[0.5, 0.0, 0.0], [0.0, 0.0, 0.0]]


def by_hand(
    slots: SlotTables, drafts: list[list[int]], counts: list[int]
) -> tuple[list[list[int]], list[list[int]]]:
    """[token, slot, position, draft tokens before it] of every row, and its place in each pool."""
    rows, places = [], []
    for s, count in enumerate(counts):
        for behind in range(count):
            position = int(slots.lengths[s]) + behind
            token = drafts[s][behind - 1] if behind else int(slots.anchors[s])
            rows.append([token, s, position, behind])
            page, offset = divmod(position, slots.page_size)
            is_kept = slots.alive[s] and position < slots.ends[s]
            pages = slots.tables[:, s, page] if is_kept else slots.nowhere
            places.append([int(one) * slots.page_size + offset for one in pages])
    return rows, places


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("whole", [False, True])
def test_rows_are_those_by_hand(seed, whole):
    source = random.Random(seed)
    num_slots, width, num_pools = source.randint(1, 6), source.randint(0, 9), source.randint(1, 3)
    slots = make_slots(seed, num_slots + 2, num_pools).first(num_slots)
    drafts = [[source.randrange(99) for _ in range(width)] for _ in range(num_slots)]
    counts = [1 + (width if whole else source.randint(-1, width)) for _ in range(num_slots)]
    num_rows = sum(counts)
    rows: PassRows = make_rows(num_rows + 3, num_slots + 2, num_pools, CPU)
    drafted = torch.tensor(drafts, dtype=torch.int64).view(num_slots, width)
    lay_out(slots, drafted, None if whole else torch.tensor(counts), num_rows, rows)
    expected, places = by_hand(slots, drafts, counts)
    found = torch.stack(rows[:4])[:, :num_rows].T.tolist()
    assert found == expected and rows.places[:, :num_rows].T.tolist() == places
    starts = [sum(counts[:s]) for s in range(num_slots + 1)]
    assert rows.query_start.tolist() == starts + [num_rows] * 2
    assert all((one[..., num_rows:] == 7).all() for one in rows[:5])
