"""Keys and values of an accepted path, moved on a real GPU as by the rule in torch."""

from __future__ import annotations

import pytest
import torch

from flashdraft.kernels import settle as rule
from tests.settled import NUM_PAGES, make_moves, make_stored

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


@pytest.mark.parametrize(("num_slots", "max_depth"), [(1, 15), (8, 15), (6, 4), (5, 1)])
def test_it_is_the_rule(num_slots: int, max_depth: int) -> None:
    from flashdraft.kernels.cuda.backend import TritonKernels

    kernels = TritonKernels(CUDA, torch.bfloat16)
    for seed in range(20):
        moves = make_moves(seed, num_slots, max_depth)
        expected, found = make_stored(seed), make_stored(seed, CUDA)
        rule.settle(expected, moves)
        kernels.settler(found)(rule.Settled(*(one.to(CUDA) for one in moves)))
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one.cache[:NUM_PAGES].cpu(), other.cache[:NUM_PAGES]), seed
