"""Many rows times weights in few bits, in CUDA C++ for Hopper: int4, int8 and e4m3. CUDA only.

What the kernel does is said in many_rows.cu; this launches it, many_rows_plan.py chooses its tiles.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from ctypes import c_char, c_float, c_int, c_void_p
from typing import NamedTuple

import torch
from torch import Tensor

from flashdraft.kernels.cuda import overlap
from flashdraft.kernels.cuda.card import is_hopper
from flashdraft.kernels.cuda.driver import Kernel, Map, make_map
from flashdraft.kernels.cuda.plan import DeviceLimits
from flashdraft.kernels.cuda.quantized.few_rows import is_readable
from flashdraft.kernels.cuda.quantized.few_rows_plan import Product, describe_product, find_zero
from flashdraft.kernels.cuda.quantized.layout import PackedWeight
from flashdraft.kernels.cuda.quantized.many_rows_plan import (
    BLOCK_DEPTH,
    MAX_ROWS,
    MIN_ROWS,
    MIN_VALUES,
    TILE_ROWS,
    ManyPlan,
    plan_many,
    tile_columns,
)
from flashdraft.kernels.kinds import Activation

_MAP_BYTES = 128  # of a row that is copied


class _Work(ctypes.Structure):
    _fields_ = [
        *((name, Map) for name in ("x", "codes")),
        *((name, c_void_p) for name in ("scale", "output", "parts", "arrivals")),
        *((name, c_int) for name in ("num_rows", "num_columns", "up_rows", "packed_rows")),
        *((name, c_int) for name in ("num_steps", "column_tiles", "block_units", "spare_units")),
        ("zero", c_float),
        ("filler", c_char * 60),  # to a multiple of 64 bytes
    ]


class Prepared(NamedTuple):
    """The kernel's argument, with what it points to besides its inputs."""

    work: _Work
    output: Tensor
    parts: Tensor


def multiply_many(
    x: Tensor,
    weight: PackedWeight,
    limits: DeviceLimits,
    arrivals: Tensor,
    activation: Activation | None = None,
) -> Tensor | None:
    """x [num_rows, depth] bfloat16 @ weight.T; `arrivals` as in dense.linear.multiply_rows.

    With an activation the weight is [gate | up] by its rows: the result is that of `Kernels.gated`.
    None where this is not the way to multiply.
    """
    is_large = math.prod(weight.shape) >= MIN_VALUES
    if not is_large or not MIN_ROWS <= x.shape[0] <= MAX_ROWS or not is_readable(x):
        return None
    product = describe_product(weight, activation is not None)
    if product is None or not is_hopper(x.device):
        return None
    plan = plan_many(x.shape[0], product, limits)
    return None if plan is None else launch(x, weight, product, plan, arrivals, activation)


def launch(
    x: Tensor,
    weight: PackedWeight,
    product: Product,
    plan: ManyPlan,
    arrivals: Tensor,
    activation: Activation | None = None,
) -> Tensor:
    """A product on the current stream."""
    prepared = prepare(x, weight, product, plan, arrivals)
    flags = make_flags(product, plan, activation).items()
    kernel = Kernel.load("quantized/many_rows.cu", "multiply_many", x.device, *flags)
    threads, shared_bytes = 32 * plan.warps, plan.shared_bytes(product)
    overlaps = overlap.can_overlap(x.device)
    kernel.launch(plan.num_blocks, threads, shared_bytes, prepared.work, overlaps)
    return prepared.output


def prepare(
    x: Tensor,
    weight: PackedWeight,
    product: Product,
    plan: ManyPlan,
    arrivals: Tensor,
    make_map: Callable[[Tensor, tuple[int, int, int]], Map] = make_map,
) -> Prepared:
    """What the kernel needs."""
    num_rows = x.shape[0]
    columns, row_tiles = plan.count_tiles(num_rows, product)
    num_units = columns * row_tiles * product.num_steps
    assert 0 < plan.num_blocks <= num_units < 1 << 31
    assert arrivals.numel() >= columns * row_tiles * plan.warpgroups and x.stride(1) == 1
    output = torch.empty(num_rows, product.columns, device=x.device, dtype=x.dtype)
    # Of the tile that a block began with, unless all tiles are whole.
    sums = plan.num_blocks * plan.warpgroups * plan.tiles * TILE_ROWS * plan.rows
    sums *= columns * row_tiles % plan.num_blocks > 0
    parts = torch.empty(sums, device=x.device, dtype=torch.float32)
    codes = weight.codes.view(-1, 1, _MAP_BYTES // 2)
    copied = tile_columns(product) * 2 * product.width // _MAP_BYTES
    work = _Work(
        make_map(x.unsqueeze(1), (plan.rows, 1, BLOCK_DEPTH)),
        make_map(codes, (copied, 1, _MAP_BYTES // 2)),
        weight.scale.values.data_ptr(),
        output.data_ptr(),
        parts.data_ptr(),
        arrivals.data_ptr(),
        num_rows,
        product.columns,
        product.up_rows,
        weight.packed_rows,
        product.num_steps,
        columns,
        *divmod(num_units, plan.num_blocks),
        find_zero(weight),
    )
    return Prepared(work, output, parts)


def make_flags(product: Product, plan: ManyPlan, activation: Activation | None) -> dict[str, int]:
    """What the kernel is compiled with."""
    return {
        "CODE": int(product.code),
        "WIDTH": product.width,
        "SCALES": product.num_scales,
        "SCALE": product.scale,
        "GATED": int(product.up_rows > 0),
        "GELU": int(activation is Activation.GELU_TANH),
        "ROWS": plan.rows,
        "TILES": plan.tiles,
        "STAGES": plan.stages,
        "STEPS": plan.steps,
        "WARPS": plan.warps,
        "BLOCKS": 1,
    }
