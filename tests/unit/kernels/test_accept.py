"""Acceptance against a walk from node to node."""

from __future__ import annotations

import random

import pytest
import torch

from flashdraft.kernels.accept import Walk, find_agreed, pack_rows, walk
from flashdraft.kernels.nodes import TreeNodes, make_chain
from tests.laid_out import make_nodes


def by_hand(samples: list[int], parents: list[int], tokens: list[int], count: int) -> list[int]:
    """The rows of the path, of a slot whose first nodes count."""
    path = [0]
    while True:
        found = [
            1 + node
            for node in range(count)
            if parents[node] == path[-1] and tokens[node] == samples[path[-1]]
        ]
        if not found:
            return path
        path += found


def chain(tokens: list[list[int]]) -> TreeNodes:
    ids = torch.tensor(tokens)
    return make_chain(ids, torch.ones(ids.shape), torch.ones(ids.shape, dtype=torch.float64))


def walk_chains(samples: list[list[int]], drafts: list[list[int]], counts: list[int]) -> Walk:
    width = len(drafts[0])
    is_node = torch.arange(width) < torch.tensor(counts).unsqueeze(1)
    starts = torch.arange(len(samples)) * (1 + width)
    agreed = find_agreed(torch.tensor(samples).flatten(), starts, chain(drafts))
    return walk(agreed, chain(drafts), is_node, width)


@pytest.mark.parametrize("num_nodes", [0, 1, 5, 15, 63])
@pytest.mark.parametrize("max_depth", [1, 4, 15])
def test_it_is_the_walk_by_hand(num_nodes: int, max_depth: int) -> None:
    chance, longest = random.Random(num_nodes), 0
    for seed in range(40):
        num_slots = 1 + seed % 4
        nodes = make_nodes(seed, num_slots, num_nodes, max_depth)
        counts = [chance.randint(0, int((one > 0).sum())) for one in nodes.confidence]
        samples = torch.randint(0, 200, (num_slots, 1 + num_nodes))
        for slot in range(num_slots):
            for node in range(counts[slot]):  # most parents agree with some child
                if chance.random() < 0.7:
                    samples[slot, nodes.parents[slot, node]] = nodes.tokens[slot, node]
        starts = torch.arange(num_slots) * (1 + num_nodes)
        is_node = torch.arange(num_nodes) < torch.tensor(counts).unsqueeze(1)
        agreed = find_agreed(samples.flatten(), starts, nodes)
        found = walk(agreed, nodes, is_node, max_depth)
        for slot, count in enumerate(counts):
            rows = samples[slot], nodes.parents[slot], nodes.tokens[slot]
            path = by_hand(*(one.tolist() for one in rows), count)
            assert int(found.num_accepted[slot]) == len(path) - 1
            assert found.path[slot].tolist() == path + [0] * (1 + max_depth - len(path))
            longest = max(longest, len(path) - 1)
    assert longest >= min(max_depth, num_nodes, 2)


def test_nodes_that_are_not_verified_do_not_count() -> None:
    found = walk_chains([[4, 5, 6]] * 3, [[4, 5]] * 3, [0, 1, 2])
    assert found.num_accepted.tolist() == [0, 1, 2]
    assert found.path.tolist() == [[0, 0, 0], [0, 1, 0], [0, 1, 2]]


def test_agreement_after_the_first_refusal_does_not_count() -> None:
    assert walk_chains([[1, 2, 3, 4]], [[1, 9, 3]], [3]).num_accepted.tolist() == [1]


def test_acceptance_ends_where_no_token_can_be_chosen() -> None:
    assert walk_chains([[1, -1, 3, 4]], [[1, 2, 3]], [3]).num_accepted.tolist() == [1]


def test_rows_are_the_bits_of_a_word() -> None:
    is_there = torch.zeros(2, 63, dtype=torch.bool)
    is_there[1, [0, 4, 62]] = True
    assert pack_rows(is_there).tolist() == [1, 0b100011 - 2**63]


def test_an_empty_batch_is_fine() -> None:
    nodes = make_nodes(0, 3, 4).first(0)
    nobody = torch.empty(0, dtype=torch.int64)
    agreed = find_agreed(torch.tensor([5]), nobody, nodes)
    found = walk(agreed, nodes, torch.empty(0, 4, dtype=torch.bool), 4)
    assert found.num_accepted.shape == (0,) and found.path.shape == (0, 5)
