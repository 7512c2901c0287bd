"""Paths and convolutions, as kernels in Triton's interpreter against the rules in torch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from flashdraft.kernels import convolution, paths
from tests.grown import make_drawn
from tests.interpreted import judge, report
from tests.pathed import make_paths

CPU = torch.device("cpu")
CASES = ((0, 16, 8, False), (1, 16, 1, True), (2, 20, 21, True), (3, 4, 5, False), (5, 20, 8, True))
BROKEN = (4, 16, 8, True, torch.nan)


def check_paths(
    seed: int, num_likeliest: int, count: int, is_sure: bool, broken: float | None = None
) -> None:
    from flashdraft.kernels.cuda.backend import TritonKernels

    kernels, drawn = TritonKernels(CPU, torch.float32), make_drawn(seed)
    width = 3
    drawn = drawn._replace(draw=type(drawn.draw)(*(one[:6].contiguous() for one in drawn.draw)))
    rows = paths.DrawnRows(drawn.rows.owner[:6].contiguous(), drawn.rows.positions[:6].contiguous())
    candidates, scores = make_paths(drawn, num_likeliest, seed, is_sure)
    if broken is not None:
        scores.added[:, ::2], scores.added[:, 1::3] = broken, torch.inf
    told = candidates, scores, drawn.settings, rows
    found, expected = kernels.offer_paths(*told, count), paths.offer_paths(*told, count)
    assert torch.equal(found.tokens, expected.tokens)
    assert torch.equal(found.numbers, expected.numbers)
    torch.testing.assert_close(found.confidence, expected.confidence, rtol=1e-5, atol=1e-7)
    for one, other in zip(kernels.follow(found, width), paths.follow(found, width), strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)


def check_convolution(taps: int, features: int, groups: int) -> None:
    from flashdraft.kernels.cuda.backend import TritonKernels

    generator = torch.Generator().manual_seed(taps)
    x, base = (torch.randn(count, features, generator=generator) for count in (6, taps))
    changes = torch.randn(6, 2 * taps * groups, generator=generator).chunk(2, dim=1)[1]
    told = convolution.Convolution(base, changes, torch.tensor([0, 1, 2, 0, 1, 2]))
    found = TritonKernels(CPU, torch.float32).convolve(x, told)
    torch.testing.assert_close(found, convolution.convolve(x, told))


CHECKS: dict[str, Callable[[], None]] = {
    **{f"paths {case}": lambda c=case: check_paths(*c) for case in (*CASES, BROKEN)},
    **{
        f"convolution {case}": lambda c=case: check_convolution(*c)
        for case in ((1, 16, 1), (2, 48, 3), (3, 1040, 65))
    },
}


@pytest.mark.parametrize("name", CHECKS)
def test_interpreted(name: str, failures: dict[str, str]) -> None:
    judge(failures[name])


if __name__ == "__main__":  # in the interpreter's process
    report(CHECKS)
