"""residual_norms and choose_experts where they are composed of other operations: torch and CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flashdraft.kernels.cpu import backend
from flashdraft.kernels.interface import Residual
from flashdraft.kernels.kinds import Activation
from flashdraft.kernels.torch_backend import TorchKernels

CPU = torch.device("cpu")
EPS = 1e-6


@pytest.fixture(params=["torch", "cpu"])
def kernels(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(0)
    if request.param == "torch":
        return TorchKernels(CPU, torch.float32)
    if not backend.available():
        pytest.skip("the native CPU kernels are not built")
    return backend.CpuKernels(quantize=False)


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight


@pytest.mark.parametrize("num_outputs", [0, 1, 3])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("num_deltas", [1, 2])
def test_residual_norms_follow_their_definition(
    kernels: Any, num_deltas: int, scaled: bool, num_outputs: int
) -> None:
    x, *deltas = torch.randn(1 + num_deltas, 5, 48)
    weights = torch.randn(num_deltas, 48)
    post = torch.randn(48) if num_deltas == 2 else None
    scalar = torch.tensor([0.7]) if scaled else None
    outputs = list(torch.randn(num_outputs, 48))
    pairs = list(zip(deltas, weights, strict=True))

    def run(rows: slice) -> list[Tensor]:
        mine = [(delta[rows], weight) for delta, weight in pairs]
        stream, normed = kernels.residual_norms(Residual(x[rows], mine, post, scalar), outputs, EPS)
        return [stream, *normed]

    delta = sum((norm(d, w) for d, w in pairs), torch.zeros(5, 48))
    delta = delta if post is None else norm(delta, post)
    stream = (x + delta) * (0.7 if scaled else 1.0)
    together = run(slice(0, 5))
    torch.testing.assert_close(together, [stream, *(norm(stream, w) for w in outputs)])
    for i in range(5):
        alone = run(slice(i, i + 1))
        assert all(torch.equal(a[0], b[i]) for a, b in zip(alone, together, strict=True))


def test_the_choice_is_normalised_before_it_is_scaled(kernels: Any) -> None:
    logits, scale = torch.randn(6, 10) * 2, torch.rand(10) + 0.5
    chosen, weights = kernels.choose_experts(logits, 3, scale)
    assert chosen.dtype == torch.int64 and weights.dtype == torch.float32
    assert torch.equal(chosen, logits.argsort(-1, descending=True)[:, :3])
    kept = logits.gather(1, chosen).softmax(-1)  # the same as dividing by the sum of the kept
    torch.testing.assert_close(weights, kept * scale[chosen])
    alone = [kernels.choose_experts(logits[i : i + 1], 3, scale)[1] for i in range(6)]
    assert torch.equal(torch.cat(alone), weights)


def test_packed_experts_are_what_experts_takes(kernels: Any) -> None:
    gate_up, down = torch.randn(3, 16, 12), torch.randn(3, 12, 8)
    x, weights = torch.randn(4, 12), torch.rand(4, 1)
    packed = kernels.pack_experts(gate_up), kernels.pack_experts(down)
    chosen = torch.tensor([[2], [0], [2], [1]])
    found = kernels.experts(x, *packed, chosen, weights, Activation.SILU)
    for row, expert in enumerate(chosen[:, 0].tolist()):
        gate, up = (gate_up[expert] @ x[row]).chunk(2)
        inner = torch.nn.functional.silu(gate) * up
        torch.testing.assert_close(
            found[row], weights[row] * (down[expert] @ inner), atol=1e-4, rtol=1e-4
        )
