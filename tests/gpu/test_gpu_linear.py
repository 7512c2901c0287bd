"""The skinny linear, the head's logits and `exact` on a real GPU, at Gemma 4's sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
BF16 = torch.bfloat16
ROWS = (1, 7, 16, 17, 33, 64)
SHAPES = [(5376, 8192), (5376, 21504), (2816, 4096), (2816, 2112), (8192, 2816), (128, 2816)]
VOCABULARY = 100_003  # not a multiple of any tile


def triton_kernels(exact: bool = False, dtype: torch.dtype = BF16) -> Any:
    from flashdraft.kernels.cuda.backend import TritonKernels

    return TritonKernels(CUDA, dtype, exact)


def random_rows(num_rows: int, depth: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(num_rows, depth, device=CUDA).to(dtype)


def random_weight(out: int, depth: int, dtype: torch.dtype = BF16) -> Tensor:
    return (torch.randn(out, depth, device=CUDA) * depth**-0.5).to(dtype)


def assert_close(found: Tensor, x: Tensor, weight: Tensor) -> None:
    expected = x.float() @ weight.float().T
    assert (found.float() - expected).norm() <= 4e-3 * expected.norm()


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_linears_equal_the_reference(shape: tuple[int, int], exact: bool) -> None:
    kernels, weight = triton_kernels(exact), random_weight(*shape)
    for num_rows in ROWS:
        x = random_rows(num_rows, shape[1])
        found = kernels.linear(x, weight)
        assert_close(found, x, weight)
        for _ in range(20):  # whoever comes last, the parts are added in their order
            assert torch.equal(kernels.linear(x, weight), found), "two runs differ"
    assert not kernels._arrivals.any()


def test_every_tile_form_equals_the_reference() -> None:
    from flashdraft.kernels.cuda.dense.linear import multiply_rows
    from flashdraft.kernels.cuda.plan import LinearPlan

    weight, arrivals = random_weight(1000, 2112), torch.zeros(512, device=CUDA, dtype=torch.int32)
    x = random_rows(50, 2112)
    for block_m, block_n, splits, swap in (
        (16, 16, 5, False),
        (16, 64, 1, True),
        (32, 128, 3, True),
        (64, 64, 16, False),
        (128, 128, 2, False),
    ):
        plan = LinearPlan(block_m, block_n, 128, 4, 3, splits, swap)
        assert_close(multiply_rows(x, weight, plan, arrivals), x, weight)
    assert not arrivals.any()


def test_a_captured_linear_is_replayed_with_other_rows() -> None:
    kernels, weight = triton_kernels(), random_weight(5376, 8192)
    x = random_rows(16, 8192)
    kernels.linear(x, weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = kernels.linear(kernels.linear(x, weight) @ weight, weight)
    for _ in range(3):
        x.copy_(random_rows(16, 8192))
        graph.replay()
        expected = F.linear(F.linear(x, weight) @ weight, weight)
        assert (found.float() - expected.float()).norm() <= 2e-2 * expected.float().norm()


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("softcap", [None, 30.0])
@pytest.mark.parametrize("num_rows", [1, 16, 33, 100, 480])
def test_the_head_equals_the_reference(
    num_rows: int, softcap: float | None, exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # cuBLAS may cut few rows' sums of this shape in parts and round each: the reference does not
    matmul = torch.backends.cuda.matmul
    monkeypatch.setattr(matmul, "allow_bf16_reduced_precision_reduction", False)
    kernels, weight = triton_kernels(exact), random_weight(VOCABULARY, 1024)
    x = random_rows(num_rows, 1024) * 4
    found = kernels.finish_logits(kernels.linear(x, weight), 0.8, softcap)
    logits = (x.float() @ weight.float().T).to(BF16).float() * 0.8  # rounded as logits are
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    chosen = logits.gather(1, kernels.argmax(found).unsqueeze(1)).squeeze(1)
    # sums in another order may round to the neighbouring number
    assert (logits.amax(-1) - chosen).max() < 0.15, "another column is clearly better"
    torch.testing.assert_close(found, logits, atol=0.15, rtol=1e-4)
    # and few do: where a row's largest one does, so does what the row sums up to
    assert ((found - logits).abs() > 1e-3).float().mean() < 0.01


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize("num_rows", [1, 16, 480])
def test_finished_logits_equal_the_reference(num_rows: int, dtype: torch.dtype) -> None:
    products = random_rows(num_rows, VOCABULARY, dtype) * 20
    forbidden = torch.rand(VOCABULARY, device=CUDA) < 0.1
    expected = torch.tanh(products.double() * 0.8 / 30.0) * 30.0
    expected[:, forbidden] = -torch.inf
    found = triton_kernels().finish_logits(products, 0.8, 30.0, forbidden)
    torch.testing.assert_close(found.double(), expected, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("shape", [*SHAPES, (16384, 5376)])
def test_exact_linears_do_not_depend_on_the_number_of_rows(shape: tuple[int, int]) -> None:
    kernels, weight = triton_kernels(exact=True), random_weight(*shape)
    x = random_rows(1100, shape[1])  # more than one piece
    together = kernels.linear(x, weight)
    assert_close(together, x, weight)
    for rows in ([0], [1099], [1030], range(5, 21), range(63, 163), range(999, 899, -1)):
        chosen = list(rows)
        assert torch.equal(kernels.linear(x[chosen], weight), together[chosen])


def test_the_exact_head_does_not_depend_on_the_number_of_rows() -> None:
    kernels, weight = triton_kernels(exact=True), random_weight(VOCABULARY, 1024)
    x = random_rows(200, 1024)
    together = kernels.finish_logits(kernels.linear(x, weight), 1.0, 30.0)
    for rows in ([0], [199], range(5, 21), range(150, 50, -1)):
        chosen = list(rows)
        alone = kernels.finish_logits(kernels.linear(x[chosen], weight), 1.0, 30.0)
        assert torch.equal(alone, together[chosen])
