"""What is asked of every product with weights in few bits on a GPU, whichever kernel makes it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from flashdraft.kernels.cuda.quantized.layout import pack_quantized
from flashdraft.kernels.kinds import Activation
from tests.unit.kernels.cuda.quantized.test_linear import FORMATS

Multiply = Callable[..., Tensor]  # (x, packed weight, activation or nothing)


def distance(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected).norm() / expected.norm())


def check_gates(
    multiply: Multiply, name: str, num_rows: int, activation: Activation, device: torch.device
) -> None:
    from flashdraft.kernels.torch_backend import TorchKernels

    torch.manual_seed(1)
    weight = FORMATS[name](out=2 * 2112, depth=2816).to(device)
    x = torch.randn(num_rows, 2816, device=device).bfloat16()
    expected = TorchKernels(device, torch.float32).gated(
        x.float() @ weight.dequantize().T, activation
    )
    assert distance(multiply(x, pack_quantized(weight), activation), expected) < 0.006


def check_sizes(multiply: Multiply, sizes: Tensor) -> None:
    """Rows of very different sizes: codes are subnormal numbers until they are multiplied."""
    weight = FORMATS["q4_0"](out=256, depth=1024).to(sizes.device)
    x = torch.randn(len(sizes), 1024, device=sizes.device).bfloat16()
    x *= sizes[:, None].bfloat16()
    expected = x.float() @ weight.dequantize().T
    found = multiply(x, pack_quantized(weight))
    assert max(distance(a, b) for a, b in zip(found, expected, strict=True)) < 0.003


def check_every_fp8_number(multiply: Multiply, places: Tensor) -> None:
    """Each row of x is one at a place of its own, so that columns are codes."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    weight = FORMATS["fp8 row"](out=256, depth=1024)
    finite = codes.float().nan_to_num(0).to(torch.float8_e4m3fn)
    weight.codes[:] = finite[:, None].expand(256, 1024)
    weight = weight.to(places.device)
    x = torch.zeros(len(places), 1024, device=places.device).bfloat16()
    x[torch.arange(len(places)), places] = 1
    found = multiply(x, pack_quantized(weight))
    expected = x.float() @ weight.dequantize().T
    torch.testing.assert_close(found.float(), expected, rtol=2**-8, atol=0)


def check_same_bits(multiply: Multiply, name: str, num_rows: int, device: torch.device) -> None:
    torch.manual_seed(2)
    packed = pack_quantized(FORMATS[name](out=5376, depth=8192).to(device))
    x = torch.randn(num_rows, 8192, device=device).bfloat16()
    first = multiply(x, packed)
    assert all(torch.equal(multiply(x, packed), first) for _ in range(20))
