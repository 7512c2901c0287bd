"""Muon: orthogonal updates of the size that is promised, the reference's own, and no mixing."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from flashdraft.train.fit.muon import Muon, orthogonalise


def matrices(*shapes: tuple[int, int], seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


@pytest.mark.parametrize("shape", [(6, 6), (5, 12), (12, 5)])
def test_orthogonalise_keeps_directions_and_evens_their_strength(shape: tuple[int, int]) -> None:
    given = torch.randn(3, *shape, generator=torch.Generator().manual_seed(1))
    found = orthogonalise(given)
    left, _, right = torch.linalg.svd(given, full_matrices=False)
    values = left.mT @ found @ right.mT  # diagonal where the singular vectors are the same
    strengths = values.diagonal(dim1=1, dim2=2)
    torch.testing.assert_close(values, torch.diag_embed(strengths), atol=1e-4, rtol=0)
    assert strengths.min() > 0.3 and strengths.max() < 1.3
    assert torch.linalg.svdvals(given).std() > torch.linalg.svdvals(found).std()


def test_a_zero_gradient_changes_nothing_but_the_decay() -> None:
    (parameter,) = matrices((4, 8))
    before = parameter.detach().clone()
    parameter.grad = torch.zeros_like(parameter)
    Muon([parameter], lr=0.1, weight_decay=0.5).step()
    torch.testing.assert_close(parameter.detach(), before * 0.95)


def test_steps_are_those_of_torchs_muon() -> None:
    ours, theirs = matrices((16, 24), (16, 24), (24, 16)), matrices((16, 24), (16, 24), (24, 16))
    mine = Muon(ours, lr=0.02, weight_decay=0.1)
    reference = torch.optim.Muon(
        theirs, lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw", momentum=0.95
    )
    generator = torch.Generator().manual_seed(3)
    for _ in range(4):
        for one, other in zip(ours, theirs, strict=True):
            one.grad = torch.randn(one.shape, generator=generator)
            other.grad = one.grad.clone()
        mine.step()
        reference.step()
    for one, other in zip(ours, theirs, strict=True):
        # the reference rounds its updates (about 0.01 an element and step) to bfloat16
        torch.testing.assert_close(one, other, atol=2e-3, rtol=0)


def test_matrices_of_one_shape_do_not_mix() -> None:
    both, alone = matrices((8, 8), (8, 8)), matrices((8, 8), (8, 8))
    generator = torch.Generator().manual_seed(5)
    for one, other in zip(both, alone, strict=True):
        one.grad = torch.randn(one.shape, generator=generator)
        other.grad = one.grad.clone()
    Muon(both, lr=0.1, weight_decay=0.0).step()
    for parameter in alone:
        Muon([parameter], lr=0.1, weight_decay=0.0).step()
    for one, other in zip(both, alone, strict=True):
        torch.testing.assert_close(one, other)
