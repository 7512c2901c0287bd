"""Rows of a pass, as kernels in Triton's interpreter against the rule in torch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from flashdraft.kernels import layout as rule
from tests.interpreted import judge, report
from tests.laid_out import make_drafted, make_nodes, make_rows, make_slots

CPU = torch.device("cpu")
NUM_SEEDS = 8


def check_shares(width: int) -> None:
    from flashdraft.kernels.cuda.backend import TritonKernels

    kernels = TritonKernels(CPU, torch.float32)
    for seed in range(NUM_SEEDS if width < 20 else 2):  # it takes its time
        num_slots = 1 + 2 * seed
        drafted = make_drafted(seed, num_slots, width)
        for num_rows in {num_slots, num_slots + width // 2, num_slots * (1 + width)}:
            expected = rule.share_rows(drafted, num_rows)
            found = kernels.share_rows(drafted, num_rows)
            assert torch.equal(found, expected), (seed, num_rows, found, expected)
            assert found.sum() == num_rows


def check_rows(width: int, num_pools: int, is_whole: bool) -> None:
    from flashdraft.kernels.cuda.backend import TritonKernels

    kernels = TritonKernels(CPU, torch.float32)
    for seed in range(NUM_SEEDS):
        num_slots = 1 + seed
        slots = make_slots(seed, num_slots + 2, num_pools).first(num_slots)
        nodes = make_nodes(seed, num_slots, width)
        counts = torch.randint(0, 2 + width, (num_slots,))
        num_rows = num_slots * (1 + width) if is_whole else int(counts.sum())
        expected, found = (make_rows(num_rows + 4, num_slots + 2, num_pools, CPU) for _ in range(2))
        arguments = slots, nodes, None if is_whole else counts, num_rows
        rule.lay_out(*arguments, expected)
        kernels.lay_out(*arguments, found)
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other), (seed, one, other)


CHECKS: dict[str, Callable[[], None]] = {
    **{f"shares of {width}": lambda w=width: check_shares(w) for width in (0, 1, 15, 63)},
    **{
        f"{width} drafted, {pools} pools{', whole' * whole}": (
            lambda w=width, p=pools, h=whole: check_rows(w, p, h)
        )
        for width, pools in ((0, 1), (1, 2), (15, 3), (63, 2))
        for whole in (False, True)
    },
}


@pytest.mark.parametrize("name", CHECKS)
def test_interpreted(name: str, failures: dict[str, str]) -> None:
    judge(failures[name])


if __name__ == "__main__":  # in the interpreter's process
    report(CHECKS)
