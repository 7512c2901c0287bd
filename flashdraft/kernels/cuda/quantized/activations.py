# Triton's decorators carry no types that mypy can see.
# mypy: disallow-untyped-decorators=False
"""Rows of x in 8 bits, in Triton: as codes in the order of a weight's, or as floats again.

What is rounded, and how, is `kernels.quantized.code_rows`'s; both ways round alike.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashdraft.kernels.cuda import overlap
from flashdraft.kernels.cuda.overlap import wait
from flashdraft.kernels.cuda.quantized.layout import Code, PackedWeight
from flashdraft.kernels.kinds import Scheme
from flashdraft.kernels.quantized import LARGEST_CODES, SMALLEST_EXPONENT

FP8 = tl.constexpr(int(Code.FP8))
_SMALLEST = tl.constexpr(SMALLEST_EXPONENT)
_NOT_A_NUMBER = tl.constexpr(0x7FC00000)
_INFINITE = tl.constexpr(0x7F800000)
_FRACTION = tl.constexpr(0x7FFFFF)


class CodedRows(NamedTuple):
    """Rows in 8 bits, laid out as a weight's are (layout.py)."""

    codes: Tensor  # [num_rows, steps, lanes] int16
    scale: Tensor  # [num_rows, or more] float32, powers of two


def code_rows(x: Tensor, weight: PackedWeight, row_tile: int = 1) -> CodedRows:
    """x [num_rows, depth] as this weight's products take it; scales fill up tiles of rows."""
    num_rows, lanes = x.shape[0], weight.lanes
    shape = num_rows, weight.num_steps, lanes
    codes = torch.empty(shape, device=x.device, dtype=torch.int16)
    filled = -(-num_rows // row_tile) * row_tile
    scale = torch.empty(filled, device=x.device, dtype=torch.float32)
    _launch(x, weight, codes, scale)
    return CodedRows(codes, scale)


def round_rows(x: Tensor, weight: PackedWeight) -> Tensor:
    """x as its codes stand for it, in its own dtype."""
    output = torch.empty(x.shape, device=x.device, dtype=x.dtype)
    _launch(x, weight, output, None)
    return output


def _launch(x: Tensor, weight: PackedWeight, output: Tensor, scale: Tensor | None) -> None:
    num_rows, depth = x.shape
    if x.numel() == 0:
        return
    assert x.stride(1) == 1 and weight.shape[-1] == depth and weight.planes == 2
    steps, is_early = triton.next_power_of_2(weight.num_steps), overlap.can_overlap(x.device)
    block = steps * weight.lanes
    fraction, exponent = LARGEST_CODES[Scheme(weight.code.name.lower())]
    early = {"PDL": True, "launch_pdl": True} if is_early else {"PDL": False}
    _code[(num_rows,)](
        x,
        output,
        scale,
        x.stride(0),
        depth,
        weight.num_steps,
        LANES=weight.lanes,
        BLOCK=block,
        CODE=int(weight.code),
        LARGEST_FRACTION=fraction,
        LARGEST_EXPONENT=exponent,
        **early,
        num_warps=min(16, max(1, block // 512)),
    )


@triton.jit
def _code(
    x: tl.tensor,
    output: tl.tensor,
    scales: tl.tensor,  # None: values are written, not codes
    row_stride: tl.tensor,
    depth: tl.tensor,
    num_steps: tl.tensor,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,  # values of a plane
    CODE: tl.constexpr,
    LARGEST_FRACTION: tl.constexpr,
    LARGEST_EXPONENT: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One row: both planes of all its steps."""
    wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, BLOCK)
    low_place = places // LANES * (2 * LANES) + places % LANES
    high_place = low_place + LANES
    low = tl.load(x + row * row_stride + low_place, mask=low_place < depth, other=0.0)
    high = tl.load(x + row * row_stride + high_place, mask=high_place < depth, other=0.0)
    low, high = low.to(tl.float32), high.to(tl.float32)
    low_size = low.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    high_size = high.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    largest = tl.max(tl.maximum(low_size, high_size))  # also of what is no number
    exponent = (largest >> 23) - LARGEST_EXPONENT
    exponent += ((largest & _FRACTION) > LARGEST_FRACTION).to(tl.int32)
    exponent = tl.maximum(exponent, _SMALLEST + 127)
    bits = tl.where(largest >= _INFINITE, _NOT_A_NUMBER, exponent << 23)
    scale, inverse = bits.to(tl.float32, bitcast=True), (254 - exponent) << 23
    inverse = inverse.to(tl.float32, bitcast=True)
    if CODE == FP8:
        low_code, high_code = _round_fp8(low * inverse), _round_fp8(high * inverse)
    else:
        low_code, high_code = _round_int8(low * inverse), _round_int8(high * inverse)
    if scales is None:
        dtype: tl.constexpr = output.dtype.element_ty
        target = output + row * depth
        low_value, high_value = low_code.to(tl.float32) * scale, high_code.to(tl.float32) * scale
        tl.store(target + low_place, low_value.to(dtype), mask=low_place < depth)
        tl.store(target + high_place, high_value.to(dtype), mask=high_place < depth)
    else:
        low_bits = low_code.to(tl.uint8, bitcast=True).to(tl.int16)
        both = low_bits | (high_code.to(tl.uint8, bitcast=True).to(tl.int16) << 8)
        target = output + row * num_steps * LANES + places
        tl.store(target, both, mask=places < num_steps * LANES)
        tl.store(scales + row, scale)


@triton.jit
def _round_fp8(value: tl.tensor) -> tl.tensor:
    """The nearest e4m3, of two the even one: exact for the cast, which interpreters have wrong."""
    bits = value.to(tl.int32, bitcast=True)
    bits = (bits + (0x7FFFF + ((bits >> 20) & 1))) & -0x100000  # four bits, with the leading one
    small = (value + 24576.0) - 24576.0  # what is added has room for steps of 2 ** -9 only
    nearest = tl.where(tl.abs(value) < 0.015625, small, bits.to(tl.float32, bitcast=True))
    return nearest.to(tl.float8e4nv)


@triton.jit
def _round_int8(value: tl.tensor) -> tl.tensor:
    """The nearest integer, of two the even one: what is added has no room for fractions."""
    return ((value + 12582912.0) - 12582912.0).to(tl.int8)
