"""Short convolutions over blocks' rows."""

from __future__ import annotations

import pytest
import torch

from flashdraft.kernels.convolution import Convolution, convolve


def by_hand(x: torch.Tensor, convolution: Convolution) -> torch.Tensor:
    base, changes, places = convolution
    taps, features = base.shape
    group = features // (changes.shape[1] // taps)
    found = torch.zeros_like(x)
    for row in range(len(x)):
        for tap in range(min(taps, int(places[row]) + 1)):
            for column in range(features):
                change = changes[row, tap * (features // group) + column // group]
                found[row, column] += (base[tap, column] + change) * x[row - tap, column]
    return found


@pytest.mark.parametrize("taps", [1, 2, 3])
def test_rows_are_mixed_with_those_before_them_in_their_block(taps: int) -> None:
    generator = torch.Generator().manual_seed(taps)
    places = torch.tensor([0, 1, 2, 3, 0, 0, 1])
    x = torch.randn(7, 12, generator=generator)
    base = torch.randn(taps, 12, generator=generator)
    changes = torch.randn(7, 2 * taps * 3, generator=generator)[:, taps * 3 :]
    convolution = Convolution(base, changes, places)
    torch.testing.assert_close(convolve(x, convolution), by_hand(x, convolution))


def test_nothing_of_another_block_is_looked_at() -> None:
    x = torch.tensor([[torch.nan], [1.0], [2.0]])
    convolution = Convolution(torch.ones(2, 1), torch.zeros(3, 2), torch.tensor([0, 0, 1]))
    assert convolve(x, convolution)[1:].tolist() == [[1.0], [3.0]]


def test_gradients_reach_all_of_it() -> None:
    x, base, changes = (torch.randn(*s, requires_grad=True) for s in ((4, 6), (2, 6), (4, 4)))
    places = torch.tensor([0, 1, 0, 1])
    assert torch.autograd.gradcheck(
        lambda *one: convolve(one[0], Convolution(one[1], one[2], places)),
        [one.double().detach().requires_grad_() for one in (x, base, changes)],
    )
