"""What an accepted path left in the caches is moved to where a chain would have put it."""

from __future__ import annotations

import random

import torch

from flashdraft.kernels.settle import PagedTensor, Settled, settle
from tests.settled import by_hand, make_moves, make_stored


def test_it_is_moved_as_by_hand() -> None:
    for seed in range(60):
        stored = make_stored(seed)
        moves = make_moves(
            seed, num_slots=1 + seed % 5, max_depth=random.Random(seed).choice([1, 4, 15])
        )
        expected = by_hand(stored, moves)
        settle(stored, moves)
        for one, other in zip(stored, expected, strict=True):
            assert torch.equal(one.cache, other), seed


def test_all_is_read_before_anything_is_written() -> None:
    """Row 2 goes to 1 and row 3 to 2."""
    cache = torch.arange(8.0).view(2, 4, 1, 1).clone()
    moves = Settled(
        torch.tensor([[0, 2, 3, 0]]),
        torch.tensor([0]),
        torch.tensor([[0, 1, 2, 3]]),
        torch.tensor([1]),
    )
    settle([PagedTensor(cache, 0)], moves)
    assert cache.flatten()[:4].tolist() == [0, 2, 3, 3]


def test_a_chain_moves_nothing() -> None:
    stored, moves = make_stored(3), make_moves(3, 4, 6)
    place = torch.arange(moves.path.shape[1])
    before = [one.cache.clone() for one in stored]
    settle(stored, moves._replace(path=torch.where(place < 3, place, 0).expand_as(moves.path)))
    assert all(torch.equal(one.cache, other) for one, other in zip(stored, before, strict=True))
