"""Which way rows go through quantised weights, by their number, in Triton's interpreter.

What runs in the interpreter is this file as a script (tests/interpreted.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch

from flashdraft.kernels.cuda.quantized.layout import pack_quantized
from flashdraft.kernels.interface import Activation
from flashdraft.kernels.quantized import stack_experts
from flashdraft.kernels.torch_backend import TorchKernels
from tests.interpreted import judge, report
from tests.unit.kernels.cuda.quantized.test_linear import FORMATS

CPU = torch.device("cpu")


def make_kernels(exact: bool = False) -> Any:
    from flashdraft.kernels.cuda.backend import TritonKernels

    return TritonKernels(CPU, torch.float32, exact)


@contextmanager
def counting(module: ModuleType, name: str) -> Iterator[list[tuple[Any, ...]]]:
    """The arguments of every call of a module's function."""
    calls: list[tuple[Any, ...]] = []
    function = getattr(module, name)

    def count(*arguments: Any, **named: Any) -> Any:
        calls.append(arguments)
        return function(*arguments, **named)

    setattr(module, name, count)
    try:
        yield calls
    finally:
        setattr(module, name, function)


def check_linear(num_rows: int, format: str, exact: bool = False, float_bytes: int = 0) -> int:
    """The product is right; how many pieces of the weight became floats for it."""
    from flashdraft.kernels.cuda import quantized_backend as backend

    kernels, weight = make_kernels(exact), FORMATS[format](out=200)
    x, whole = torch.randn(num_rows, weight.shape[1]), backend.FLOAT_BYTES
    backend.FLOAT_BYTES = float_bytes or whole
    try:
        with counting(backend, "dequantize") as calls:
            found = kernels.linear(x, pack_quantized(weight))
    finally:
        backend.FLOAT_BYTES = whole
    torch.testing.assert_close(found, x @ weight.dequantize().T, atol=2e-3, rtol=1e-5)
    assert not kernels._arrivals.any()
    return len(calls)


def check_codes_are_read(num_rows: int, format: str) -> None:
    assert check_linear(num_rows, format) == 0


def check_floats_are_read() -> None:
    assert check_linear(193, "q4_0") == 1
    assert check_linear(193, "q4_0", exact=True) == 0
    # 256 deep: a quarter of a tile of rows, three, two tiles; a piece is a whole number of tiles
    pieces = [check_linear(193, "q8_0", float_bytes=512 * rows) for rows in (32, 96, 256)]
    assert pieces == [2, 2, 1]


def check_experts(num_rows: int, num_floats: int) -> None:
    from flashdraft.kernels.cuda import quantized_backend

    kernels, activation = make_kernels(), Activation.GELU_TANH
    gate_up = stack_experts([FORMATS["q4_0"](out=64, depth=64) for _ in range(4)])
    down = stack_experts([FORMATS["q8_0"](out=64, depth=32) for _ in range(4)])
    chosen, weights = (
        torch.rand(num_rows, 4).argsort(1)[:, :2].contiguous(),
        torch.rand(num_rows, 2),
    )
    x = torch.randn(num_rows, 64) / 8
    packed = pack_quantized(gate_up), pack_quantized(down)
    with (
        counting(quantized_backend, "dequantize") as floats,
        counting(quantized_backend, "mix_quantized") as pieces,
    ):
        found = kernels.experts(x, *packed, chosen, weights, activation)
    assert len(floats) == num_floats
    assert [len(piece[0]) for piece in pieces] == ([] if num_floats else [64] * (num_rows // 64))
    expected = TorchKernels(CPU, torch.float32).experts(
        x, list(gate_up.dequantize()), list(down.dequantize()), chosen, weights, activation
    )
    largest = float(expected.abs().max())
    torch.testing.assert_close(found, expected, atol=2e-5 * largest, rtol=0.0)
    assert not kernels._arrivals.any()


CHECKS: dict[str, Callable[[], None]] = {
    **{
        f"{name}, {rows} rows": lambda n=name, m=rows: check_codes_are_read(m, n)
        for name, rows in (("q4_0", 65), ("q4_0", 130), ("q4_0", 192), ("q6_k", 130))
    },
    "193 rows": check_floats_are_read,
    "experts, 512 rows": lambda: check_experts(512, num_floats=0),
    "experts, 513 rows": lambda: check_experts(513, num_floats=2),
}


@pytest.mark.parametrize("name", CHECKS)
def test_interpreted(name: str, failures: dict[str, str]) -> None:
    judge(failures[name])


def test_there_are_counters_for_the_largest_head() -> None:
    pytest.importorskip("triton")
    from flashdraft.kernels.cuda.backend import MAX_TILES
    from flashdraft.kernels.cuda.quantized.linear import plan_quantized
    from flashdraft.kernels.cuda.quantized_backend import FEW_ROWS

    plan = plan_quantized(FEW_ROWS, pack_quantized(FORMATS["q4_0"]()), num_processors=132)
    assert -(-FEW_ROWS // plan.block_m) * (262144 // plan.block_n) <= MAX_TILES


if __name__ == "__main__":
    report(CHECKS)
