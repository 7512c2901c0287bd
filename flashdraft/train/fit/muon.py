"""Muon: momentum whose matrices are made orthogonal before they are applied.

A gradient matrix has a few strong directions that drown the others; orthogonalised, all of them
move by the same amount. Matrices of one shape are handled together, in bfloat16 on a GPU and in
float32 on a CPU, where bfloat16 products are slow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

# A fifth-degree polynomial that takes every singular value in (0, 1] near 1 in a few rounds. It is
# steep at 0 and settles between about 0.7 and 1.2, which serves as well as 1 and is sooner there.
_LINEAR, _CUBIC, _QUINTIC = 3.4445, -4.7750, 2.0315
_ROUNDS = 5
_UPDATE_RMS = 0.2  # about what AdamW's updates have, so that one learning rate serves both


class Muon(Optimizer):
    """For the inner matrices of a network; vectors and embeddings are another optimizer's."""

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        *,
        lr: float,
        weight_decay: float,
        momentum: float = 0.95,
    ) -> None:
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Apply the gradients."""
        loss = None if closure is None else closure()
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[nn.Parameter]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape.setdefault(parameter.shape, []).append(parameter)
            for alike in by_shape.values():
                self._update(alike, group)
        return loss

    def _update(self, alike: list[nn.Parameter], group: dict[str, Any]) -> None:
        """One step of matrices of one shape."""
        momentum, rate = group["momentum"], group["lr"]
        gradients: list[Tensor] = [p.grad for p in alike if p.grad is not None]
        averages = [self._average(parameter) for parameter in alike]
        torch._foreach_lerp_(averages, gradients, 1 - momentum)
        ahead = torch.stack(gradients).lerp_(torch.stack(averages), momentum)  # Nesterov's
        rows, columns = alike[0].shape
        values: list[Tensor] = list(alike)
        scale = rate * _UPDATE_RMS * max(rows, columns) ** 0.5
        torch._foreach_mul_(values, 1 - rate * group["weight_decay"])
        torch._foreach_add_(values, list(orthogonalise(ahead).unbind()), alpha=-scale)

    def _average(self, parameter: nn.Parameter) -> Tensor:
        state = self.state[parameter]
        if "average" not in state:
            state["average"] = torch.zeros_like(parameter)
        average: Tensor = state["average"]
        return average


def orthogonalise(matrices: Tensor) -> Tensor:
    """[count, rows, columns]: the same singular vectors, every singular value about 1."""
    dtype = torch.bfloat16 if matrices.is_cuda else torch.float32
    is_tall = matrices.shape[1] > matrices.shape[2]
    found = (matrices.mT if is_tall else matrices).to(dtype)
    found = found / torch.linalg.matrix_norm(found, keepdim=True).clamp(min=1e-7)
    for _ in range(_ROUNDS):
        gram = found @ found.mT
        found = torch.baddbmm(
            found, torch.baddbmm(gram, gram, gram, beta=_CUBIC, alpha=_QUINTIC), found, beta=_LINEAR
        )
    return (found.mT if is_tall else found).to(matrices.dtype)
