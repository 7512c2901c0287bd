"""How slots go on, as one kernel in Triton's interpreter against the rule in torch."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch

from flashdraft.kernels import advance as rule
from tests.advanced import make_step
from tests.interpreted import judge, report

NUM_SEEDS = 12


def check(
    width: int,
    is_given: bool,
    looks_up: bool,
    is_decided: bool = False,
    max_depth: int | None = None,
) -> None:
    from flashdraft.kernels.cuda.backend import TritonKernels

    kernels = TritonKernels(torch.device("cpu"), torch.float32)
    for seed in range(NUM_SEEDS):
        step = make_step(seed, 1 + seed, width, is_given, looks_up, is_decided, max_depth)
        expected, found = step.copied(), step.copied()
        rule.advance(*expected)
        kernels.advance(*found)
        for one, other in zip(found.written, expected.written, strict=True):
            assert torch.equal(one, other), (seed, one, other)
        assert not torch.equal(found.lines, step.lines)


CHECKS: dict[str, Callable[[], None]] = {
    f"{width} drafted{', given' * given}{', looked up' * looks}": (
        lambda w=width, g=given, h=looks: check(w, g, h)
    )
    for width, given, looks in itertools.product((0, 1, 7, 15), (False, True), (False, True))
}
CHECKS |= {
    f"{width} drafted{', given' * given}, decided": lambda w=width, g=given: check(w, g, True, True)
    for width, given in itertools.product((0, 15), (False, True))
}
CHECKS["63 nodes, 9 deep, decided"] = lambda: check(63, False, True, True, max_depth=9)
CHECKS |= {
    f"{nodes} nodes, {depth} deep{', given' * given}{', looked up' * looks}": (
        lambda n=nodes, d=depth, g=given, h=looks: check(n, g, h, max_depth=d)
    )
    for nodes, depth, looks in ((15, 4, False), (31, 15, True), (63, 9, True))
    for given in (False, True)
}


@pytest.mark.parametrize("name", CHECKS)
def test_interpreted(name: str, failures: dict[str, str]) -> None:
    judge(failures[name])


if __name__ == "__main__":  # in the interpreter's process
    report(CHECKS)
