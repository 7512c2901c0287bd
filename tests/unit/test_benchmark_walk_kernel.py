"""The prescribed walk as one kernel, in Triton's interpreter, against the rule in torch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from benchmarks.h200_inject import accept_walks
from tests.interpreted import judge, report
from tests.laid_out import make_nodes


def check(num_nodes: int, num_sizes: int) -> None:
    from benchmarks.h200_walk import accept

    for seed in range(12):
        generator = torch.Generator().manual_seed(seed)
        nodes = make_nodes(seed, 5, num_nodes, 9)
        there = (nodes.confidence > 0).sum(1) // torch.tensor([1, 1, 2, 1, 64])
        is_node = torch.arange(num_nodes) < there.unsqueeze(1)
        pairs = torch.randint(0, 9, (4, 2, 8, num_sizes), generator=generator).cumsum(1)
        least = torch.arange(num_sizes) * torch.randint(1, 22, (4, 1, 8, 1), generator=generator)
        table, count = torch.cat([pairs, least], dim=1), torch.tensor([seed])
        starts = torch.arange(5) * (1 + num_nodes)
        drawn = torch.full((6 * (1 + num_nodes),), 999)
        drawn[5 * (1 + num_nodes) :] = -1
        expected, found = drawn.clone(), drawn.clone()
        path = accept_walks(expected, starts, nodes, is_node, table, count)
        assert torch.equal(accept(found, starts, nodes, is_node, table, count), path), seed
        assert torch.equal(found, expected) and bool((path != 1).any())


CHECKS: dict[str, Callable[[], None]] = {
    f"{nodes} nodes, {sizes} sizes": lambda n=nodes, s=sizes: check(n, s)
    for nodes, sizes in ((15, 1), (15, 3), (31, 4), (63, 4))
}


@pytest.mark.parametrize("name", CHECKS)
def test_interpreted(name: str, failures: dict[str, str]) -> None:
    judge(failures[name])


if __name__ == "__main__":  # in the interpreter's process
    report(CHECKS)
