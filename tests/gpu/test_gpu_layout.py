"""Rows of a pass, as kernels on a real GPU against the rule in torch."""

from __future__ import annotations

import pytest
import torch

from flashdraft.kernels import layout as rule
from flashdraft.kernels.nodes import TreeNodes
from tests.laid_out import make_drafted, make_nodes, make_rows, make_slots

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


@pytest.mark.parametrize("num_slots", [1, 8, 32, 200])
@pytest.mark.parametrize("width", [0, 1, 15, 63])
def test_shares_are_those_of_the_rule(width: int, num_slots: int) -> None:
    from flashdraft.kernels.cuda.backend import TritonKernels

    kernels = TritonKernels(CUDA, torch.bfloat16)
    for seed in range(10):
        drafted = make_drafted(seed, num_slots, width)
        moved = rule.DraftedSlots(*(one.to(CUDA) for one in drafted))
        for num_rows in {num_slots, num_slots + width // 2, 3 * num_slots, num_slots * (1 + width)}:
            if num_rows <= num_slots * (1 + width):
                found = kernels.share_rows(moved, num_rows).cpu()
                assert torch.equal(found, rule.share_rows(drafted, num_rows)), (seed, num_rows)


@pytest.mark.parametrize("is_whole", [False, True])
@pytest.mark.parametrize("num_slots", [1, 8, 32, 200])
@pytest.mark.parametrize("width", [0, 15, 63])
def test_rows_are_those_of_the_rule(width: int, num_slots: int, is_whole: bool) -> None:
    from flashdraft.kernels.cuda.backend import TritonKernels

    kernels = TritonKernels(CUDA, torch.bfloat16)
    for seed in range(10):
        slots = make_slots(seed, num_slots + 3, 2).first(num_slots)
        moved = rule.SlotTables(*(one.to(CUDA) for one in slots[:-1]), slots.page_size)
        nodes = make_nodes(seed, num_slots, width)
        counts = None if is_whole else torch.randint(0, 2 + width, (num_slots,))
        num_rows = num_slots * (1 + width) if counts is None else int(counts.sum())
        expected, found = (
            make_rows(num_rows + 4, num_slots + 3, 2, device) for device in (slots[0].device, CUDA)
        )
        rule.lay_out(slots, nodes, counts, num_rows, expected)
        there = None if counts is None else counts.to(CUDA)
        kernels.lay_out(moved, TreeNodes(*(one.to(CUDA) for one in nodes)), there, num_rows, found)
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one.cpu(), other), seed
