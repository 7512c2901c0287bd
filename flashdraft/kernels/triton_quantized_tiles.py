# Triton's decorators carry no types that mypy can see.
# mypy: disallow-untyped-decorators=False
"""Tiles of a product with quantised weights, inside a Triton kernel. CUDA only.

Codes become bfloat16 in registers, exactly, on their way into the tensor cores: a shift and a mask
put a code into the mantissa of a number whose exponent is known, and one addition takes the rest
away. The scale of a group multiplies its partial sum in float32, so nothing of a format is rounded.
The weight is the left operand: a warp holds sixteen of its rows, and eight or more rows of x.

How weights lie in memory is triton_quantized_layout.py's; who launches what, triton_quantized.py's.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import triton
import triton.language as tl

from flashdraft.kernels.triton_quantized_layout import ROW_TILE, Code, Number, PackedWeight

# Half a tile of weights: what two warps hold. The scales of more rows than there are threads would
# be shared out over shared memory at every step.
HALF = tl.constexpr(ROW_TILE // 2)
INT4 = tl.constexpr(int(Code.INT4))
INT6 = tl.constexpr(int(Code.INT6))
INT8 = tl.constexpr(int(Code.INT8))
NONE = tl.constexpr(int(Number.NONE))
FLOAT16 = tl.constexpr(int(Number.FLOAT16))
BFLOAT16 = tl.constexpr(int(Number.BFLOAT16))
FLOAT32 = tl.constexpr(int(Number.FLOAT32))
UNSIGNED = tl.constexpr(int(Number.UNSIGNED))
SUPER = tl.constexpr(256)

_ONE, _MINUS_ZERO, _TO_THE_120 = 0x3F80, 0x8000, 0x7B80  # as bfloat16


class Format(NamedTuple):
    """What a kernel must know of a weight when it is compiled."""

    code: int
    zero: int
    planes: int
    lanes: int
    groups_per_step: int
    steps_per_group: int
    scale: int
    minimum: int
    is_whole: bool
    unpack: tuple[str, ...]  # by plane; none where Triton interprets
    unpack_high: tuple[str, ...]


def describe(weight: PackedWeight) -> Format:
    """A weight's format."""
    is_native = weight.codes.device.type != "cpu"
    minimum = Number.NONE if weight.minimum is None else weight.minimum.kind
    return Format(
        int(weight.code),
        weight.zero,
        weight.planes,
        weight.lanes,
        weight.groups_per_step,
        weight.steps_per_group,
        int(weight.scale.kind),
        int(minimum),
        weight.is_whole,
        *(_unpackings(weight.code, weight.zero) if is_native else ((), ())),
    )


@functools.cache
def _unpackings(code: Code, zero: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The instructions of every plane, and those of its high bits."""
    planes = range(4)
    low = tuple(_unpacking(code, plane, zero) for plane in planes)
    return low, tuple(_unpacking_high(plane, zero) for plane in planes)


def _twice(bits: int) -> str:
    return f"0x{bits * 0x10001:08X}"


def _unpacking(code: Code, plane: int, zero: int) -> str:
    """PTX: two int16 of codes into the bfloat16 values of a plane. 0xEA is (a & b) | c."""
    if code in (Code.INT4, Code.INT6):
        minus = 0xC300 + (zero if code is Code.INT4 else 0)  # -(128 + zero)
        return (
            "{ .reg .b32 t, a, b; "
            f"mov.b32 a, {_twice(_ONE)}; mov.b32 b, {_twice(minus)}; shr.u32 t, $1, {4 * plane}; "
            f"lop3.b32 t, t, {_twice(0x000F)}, {_twice(0x4300)}, 0xEA; "
            "fma.rn.bf16x2 $0, t, a, b; }"
        )
    if code is Code.INT8:  # 128 + the lower seven bits, less 128 or, if negative, 256
        return (
            "{ .reg .b32 t, u, a; "
            f"mov.b32 a, {_twice(_ONE)}; shr.u32 t, $1, {8 * (plane % 2)}; "
            f"lop3.b32 u, t, {_twice(0x0080)}, {_twice(0xC300)}, 0xEA; "
            f"lop3.b32 t, t, {_twice(0x007F)}, {_twice(0x4300)}, 0xEA; "
            "fma.rn.bf16x2 $0, t, a, u; }"
        )
    # e4m3: its exponent in the place of a bfloat16's is 2 ** 120 too small
    shifted = "shl.b32 u, $1, 8; shl.b32 t, $1, 4;" if plane % 2 == 0 else "shr.u32 t, $1, 4;"
    signed = "u" if plane % 2 == 0 else "$1"
    return (
        "{ .reg .b32 t, u, a, b; "
        f"mov.b32 a, {_twice(_TO_THE_120)}; mov.b32 b, {_twice(_MINUS_ZERO)}; {shifted} "
        f"and.b32 t, t, {_twice(0x07F0)}; lop3.b32 t, {signed}, {_twice(0x8000)}, t, 0xEA; "
        "fma.rn.bf16x2 $0, t, a, b; }"
    )


def _unpacking_high(plane: int, zero: int) -> str:
    """PTX: four bytes of upper bits into 16 times the plane's two bits, less zero."""
    return (
        "{ .reg .b32 t, u, a, b; "
        f"mov.b32 a, {_twice(_ONE)}; mov.b32 b, {_twice(0xC300 + zero)}; "
        f"shr.u32 t, $2, {2 * plane}; and.b32 t, t, 0x03030303; shl.b32 t, t, 4; "
        f"prmt.b32 u, t, 0, 0x4140; or.b32 u, u, {_twice(0x4300)}; fma.rn.bf16x2 $0, u, a, b; "
        f"prmt.b32 u, t, 0, 0x4342; or.b32 u, u, {_twice(0x4300)}; fma.rn.bf16x2 $1, u, a, b; }}"
    )


@triton.jit
def plane_values(codes: tl.tensor, PLANE: tl.constexpr, FORMAT: tl.constexpr) -> tl.tensor:
    """A plane of int16 codes as exact numbers: code - zero; for int6 the lower four bits alone."""
    unpack: tl.constexpr = FORMAT.unpack
    if len(unpack) > 0:
        values = tl.inline_asm_elementwise(
            unpack[PLANE], "=r,r", [codes], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    elif FORMAT.code == INT4:
        values = ((codes >> (4 * PLANE)) & 15).to(tl.float32) - FORMAT.zero
    elif FORMAT.code == INT6:
        values = ((codes >> (4 * PLANE)) & 15).to(tl.float32)
    elif FORMAT.code == INT8:
        values = (codes >> (8 * PLANE)).to(tl.int8).to(tl.float32)
    else:
        bits = ((codes >> (8 * PLANE)) & 255).to(tl.int32)
        moved = ((bits & 128) << 24) | ((bits & 127) << 20)
        values = moved.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2 ** 120
    return values


@triton.jit
def high_values(high: tl.tensor, PLANE: tl.constexpr, FORMAT: tl.constexpr) -> tl.tensor:
    """The upper two bits of a plane of int6 codes as numbers, times 16 and less zero."""
    unpack: tl.constexpr = FORMAT.unpack_high
    if len(unpack) > 0:
        values = tl.inline_asm_elementwise(
            unpack[PLANE], "=r,=r,r", [high], dtype=tl.bfloat16, is_pure=True, pack=4
        )
    else:
        values = ((high >> (2 * PLANE)) & 3).to(tl.float32) * 16 - FORMAT.zero
    return values


@triton.jit
def load_numbers(
    scale: tl.tensor,
    scale_over: tl.tensor,
    minimum: tl.tensor,
    minimum_over: tl.tensor,
    step: tl.tensor,
    columns: tl.tensor,
    packed_rows: tl.tensor,
    FORMAT: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Of every row of the weight, a step's scales and what is over them; its minimums likewise."""
    return (
        _load_step(scale, step, columns, packed_rows, FORMAT.scale, FORMAT),
        _load_over(scale_over, step, columns, packed_rows, FORMAT.scale, FORMAT),
        _load_step(minimum, step, columns, packed_rows, FORMAT.minimum, FORMAT),
        _load_over(minimum_over, step, columns, packed_rows, FORMAT.minimum, FORMAT),
    )


@triton.jit
def _load_step(
    values: tl.tensor,
    step: tl.tensor,
    columns: tl.tensor,
    packed_rows: tl.tensor,
    KIND: tl.constexpr,
    FORMAT: tl.constexpr,
) -> tl.tensor:
    """The scales of a step, all in one number."""
    is_wide: tl.constexpr = KIND == FLOAT32 and FORMAT.groups_per_step > 1
    if KIND == NONE or FORMAT.steps_per_group == 0 or is_wide:
        return columns  # there are none, or they are loaded where they are needed
    else:
        return tl.load(values + step // FORMAT.steps_per_group * packed_rows + columns)


@triton.jit
def _load_over(
    over: tl.tensor,
    step: tl.tensor,
    columns: tl.tensor,
    packed_rows: tl.tensor,
    KIND: tl.constexpr,
    FORMAT: tl.constexpr,
) -> tl.tensor:
    """The scale of a step's scales."""
    if KIND >= UNSIGNED:
        step_values: tl.constexpr = FORMAT.planes * FORMAT.lanes
        return tl.load(over + step * step_values // SUPER * packed_rows + columns)
    else:
        return columns


@triton.jit
def pick_number(
    numbers: tl.tensor,
    over: tl.tensor,
    values: tl.tensor,
    step: tl.tensor,
    columns: tl.tensor,
    packed_rows: tl.tensor,
    PLACE: tl.constexpr,
    KIND: tl.constexpr,
    FORMAT: tl.constexpr,
) -> tl.tensor:
    """One of a step's scales as float32."""
    if KIND == FLOAT16:
        return (numbers >> (16 * PLACE)).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    elif KIND == BFLOAT16:
        return (numbers >> (16 * PLACE)).to(tl.int16).to(tl.bfloat16, bitcast=True).to(tl.float32)
    elif KIND == FLOAT32:
        if FORMAT.groups_per_step == 1:
            return numbers
        else:
            place = step * FORMAT.groups_per_step + PLACE
            return tl.load(values + place * packed_rows + columns)
    elif KIND == UNSIGNED:
        return ((numbers >> (8 * PLACE)) & 255).to(tl.float32) * over.to(tl.float32)
    else:
        return (numbers >> (8 * PLACE)).to(tl.int8).to(tl.float32) * over.to(tl.float32)


@triton.jit
def add_step(
    total: tl.tensor,
    tile: tl.tensor,
    tile_high: tl.tensor,
    numbers: tl.tensor,
    over: tl.tensor,
    lows: tl.tensor,
    lows_over: tl.tensor,
    scale: tl.tensor,
    minimum: tl.tensor,
    x0: tl.tensor,
    x1: tl.tensor,
    x2: tl.tensor,
    x3: tl.tensor,
    step: tl.tensor,
    columns: tl.tensor,
    packed_rows: tl.tensor,
    BLOCK_M: tl.constexpr,
    FORMAT: tl.constexpr,
) -> tl.tensor:
    """total [HALF, BLOCK_M] and what one step of HALF rows of the weight adds to it."""
    planes: tl.constexpr = FORMAT.planes
    groups: tl.constexpr = FORMAT.groups_per_step
    part = tl.zeros([HALF, BLOCK_M], tl.float32)
    sums = tl.zeros([HALF, BLOCK_M], tl.float32)
    for plane in tl.static_range(planes):
        if plane == 0:
            rows = tl.trans(x0)
        elif plane == 1:
            rows = tl.trans(x1)
        elif plane == 2:
            rows = tl.trans(x2)
        else:
            rows = tl.trans(x3)
        values = plane_values(tile, plane, FORMAT).to(x0.dtype)
        if FORMAT.steps_per_group == 0:  # the scale of a whole row waits until the end
            total = tl.dot(values, rows, total, input_precision="ieee")
        else:
            part = tl.dot(values, rows, part, input_precision="ieee")
            if FORMAT.code == INT6:
                upper = high_values(tile_high, plane, FORMAT).to(x0.dtype)
                part = tl.dot(upper, rows, part, input_precision="ieee")
            if FORMAT.minimum != NONE:
                ones = tl.full([HALF, FORMAT.lanes], 1.0, x0.dtype)
                sums = tl.dot(ones, rows, sums, input_precision="ieee")
            if (plane + 1) * groups % planes == 0:  # the end of a group, or of the step
                place = plane * groups // planes
                factor = pick_number(
                    numbers, over, scale, step, columns, packed_rows, place, FORMAT.scale, FORMAT
                )
                total += part * factor[:, None]
                part = tl.zeros([HALF, BLOCK_M], tl.float32)
                if FORMAT.minimum != NONE:
                    low = pick_number(
                        lows, lows_over, minimum, step, columns, packed_rows, place,
                        FORMAT.minimum, FORMAT,
                    )  # fmt: skip
                    total -= sums * low[:, None]
                    sums = tl.zeros([HALF, BLOCK_M], tl.float32)
    return total


@triton.jit
def _load_plane(
    left: tl.tensor,
    k: tl.tensor,
    lanes: tl.tensor,
    real_row: tl.tensor,
    depth: tl.tensor,
    FORMAT: tl.constexpr,
) -> tl.tensor:
    """What a plane's values are multiplied with, from depth k on."""
    if FORMAT.is_whole:
        return tl.load(left + k, mask=real_row, other=0.0)
    else:
        return tl.load(left + k, mask=real_row & (k + lanes < depth)[None, :], other=0.0)


@triton.jit
def two_halves(
    x: tl.tensor,
    row_stride: tl.tensor,
    rows: tl.tensor,
    real_row: tl.tensor,
    codes: tl.tensor,
    high: tl.tensor,
    scale: tl.tensor,
    scale_over: tl.tensor,
    minimum: tl.tensor,
    minimum_over: tl.tensor,
    columns: tl.tensor,
    other: tl.tensor,
    packed_rows: tl.tensor,
    depth: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    BLOCK_M: tl.constexpr,
    FORMAT: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """[HALF, BLOCK_M] of the product twice, for weight rows `columns` and `other`.

    Over steps first .. end - 1. The scales of a step are fetched one step early: these loads are
    too small to be copied ahead by the pipeline.
    """
    width: tl.constexpr = FORMAT.lanes
    lanes = tl.arange(0, width)
    left = x + rows[:, None].to(tl.int64) * row_stride + lanes[None, :]
    tile = columns[:, None] * width + lanes[None, :]
    tile_other = other[:, None] * width + lanes[None, :]
    total = tl.zeros([HALF, BLOCK_M], tl.float32)
    total_other = tl.zeros([HALF, BLOCK_M], tl.float32)
    n0, v0, m0, w0 = load_numbers(
        scale, scale_over, minimum, minimum_over, first, columns, packed_rows, FORMAT
    )
    n1, v1, m1, w1 = load_numbers(
        scale, scale_over, minimum, minimum_over, first, other, packed_rows, FORMAT
    )
    for step in range(first, end):
        place = step * (packed_rows * width)
        c0 = tl.load(codes + place + tile)
        c1 = tl.load(codes + place + tile_other)
        h0, h1 = c0, c1
        if FORMAT.code == INT6:
            h0 = tl.load(high + place + tile)
            h1 = tl.load(high + place + tile_other)
        k = step * (FORMAT.planes * width)
        x0 = _load_plane(left, k, lanes, real_row, depth, FORMAT)
        x1 = _load_plane(left, k + width, lanes, real_row, depth, FORMAT)
        x2, x3 = x0, x1
        if FORMAT.planes == 4:
            x2 = _load_plane(left, k + 2 * width, lanes, real_row, depth, FORMAT)
            x3 = _load_plane(left, k + 3 * width, lanes, real_row, depth, FORMAT)
        after = tl.minimum(step + 1, end - 1)
        a0, b0, c2, d0 = n0, v0, m0, w0
        n0, v0, m0, w0 = load_numbers(
            scale, scale_over, minimum, minimum_over, after, columns, packed_rows, FORMAT
        )
        total = add_step(
            total, c0, h0, a0, b0, c2, d0, scale, minimum, x0, x1, x2, x3, step, columns,
            packed_rows, BLOCK_M, FORMAT,
        )  # fmt: skip
        a1, b1, c3, d1 = n1, v1, m1, w1
        n1, v1, m1, w1 = load_numbers(
            scale, scale_over, minimum, minimum_over, after, other, packed_rows, FORMAT
        )
        total_other = add_step(
            total_other, c1, h1, a1, b1, c3, d1, scale, minimum, x0, x1, x2, x3, step, other,
            packed_rows, BLOCK_M, FORMAT,
        )  # fmt: skip
    if FORMAT.steps_per_group == 0:
        total *= tl.load(scale + columns)[:, None]
        total_other *= tl.load(scale + other)[:, None]
    return total, total_other
