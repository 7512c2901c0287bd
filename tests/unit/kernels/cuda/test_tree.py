"""Trees of draft tokens, as kernels in Triton's interpreter against the rule in torch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from flashdraft.kernels import tree as rule
from tests.grown import assert_equal, grow_by, make_drawn, make_offered
from tests.interpreted import judge, report

CPU = torch.device("cpu")
# width, offers of a place, nodes
SHAPES = (
    (1, 1, 1),
    (4, 3, 2),
    (7, 4, 15),
    (15, 8, 12),
    (15, 8, 16),
    (15, 8, 32),
    (15, 8, 63),
    (2, 20, 63),
    (15, 0, 15),
    (15, 0, 20),
    (9, 0, 5),
    (0, 2, 3),
)
WITHOUT_RIVALS = ((7, 4, 15), (15, 8, 32), (15, 0, 15))
WITH_HEADS = ((3, 2, 7, 3), (15, 8, 32, 18), (7, 8, 63, 22))  # and lists of offers to a place


def check_trees(
    width: int, count: int, num_nodes: int, has_rivals: bool = True, num_before: int = 1
) -> None:
    from flashdraft.kernels.cuda.backend import TritonKernels

    kernels = TritonKernels(CPU, torch.float32)
    for seed in range(4):
        offered = make_offered(seed, 2, width, count, CPU, has_rivals, num_before)
        assert_equal(grow_by(kernels, offered, num_nodes), rule.grow(offered, num_nodes))


def check_offers(seed: int, count: int) -> None:
    from flashdraft.kernels.cuda.backend import TritonKernels

    drawn = make_drawn(seed)
    found = TritonKernels(CPU, torch.float32).offer(*drawn, count)
    expected = rule.offer(*drawn, count)
    assert torch.equal(found.tokens, expected.tokens)
    torch.testing.assert_close(found.confidence, expected.confidence, rtol=1e-6, atol=1e-7)


CHECKS: dict[str, Callable[[], None]] = {
    **{
        f"{count} offers for {width}, {nodes} nodes": (
            lambda w=width, c=count, n=nodes: check_trees(w, c, n)
        )
        for width, count, nodes in SHAPES
    },
    **{
        f"{count} offers for {width}, {nodes} nodes, no rivals": (
            lambda w=width, c=count, n=nodes: check_trees(w, c, n, False)
        )
        for width, count, nodes in WITHOUT_RIVALS
    },
    **{
        f"{count} offers behind {before} for {width}, {nodes} nodes": (
            lambda w=width, c=count, n=nodes, b=before: check_trees(w, c, n, True, b)
        )
        for width, count, nodes, before in WITH_HEADS
    },
    **{
        f"{count} offers of rows {seed}": lambda s=seed, c=count: check_offers(s, c)
        for seed, count in ((0, 8), (1, 1), (2, rule.MAX_OFFERS), (3, 8), (5, rule.MAX_OFFERS))
    },
}


@pytest.mark.parametrize("name", CHECKS)
def test_interpreted(name: str, failures: dict[str, str]) -> None:
    judge(failures[name])


if __name__ == "__main__":  # in the interpreter's process
    report(CHECKS)
