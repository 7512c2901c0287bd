# Triton's decorators carry no types that mypy can see.
# mypy: disallow-untyped-decorators=False
"""Tiles of a product with quantised weights, inside a Triton kernel. CUDA only.

Codes become bfloat16 in registers, exactly, on their way into the tensor cores. A mask cuts a code
out; its lower eight bits, read as a bfloat16, are a tiny number in proportion to them, and one
multiplication and addition make it large and take the zero point away. The scale of a group
multiplies its partial sum in float32, so nothing of a format is rounded.
The weight is the left operand: a warp holds sixteen of its rows, and eight or more rows of x.

How weights lie in memory is layout.py's; who launches what, linear.py's.
"""

from __future__ import annotations

import functools
import struct
from typing import NamedTuple

import triton
import triton.language as tl

from flashdraft.kernels.cuda.quantized.layout import Code, Number, PackedWeight

# Weight rows of a block, by default: what two warps hold. The scales of more rows than there are
# threads would be shared out over shared memory at every step.
BLOCK_N = tl.constexpr(32)
INT4 = tl.constexpr(int(Code.INT4))
INT6 = tl.constexpr(int(Code.INT6))
INT8 = tl.constexpr(int(Code.INT8))
NONE = tl.constexpr(int(Number.NONE))
FLOAT16 = tl.constexpr(int(Number.FLOAT16))
BFLOAT16 = tl.constexpr(int(Number.BFLOAT16))
FLOAT32 = tl.constexpr(int(Number.FLOAT32))
UNSIGNED = tl.constexpr(int(Number.UNSIGNED))
SUPER = tl.constexpr(256)

_ONE, _MINUS_ZERO, _TO_THE_120, _TO_THE_124 = 0x3F80, 0x8000, 0x7B80, 0x7D80  # as bfloat16


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
    gain: float  # what a plane's values, as they are unpacked, must be multiplied with


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
        512.0 if is_native and weight.code is Code.INT4 else 1.0,
    )


@functools.cache
def _unpackings(code: Code, zero: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The instructions of every plane, and those of its high bits."""
    planes = range(4)
    low = tuple(_unpacking(code, plane, zero) for plane in planes)
    return low, tuple(_unpacking_high(plane, zero) for plane in planes)


def _bits(value: float) -> int:
    """A small integer or its fraction as a bfloat16, which has it exactly."""
    return int.from_bytes(struct.pack("<f", value), "little") >> 16


def _twice(bits: int) -> str:
    return f"0x{bits * 0x10001:08X}"


def _unpacking(code: Code, plane: int, zero: int) -> str:
    """PTX: two int16 of codes into the bfloat16 values of a plane, as `plane_values` has them."""
    if code is Code.INT4:
        # As a bfloat16 its lower eight bits are times 2 ** -133: 2 ** -9 is left for `gain`.
        times = _TO_THE_124 if plane % 2 == 0 else _TO_THE_120
        return (
            "{ .reg .b32 t, a, b; "
            f"mov.b32 a, {_twice(times)}; mov.b32 b, {_twice(_bits(-zero / 512))}; "
            f"shr.u32 t, $1, {8 * (plane // 2)}; "
            f"and.b32 t, t, {_twice(0x000F if plane % 2 == 0 else 0x00F0)}; "
            "fma.rn.bf16x2 $0, t, a, b; }"
        )
    # 0xEA is (a & b) | c
    if code is Code.INT6:  # 128 + the code, less 128
        return (
            "{ .reg .b32 t, a, b; "
            f"mov.b32 a, {_twice(_ONE)}; mov.b32 b, {_twice(0xC300)}; "
            f"shr.u32 t, $1, {4 * plane}; "
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
    """A plane of int16 codes as exact numbers: code - zero; for int6 the lower four bits alone.

    All divided by FORMAT.gain.
    """
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
    weight: tl.tuple,
    step: tl.tensor,
    columns: tl.tensor,
    packed_rows: tl.tensor,
    FORMAT: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Of every row of the weight, a step's scales and what is over them; its minimums likewise."""
    return (
        _load_step(weight[2], step, columns, packed_rows, FORMAT.scale, FORMAT),
        _load_over(weight[3], step, columns, packed_rows, FORMAT.scale, FORMAT),
        _load_step(weight[4], step, columns, packed_rows, FORMAT.minimum, FORMAT),
        _load_over(weight[5], step, columns, packed_rows, FORMAT.minimum, FORMAT),
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
def _add_up(
    xs: tl.tuple,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FORMAT: tl.constexpr,
) -> tl.tensor:
    """Of every row of x its sum over one group of a step: [BLOCK_N, BLOCK_M], all rows alike.

    All divided by FORMAT.gain.
    """
    planes: tl.constexpr = FORMAT.planes // FORMAT.groups_per_step
    sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    ones = tl.full([BLOCK_N, FORMAT.lanes], 1.0 / FORMAT.gain, xs[0].dtype)
    for plane in tl.static_range(GROUP * planes, (GROUP + 1) * planes):
        sums = tl.dot(ones, xs[plane], sums, input_precision="ieee")
    return sums


@triton.jit
def _add_group(
    total: tl.tensor,
    tile: tl.tensor,
    tile_high: tl.tensor,
    numbers: tl.tuple,
    weight: tl.tuple,
    xs: tl.tuple,
    sums: tl.tuple,
    step: tl.tensor,
    columns: tl.tensor,
    packed_rows: tl.tensor,
    GROUP: tl.constexpr,
    FORMAT: tl.constexpr,
) -> tl.tensor:
    """total [BLOCK_N, BLOCK_M] and what one group of a step of a block of weights adds to it."""
    planes: tl.constexpr = FORMAT.planes // FORMAT.groups_per_step
    is_whole_row: tl.constexpr = FORMAT.steps_per_group == 0  # its scale waits until the end
    part = total if is_whole_row else tl.zeros_like(total)
    for plane in tl.static_range(GROUP * planes, (GROUP + 1) * planes):
        values = plane_values(tile, plane, FORMAT).to(xs[0].dtype)
        part = tl.dot(values, xs[plane], part, input_precision="ieee")
        if FORMAT.code == INT6:
            upper = high_values(tile_high, plane, FORMAT).to(xs[0].dtype)
            part = tl.dot(upper, xs[plane], part, input_precision="ieee")
    if is_whole_row:
        total = part
    else:
        factor = pick_number(
            numbers[0], numbers[1], weight[2], step, columns, packed_rows, GROUP, FORMAT.scale,
            FORMAT,
        )  # fmt: skip
        total += part * factor[:, None]
    if FORMAT.minimum != NONE:
        low = pick_number(
            numbers[2], numbers[3], weight[4], step, columns, packed_rows, GROUP, FORMAT.minimum,
            FORMAT,
        )  # fmt: skip
        total -= sums[GROUP] * low[:, None]
    return total


@triton.jit
def multiply_blocks(
    x: tl.tensor,
    row_stride: tl.tensor,
    rows: tl.tensor,
    real_row: tl.tensor,
    weight: tl.tuple,
    starts: tl.tuple,
    packed_rows: tl.tensor,
    depth: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FORMAT: tl.constexpr,
) -> tl.tuple:
    """[BLOCK_N, BLOCK_M] of the product for every block of weight rows, steps first .. end - 1.

    `weight` as PackedWeight.tensors has it, `starts` the first row of every block. What all blocks
    share is read once: the rows of x, which come from L2 again for every program. The scales of a
    step are fetched one step early: these loads are too small to be copied ahead by the pipeline.
    """
    width: tl.constexpr = FORMAT.lanes
    planes: tl.constexpr = FORMAT.planes
    groups: tl.constexpr = FORMAT.groups_per_step
    lanes = tl.arange(0, width)
    left = x + rows[:, None].to(tl.int64) * row_stride + lanes[None, :]
    totals: tl.tuple = ()
    numbers: tl.tuple = ()
    for i in tl.static_range(len(starts)):
        totals = totals + (tl.zeros([BLOCK_N, BLOCK_M], tl.float32),)
        columns = starts[i] + tl.arange(0, BLOCK_N)
        numbers = numbers + (load_numbers(weight, first, columns, packed_rows, FORMAT),)
    for step in range(first, end):
        place = step * (packed_rows * width)
        tiles: tl.tuple = ()
        highs: tl.tuple = ()
        for i in tl.static_range(len(starts)):
            tile = (starts[i] + tl.arange(0, BLOCK_N))[:, None] * width + lanes[None, :]
            tiles = tiles + (tl.load(weight[0] + place + tile),)
            if FORMAT.code == INT6:
                highs = highs + (tl.load(weight[1] + place + tile),)
            else:
                highs = highs + (tiles[i],)
        xs: tl.tuple = ()
        for plane in tl.static_range(planes):
            k = (step * planes + plane) * width
            xs = xs + (tl.trans(_load_plane(left, k, lanes, real_row, depth, FORMAT)),)
        sums: tl.tuple = ()
        if FORMAT.minimum != NONE:
            for group in tl.static_range(groups):
                sums = sums + (_add_up(xs, group, BLOCK_M, BLOCK_N, FORMAT),)
        after = tl.minimum(step + 1, end - 1)
        next_totals: tl.tuple = ()
        next_numbers: tl.tuple = ()
        for i in tl.static_range(len(starts)):
            columns = starts[i] + tl.arange(0, BLOCK_N)
            ahead = load_numbers(weight, after, columns, packed_rows, FORMAT)
            next_numbers = next_numbers + (ahead,)
            total = totals[i]
            for group in tl.static_range(groups):
                total = _add_group(
                    total, tiles[i], highs[i], numbers[i], weight, xs, sums, step, columns,
                    packed_rows, group, FORMAT,
                )  # fmt: skip
            next_totals = next_totals + (total,)
        totals = next_totals
        numbers = next_numbers
    scaled: tl.tuple = ()
    for i in tl.static_range(len(starts)):
        total = totals[i] * FORMAT.gain
        if FORMAT.steps_per_group == 0:
            total *= tl.load(weight[2] + starts[i] + tl.arange(0, BLOCK_N))[:, None]
        scaled = scaled + (total,)
    return scaled
