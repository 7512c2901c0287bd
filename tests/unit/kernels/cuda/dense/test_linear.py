"""The skinny linear, the greedy head and `exact` on the CPU, in Triton's interpreter.

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
        assert kernels.best_columns(torch.empty(0, 8), weight).index.shape == (0,)


def check_best(swap: bool, multiplier: float, softcap: float | None) -> None:
    from flashdraft.kernels.cuda.dense.best import best_columns

    x, weight = torch.randn(19, 40), torch.randn(133, 40)
    weight[100] = weight[37] = 2 * x[2] / x[2].norm()  # equals: the first of them, in two tiles
    found = best_columns(x, weight, SMALL._replace(swap=swap), multiplier, softcap)
    expected = TorchKernels(CPU, torch.float32).best_columns(x, weight, multiplier, softcap)
    assert found.index.tolist() == expected.index.tolist()
    torch.testing.assert_close(found.logit, expected.logit, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found.log_total, expected.log_total, atol=1e-5, rtol=1e-5)


def check_forbidden(softcap: float | None) -> None:
    """Columns that must not win, a whole tile of them too; fused, and of logits made before."""
    from flashdraft.kernels.cuda.dense import best as triton_best

    x, weight = torch.randn(19, 40), torch.randn(133, 40)
    reference = TorchKernels(CPU, torch.float32)
    forbidden = torch.zeros(133, dtype=torch.bool)
    forbidden[reference.best_columns(x, weight, 0.7, softcap).index] = True
    forbidden[32:64] = forbidden[132] = True
    expected = reference.best_columns(x, weight, 0.7, softcap, forbidden)
    triton_best.LOOK_BLOCK = 32
    for found in (
        triton_best.best_columns(x, weight, SMALL, 0.7, softcap, forbidden),
        triton_best.best_of_logits(x @ weight.T, 0.7, softcap, forbidden),
        make_kernels(exact=True).best_columns(x, weight, 0.7, softcap, forbidden),
    ):
        assert found.index.tolist() == expected.index.tolist()
        torch.testing.assert_close(found.logit, expected.logit, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(found.log_total, expected.log_total, atol=1e-5, rtol=1e-5)


def check_unsound_rows() -> None:
    """NaN and infinite logits are told apart from every column; their neighbours are not harmed."""
    from flashdraft.kernels.cuda.dense.best import best_columns

    x, weight = torch.randn(5, 16).abs(), torch.randn(70, 16)
    x[1, 3], x[3] = float("nan"), 1e38
    weight[33] = 1e3
    found = best_columns(x, weight, SMALL, 1.0, None).index.tolist()
    expected = TorchKernels(CPU, torch.float32).best_columns(x, weight).index.tolist()
    assert found == expected == [33, -1, 33, -1, 33]


def check_best_of_logits(softcap: float | None) -> None:
    """Over logits that are there already, in more than one piece: the same as over the product."""
    from flashdraft.kernels.cuda.dense import best as triton_best

    triton_best.LOOK_BLOCK = 64
    logits = torch.randn(7, 150)
    logits[2, 70] = logits[2, 149] = 9.0
    logits[4, 140] = float("nan")
    found = triton_best.best_of_logits(logits, 0.7, softcap)
    expected = TorchKernels(CPU, torch.float32).best_columns(logits, torch.eye(150), 0.7, softcap)
    sound = [0, 1, 2, 3, 5, 6]
    assert found.index[sound].tolist() == expected.index[sound].tolist() and found.index[2] == 70
    assert found.index[4] == -1
    for name in ("logit", "log_total"):
        pair = getattr(found, name)[sound], getattr(expected, name)[sound]
        torch.testing.assert_close(*pair, atol=1e-5, rtol=1e-5)
    assert triton_best.best_of_logits(logits[:0], 1.0, softcap).index.shape == (0,)


def check_many_rows() -> None:
    """More rows than the fused head takes, in more than one piece."""
    from flashdraft.kernels.cuda import dense_backend

    x, weight = torch.randn(300, 16), torch.randn(40, 16)
    dense_backend.MAX_LOGITS_BYTES = 270 * 40 * 4
    found = make_kernels(exact=False).best_columns(x, weight, 0.7, 5.0)
    expected = TorchKernels(CPU, torch.float32).best_columns(x, weight, 0.7, 5.0)
    assert torch.equal(found.index, expected.index)
    torch.testing.assert_close(found.logit, expected.logit, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found.log_total, expected.log_total, atol=1e-5, rtol=1e-5)


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


def check_exact_best() -> None:
    kernels = make_kernels(exact=True)
    weight = torch.randn(90, 64)
    x = torch.randn(40, 64)
    together = kernels.best_columns(x, weight, 0.5, 30.0)
    for rows in ([0], [21], list(range(10, 26))):
        alone = kernels.best_columns(x[rows], weight, 0.5, 30.0)
        assert torch.equal(alone.index, together.index[rows])
        assert torch.equal(alone.logit, together.logit[rows])
        assert torch.equal(alone.log_total, together.log_total[rows])


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
    "best": lambda: check_best(False, 1.0, None),
    "best, scaled and capped": lambda: check_best(False, 0.7, 5.0),
    "best, swapped": lambda: check_best(True, 0.7, 5.0),
    "best of logits": lambda: check_best_of_logits(None),
    "best of logits, capped": lambda: check_best_of_logits(5.0),
    "best of many rows": check_many_rows,
    "best but for forbidden columns": lambda: check_forbidden(None),
    "best but for forbidden columns, capped": lambda: check_forbidden(5.0),
    "unsound rows": check_unsound_rows,
    "exact linear": check_exact_linear,
    "exact best": check_exact_best,
    "exact attention": lambda: check_exact_attention(None),
    "exact attention, window": lambda: check_exact_attention(40),
}


@pytest.mark.parametrize("name", CHECKS)
def test_interpreted(name: str, failures: dict[str, str]) -> None:
    judge(failures[name])


if __name__ == "__main__":
    report(CHECKS)
