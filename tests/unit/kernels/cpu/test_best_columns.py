"""The greedy head of the torch and the native CPU backend."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashdraft.kernels.cpu import backend as cpu_backend
from flashdraft.kernels.torch_backend import TorchKernels


@pytest.fixture(params=["torch", "torch-bfloat16", "cpu-float32", "cpu-int8"])
def kernels(request: pytest.FixtureRequest) -> Any:
    if request.param.startswith("torch"):
        dtype = torch.bfloat16 if "bfloat16" in request.param else torch.float32
        return TorchKernels(torch.device("cpu"), dtype)
    if not cpu_backend.available():
        pytest.skip("the native kernels are not built")
    return cpu_backend.CpuKernels(quantize="int8" in request.param)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize(("multiplier", "softcap"), [(1.0, None), (0.6, 4.0)])
def test_best_columns_equal_the_logits(
    kernels: Any, multiplier: float, softcap: float | None
) -> None:
    x, weight = torch.randn(5, 64).to(kernels.dtype), kernels.pack(torch.randn(300, 64))
    logits = kernels.linear(x, weight).float() * multiplier
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    found = kernels.best_columns(x, weight, multiplier, softcap)
    chosen = logits.gather(1, found.index.unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(chosen, logits.amax(1), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found.logit, chosen, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found.log_total, logits.logsumexp(1), atol=1e-4, rtol=1e-5)
    assert (found.logit.dtype, found.log_total.dtype) == (torch.float32, torch.float32)


def test_forbidden_columns_never_win_and_count_nothing(kernels: Any) -> None:
    x, weight = torch.randn(9, 64).to(kernels.dtype), kernels.pack(torch.randn(300, 64))
    logits = torch.tanh(kernels.linear(x, weight).float() * 0.6 / 4.0) * 4.0
    forbidden = torch.zeros(300, dtype=torch.bool)
    forbidden[logits.argmax(1)] = True
    forbidden[:40] = True
    found = kernels.best_columns(x, weight, 0.6, 4.0, forbidden)
    assert not forbidden[found.index].any()
    left = logits.masked_fill(forbidden, -torch.inf)
    torch.testing.assert_close(found.logit, left.amax(1), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found.log_total, left.logsumexp(1), atol=1e-4, rtol=1e-5)


def test_a_row_does_not_depend_on_its_neighbours(kernels: Any) -> None:
    x, weight = torch.randn(19, 64).to(kernels.dtype), kernels.pack(torch.randn(300, 64))
    together = kernels.best_columns(x, weight, 0.6, 4.0)
    for i in range(19):
        alone = kernels.best_columns(x[i : i + 1], weight, 0.6, 4.0)
        for name in ("index", "logit", "log_total"):
            assert torch.equal(getattr(alone, name)[0], getattr(together, name)[i])


def test_unsound_rows_have_no_best_column(kernels: Any) -> None:
    x = torch.randn(3, 64).to(kernels.dtype)
    x[1, 7] = float("nan")
    found = kernels.best_columns(x, kernels.pack(torch.randn(300, 64))).index.tolist()
    assert found[1] == -1 and min(found[0], found[2]) >= 0


def test_no_rows(kernels: Any) -> None:
    found = kernels.best_columns(
        torch.empty(0, 64, dtype=kernels.dtype), kernels.pack(torch.randn(300, 64))
    )
    assert found.index.shape == found.logit.shape == found.log_total.shape == (0,)
