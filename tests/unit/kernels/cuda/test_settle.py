"""Keys and values of an accepted path, moved by Triton's interpreter as by the rule in torch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from flashdraft.kernels import settle as rule
from tests.interpreted import judge, report
from tests.settled import NUM_PAGES, make_moves, make_stored

NUM_SEEDS = 5


def check(num_slots: int, max_depth: int) -> None:
    from flashdraft.kernels.cuda.backend import TritonKernels

    kernels = TritonKernels(torch.device("cpu"), torch.float32)
    for seed in range(NUM_SEEDS):
        moves = make_moves(seed, num_slots, max_depth)
        expected, found = make_stored(seed), make_stored(seed)
        rule.settle(expected, moves)
        kernels.settler(found)(moves)
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one.cache[:NUM_PAGES], other.cache[:NUM_PAGES]), seed


CHECKS: dict[str, Callable[[], None]] = {
    f"{slots} slots, {depth} deep": lambda s=slots, d=depth: check(s, d)
    for slots, depth in ((1, 15), (5, 4), (4, 1))
}


@pytest.mark.parametrize("name", CHECKS)
def test_interpreted(name: str, failures: dict[str, str]) -> None:
    judge(failures[name])


if __name__ == "__main__":  # in the interpreter's process
    report(CHECKS)
