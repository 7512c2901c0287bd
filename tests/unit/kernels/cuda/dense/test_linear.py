"""The skinny linear and `exact` on the CPU, in Triton's interpreter.

Triton reads TRITON_INTERPRET when it is imported, so all checks run in one other process, which is
this file as a script. bfloat16 and real sizes are left to the GPU tests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from flashdraft.kernels.cuda.plan import LinearPlan
from flashdraft.kernels.interface import CAUSAL, PagedKeys, PageView
from flashdraft.kernels.torch_backend import TorchKernels
from tests.interpreted import judge, report

CPU = torch.device("cpu")
SMALL = LinearPlan(block_m=16, block_n=32, block_k=16, num_warps=4, num_stages=1)


def check_linear(plan: LinearPlan, depth: int, dtype: torch.dtype = torch.float32) -> None:
    """Twice with the same counters: a call leaves them as it found them."""
    from flashdraft.kernels.cuda.dense.linear import multiply_rows

    arrivals = torch.zeros(6, dtype=torch.int32)
    weight = torch.randn(70, depth).to(dtype)  # the last tiles are partly filled
    close = 1e-5 if dtype == torch.float32 else 2e-3
    for num_rows in (1, 19):
        x = torch.randn(num_rows, depth + 5).to(dtype)[:, :depth]  # rows need not touch
        found = multiply_rows(x, weight, plan, arrivals)
        expected = x.float() @ weight.float().T
        assert found.dtype == dtype
        torch.testing.assert_close(found.float(), expected, atol=8 * close, rtol=close)
        assert not arrivals.any()


def check_empty_linears() -> None:
    for exact in (False, True):
        kernels = make_kernels(exact)
        weight = torch.randn(7, 8)
        assert kernels.linear(torch.empty(0, 8), weight).shape == (0, 7)


def make_kernels(exact: bool) -> Any:
    from flashdraft.kernels.cuda.backend import TritonKernels

    return TritonKernels(CPU, torch.float32, exact)


def check_exact_linear() -> None:
    """A row alone, among 16 and among 100 has the same bits, whoever its neighbours are."""
    kernels = make_kernels(exact=True)
    weight = torch.randn(40, 70)
    x = torch.randn(100, 70)
    together = kernels.linear(x, weight)
    torch.testing.assert_close(together, x @ weight.T, atol=1e-4, rtol=1e-5)
    for rows in ([0], [41], [99], list(range(40, 56)), list(range(99, 60, -1))):
        assert torch.equal(kernels.linear(x[rows], weight), together[rows])


def view_of(context: int, rows: int, page_size: int = 16) -> PageView:
    """One sequence whose pages lie in a row; its first `context` keys are earlier ones."""
    return PageView(
        query_start=torch.tensor([0, rows], dtype=torch.int32),
        context_lens=torch.tensor([context], dtype=torch.int32),
        block_table=torch.arange(6, dtype=torch.int32).unsqueeze(0),
        slots=torch.empty(0, dtype=torch.int64),
        page_size=page_size,
        max_query_len=rows,
        max_key_len=context + rows,
    )


def check_exact_attention(window: int | None) -> None:
    """However a prompt is cut, every row has the same bits, and the right ones."""
    from flashdraft.kernels.cuda import plan as triton_plan

    triton_plan.EXACT_SPLIT_KEYS = triton_plan.EXACT_WINDOW_SPLIT_KEYS = 32
    kernels, reference = make_kernels(exact=True), TorchKernels(CPU, torch.float32)
    length, heads, dim = 70, 2, 16
    query = torch.randn(length, heads, dim)
    keys, values = torch.randn(2, 6, 16, 1, dim)

    def attend(backend: Any, first: int, last: int) -> Tensor:
        view = view_of(first, last - first)
        rows = query[first:last]
        return backend.attention(
            rows, PagedKeys(keys, values, view, scale=0.3, window=window, mask=CAUSAL)
        )

    whole = attend(kernels, 0, length)
    torch.testing.assert_close(whole, attend(reference, 0, length), atol=2e-6, rtol=2e-6)
    cuts = (0, 17, 64, 65, 70)
    pieces = [attend(kernels, *piece) for piece in zip(cuts, cuts[1:], strict=False)]
    assert torch.equal(torch.cat(pieces), whole)


CHECKS: dict[str, Callable[[], None]] = {
    "linear": lambda: check_linear(SMALL, 96),
    "linear, odd depth": lambda: check_linear(SMALL, 100),
    "linear, cut": lambda: check_linear(SMALL._replace(num_splits=3), 96),
    "linear, cut in five": lambda: check_linear(SMALL._replace(num_splits=5), 100),
    "linear, swapped": lambda: check_linear(SMALL._replace(swap=True), 100),
    "linear, swapped and cut": lambda: check_linear(SMALL._replace(num_splits=2, swap=True), 96),
    "linear, float16": lambda: check_linear(SMALL._replace(num_splits=2), 64, torch.float16),
    "nothing to do": check_empty_linears,
    "exact linear": check_exact_linear,
    "exact attention": lambda: check_exact_attention(None),
    "exact attention, window": lambda: check_exact_attention(40),
}


@pytest.mark.parametrize("name", CHECKS)
def test_interpreted(name: str, failures: dict[str, str]) -> None:
    judge(failures[name])


if __name__ == "__main__":
    report(CHECKS)
