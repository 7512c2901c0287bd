"""A tower's matrices with limits: each its own, one product where they allow the same inputs."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from flashdraft.errors import CheckpointError
from flashdraft.kernels.interface import Residual
from flashdraft.kernels.kinds import Activation
from flashdraft.models.vision.linears import Linears, MatrixLimits, TowerMatrix
from tests import zoo
from tests.unit.models.vision.towers import clipped_tower

WIDTH, NUM_ROWS = 24, 5
NARROW, WIDE = MatrixLimits((-0.5, 0.4), (-0.3, 0.6)), MatrixLimits((-0.5, 0.4), (-0.2, 0.1))
OTHER, NONE = (
    MatrixLimits((-0.1, 0.9), (-0.7, 0.2)),
    MatrixLimits((-math.inf, math.inf), (-math.inf, math.inf)),
)


def parts(*limits: MatrixLimits | None) -> list[TowerMatrix]:
    torch.manual_seed(3)
    return [TowerMatrix(torch.randn(16, WIDTH) / 4, one) for one in limits]


def by_hand(x: Tensor, some: list[TowerMatrix]) -> Tensor:
    made = []
    for weight, limits in some:
        assert limits is not None
        product = x.clamp(*limits.inputs).double() @ weight.T.double()
        made.append(product.clamp(*limits.products))
    return torch.cat(made, dim=1)


@pytest.mark.parametrize("backend", ["torch", "float32", "int8"])
@pytest.mark.parametrize(
    ("limits", "num_products"),
    [
        ([NARROW], 1),
        ([NARROW, WIDE, WIDE], 1),
        ([NARROW, WIDE, OTHER], 2),
        ([NARROW, OTHER, WIDE], 3),  # side by side as they were given
        ([NONE, NONE], 1),
    ],
)
def test_each_keeps_to_its_own_limits(
    limits: list[MatrixLimits], num_products: int, backend: str
) -> None:
    some, kernels = parts(*limits), zoo.kernels(backend)
    linears, x = Linears(kernels, *some), torch.randn(NUM_ROWS, WIDTH)
    assert len(linears._clipped) == num_products
    found, expected = linears(x), by_hand(x, some)
    assert found.shape == (NUM_ROWS, 16 * len(limits))
    assert (found - expected).abs().max() < 1e-5
    for row in range(NUM_ROWS):  # whatever its neighbours are
        assert torch.equal(linears(x[row : row + 1])[0], found[row])
    plain = Linears(kernels, *(TowerMatrix(one.weight, None) for one in some))
    assert torch.equal(plain(x), found) is (limits == [NONE, NONE])


@pytest.mark.parametrize("limits", [[None, None], [NARROW, WIDE]])
def test_a_residual_is_normed_first(limits: list[MatrixLimits | None]) -> None:
    kernels = zoo.kernels("float32")
    linears, norm = Linears(kernels, *parts(*limits)), torch.rand(WIDTH)
    residual = Residual(torch.randn(NUM_ROWS, WIDTH), [(torch.randn(NUM_ROWS, WIDTH), norm)])
    stream, (normed,) = kernels.residual_norms(residual, [norm], 1e-6)
    for activation in (None, Activation.GELU_TANH):
        expected = linears(normed)
        if activation is not None:
            expected = kernels.gated(expected, activation)
        found = linears.of_residual(residual, norm, 1e-6, activation)
        assert torch.equal(found[0], stream) and torch.equal(found[1], expected)


@pytest.mark.parametrize(
    "limits", [{"input_min": 2.0}, {"output_max": -2.0}, {"input_max": math.nan}]
)
def test_limits_that_leave_nothing_are_refused(limits: dict[str, float]) -> None:
    name = "model.vision_tower.encoder.layers.0.mlp.up_proj"
    changes = {f"{name}.{key}": torch.tensor(value) for key, value in limits.items()}
    message = r"limits of '\S+mlp\.up_proj' \(input_min, .*each least must be at most its most"
    with pytest.raises(CheckpointError, match=message):
        clipped_tower(zoo.kernels("float32"), changes)
    assert clipped_tower(zoo.kernels("float32"), {}).config.clipped
