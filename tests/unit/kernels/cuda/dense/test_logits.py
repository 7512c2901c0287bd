"""From products to logits on the CPU, in Triton's interpreter.

Triton reads TRITON_INTERPRET when it is imported, so all checks run in one other process, which is
this file as a script.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.interpreted import judge, report

NUM_COLUMNS = 150  # the last block is partly filled
BLOCK = 64


def make_products(dtype: torch.dtype) -> Tensor:
    """Rows with ties, with numbers far beyond any cap, and with infinity."""
    products = 6 * torch.randn(6, NUM_COLUMNS)
    products[1] = products[1].round()
    products[2, [70, 149]] = 9.5
    products[3] *= 1e4
    products[4, 7], products[4, 100] = math.inf, -math.inf
    return products.to(dtype)


def check(dtype: torch.dtype, multiplier: float, softcap: float | None, forbids: bool) -> None:
    from flashdraft.kernels.cuda.dense import logits

    logits.BLOCK = BLOCK
    products, forbidden = make_products(dtype), None
    expected = products.double() * multiplier
    if softcap is not None:
        expected = torch.tanh(expected / softcap) * softcap
    if forbids:
        forbidden = torch.rand(NUM_COLUMNS) < 0.2
        forbidden[expected.argmax(1)] = forbidden[64:128] = True
        expected[:, forbidden] = -math.inf
    found = logits.finish_logits(products, multiplier, softcap, forbidden)
    assert found.dtype is torch.float32
    close = 1e-6 * (softcap or 1.0)
    torch.testing.assert_close(found.double(), expected, atol=close, rtol=1e-6)


def check_unsound() -> None:
    """What is not a number stays so, unless it is forbidden."""
    from flashdraft.kernels.cuda.dense.logits import finish_logits

    products = torch.zeros(2, NUM_COLUMNS)
    products[:, 5] = products[1, 140] = math.nan
    forbidden = torch.zeros(NUM_COLUMNS, dtype=torch.bool)
    forbidden[5] = True
    for softcap in (None, 5.0):
        found = finish_logits(products, 1.0, softcap, forbidden)
        assert found[:, 5].tolist() == [-math.inf, -math.inf]
        assert found.isnan().nonzero().tolist() == [[1, 140]]


def check_backend() -> None:
    """As the reference's; every row as if it were alone; and no rows at all."""
    from flashdraft.kernels.cuda.backend import TritonKernels
    from flashdraft.kernels.torch_backend import TorchKernels

    arguments = torch.device("cpu"), torch.float32
    kernels, products = TritonKernels(*arguments), make_products(torch.bfloat16)
    forbidden = torch.rand(NUM_COLUMNS) < 0.2
    found = kernels.finish_logits(products, 0.7, 5.0, forbidden)
    expected = TorchKernels(*arguments).finish_logits(products, 0.7, 5.0, forbidden)
    torch.testing.assert_close(found, expected, atol=5e-6, rtol=1e-6)
    for row in range(len(products)):
        alone = kernels.finish_logits(products[row : row + 1], 0.7, 5.0, forbidden)
        assert torch.equal(alone[0], found[row])
    assert kernels.finish_logits(products[:0]).shape == (0, NUM_COLUMNS)


CHECKS: dict[str, Callable[[], None]] = {"unsound": check_unsound, "the backend": check_backend}
for _dtype, _multiplier, _softcap, _forbids in itertools.product(
    (torch.float32, torch.bfloat16), (1.0, 0.7), (None, 5.0), (False, True)
):
    _words = [str(_dtype).removeprefix("torch."), *["scaled"] * (_multiplier != 1.0)]
    _words += ["capped"] * (_softcap is not None) + ["forbidding"] * _forbids
    CHECKS[", ".join(_words)] = lambda d=_dtype, m=_multiplier, s=_softcap, f=_forbids: check(
        d, m, s, f
    )


@pytest.mark.parametrize("name", CHECKS)
def test_interpreted(name: str, failures: dict[str, str]) -> None:
    judge(failures[name])


if __name__ == "__main__":
    report(CHECKS)
