"""How slots go on, as one kernel on a real GPU against the rule in torch."""

from __future__ import annotations

import pytest
import torch

from flashdraft.kernels import advance as rule
from tests.advanced import make_step

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


@pytest.mark.parametrize("is_decided", [False, True])
@pytest.mark.parametrize("looks_up", [False, True])
@pytest.mark.parametrize("is_given", [False, True])
@pytest.mark.parametrize(("width", "depth"), [(0, None), (7, None), (15, None), (15, 4), (63, 15)])
def test_it_is_the_rule(
    width: int, depth: int | None, is_given: bool, looks_up: bool, is_decided: bool
) -> None:
    from flashdraft.kernels.cuda.backend import TritonKernels

    kernels = TritonKernels(CUDA, torch.bfloat16)
    for seed in range(20):
        step = make_step(seed, 32, width, is_given, looks_up, is_decided, depth)
        expected, found = step.copied(), step.copied(CUDA)
        rule.advance(*expected)
        kernels.advance(*found)
        for one, other in zip(found.written, expected.written, strict=True):
            assert torch.equal(one.cpu(), other), seed
