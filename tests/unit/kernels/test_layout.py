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
from flashdraft.kernels.nodes import TreeNodes, make_chain
from tests.laid_out import make_nodes, make_rows, make_slots

CPU = torch.device("cpu")
ALL = [1, 1, 1]
FREE = [-1, -1, -1]


def share(wanted: Tensor, num_rows: int, limits: list[int], alive: list[int]) -> Tensor:
    """Shares where nodes survive with these chances."""
    drafted = DraftedSlots(wanted.double(), torch.tensor(limits), torch.tensor(alive))
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
    slots: SlotTables, nodes: TreeNodes, counts: list[int]
) -> tuple[list[list[int]], list[list[int]]]:
    """Six numbers of every row, and its place in each pool."""
    rows, places = [], []
    for s, count in enumerate(counts):
        length = int(slots.lengths[s])
        for behind in range(count):
            row = [int(slots.anchors[s]), s, length, 0, 1, 0]
            if behind:
                token, _, word, depth = (int(one[s, behind - 1]) for one in nodes[:4])
                row = [token, s, length + depth, behind, word, depth]
            rows.append(row)
            page, offset = divmod(length + behind, slots.page_size)
            is_kept = slots.alive[s] and length + behind < slots.ends[s]
            pages = slots.tables[:, s, page] if is_kept else slots.nowhere
            places.append([int(one) * slots.page_size + offset for one in pages])
    return rows, places


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("whole", [False, True])
def test_rows_are_those_by_hand(seed, whole):
    source = random.Random(seed)
    num_slots, num_nodes = source.randint(1, 6), source.choice([0, 3, 9, 63])
    num_pools = source.randint(1, 3)
    slots = make_slots(seed, num_slots + 2, num_pools).first(num_slots)
    nodes = make_nodes(seed, num_slots, num_nodes)
    counts = [1 + (num_nodes if whole else source.randint(-1, num_nodes)) for _ in range(num_slots)]
    num_rows = sum(counts)
    rows: PassRows = make_rows(num_rows + 3, num_slots + 2, num_pools, CPU)
    lay_out(slots, nodes, None if whole else torch.tensor(counts), num_rows, rows)
    expected, places = by_hand(slots, nodes, counts)
    found = torch.stack([one.long() for one in rows[:6]])[:, :num_rows].T.tolist()
    assert found == expected and rows.places[:, :num_rows].T.tolist() == places
    starts = [sum(counts[:s]) for s in range(num_slots + 1)]
    assert rows.query_start.tolist() == starts + [num_rows] * 2
    assert all((one[..., num_rows:] == 7).all() for one in rows[:7])


def test_a_chain_is_a_tree_in_which_all_follow_all_before_them():
    slots, tokens = make_slots(0, 2, 1), torch.tensor([[5, 6, 7], [8, 9, 1]])
    rows = make_rows(8, 2, 1, CPU)
    chain = make_chain(tokens, torch.ones(2, 3), torch.ones(2, 3, dtype=torch.float64))
    lay_out(slots, chain, None, 8, rows)
    assert rows.ancestors.tolist() == [1, 3, 7, 15] * 2 and rows.depths.tolist() == [0, 1, 2, 3] * 2
    assert chain.parents.tolist() == [[0, 1, 2]] * 2


def test_chains_of_one_slot_share_nothing():
    """Who writes nodes writes nobody else's."""
    made = [TreeNodes.allocate(1, 4, CPU) for _ in range(3)]
    for column in range(len(made[0])):
        assert len({one[column].data_ptr() for one in made}) == 3
    for one in made[0]:
        one.fill_(7)
    assert TreeNodes.allocate(1, 4, CPU).parents.tolist() == [[0, 1, 2, 3]]
