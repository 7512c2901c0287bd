"""A tower's matrices: of the same inputs side by side, with limits where a tower has them.

In a clipped tower what goes into each matrix is kept between two values, and what comes out between
two others. Matrices are one product where they allow the same inputs, as all do without limits.
"""

from __future__ import annotations

from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashdraft.kernels.interface import Kernels, Residual
from flashdraft.kernels.kinds import Activation


class MatrixLimits(NamedTuple):
    """The least and the most of what goes into a matrix, and of what comes out."""

    inputs: tuple[float, float]
    products: tuple[float, float]


class TowerMatrix(NamedTuple):
    """One of the matrices."""

    weight: Tensor  # [features, values]
    limits: MatrixLimits | None


class _Clipped(NamedTuple):
    """Matrices that allow the same inputs."""

    weight: Any  # packed
    inputs: tuple[float, float]
    least: Tensor  # [features], of the products
    most: Tensor


class Linears:
    """Matrices of the same inputs; what they make of these lies side by side."""

    def __init__(self, kernels: Kernels, *parts: TowerMatrix) -> None:
        self._kernels = kernels
        self._whole: Any | None = None  # packed, of a tower without limits
        self._clipped: list[_Clipped] = []
        limited = [(part.weight, part.limits) for part in parts if part.limits is not None]
        if not limited:
            self._whole = kernels.pack(*(part.weight for part in parts), quantize=False)
        for inputs, some in groupby(limited, lambda one: one[1].inputs):
            weights, limits = zip(*some, strict=True)
            packed = kernels.pack(*weights, quantize=False)
            sizes = torch.tensor([len(weight) for weight in weights])
            bounds = torch.tensor([one.products for one in limits]).repeat_interleave(sizes, dim=0)
            least, most = bounds.T.contiguous().to(kernels.device, kernels.dtype)
            self._clipped.append(_Clipped(packed, inputs, least, most))

    def __call__(self, x: Tensor) -> Tensor:
        """[num_rows, features]."""
        if self._whole is not None:
            return self._kernels.linear(x, self._whole)
        made = [
            self._kernels.linear(x.clamp(*one.inputs), one.weight).clamp(one.least, one.most)
            for one in self._clipped
        ]
        return made[0] if len(made) == 1 else torch.cat(made, dim=1)

    def of_residual(
        self, residual: Residual, norm: Tensor, eps: float, activation: Activation | None = None
    ) -> tuple[Tensor, Tensor]:
        """The stream, and these of its norm; with an activation [gate | up] as one."""
        kernels = self._kernels
        if self._whole is not None:
            return kernels.residual_linear(residual, norm, eps, self._whole, activation)
        stream, (normed,) = kernels.residual_norms(residual, [norm], eps)
        made = self(normed)
        return stream, made if activation is None else kernels.gated(made, activation)
