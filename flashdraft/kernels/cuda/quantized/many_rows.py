"""Many rows times weights in few bits, in CUDA C++ for Hopper: int4, int8 and e4m3. CUDA only.

What the kernels do is said in many_rows.cu; this plans and launches them.
"""

from __future__ import annotations

import ctypes
import functools
import math
from ctypes import c_float, c_int, c_void_p
from typing import NamedTuple

import torch
from torch import Tensor

from flashdraft.kernels.cuda import overlap
from flashdraft.kernels.cuda.driver import Kernel
from flashdraft.kernels.cuda.plan import DeviceLimits
from flashdraft.kernels.cuda.quantized.few_rows import MIN_VALUES, is_readable
from flashdraft.kernels.cuda.quantized.few_rows_plan import Product, describe_product, find_zero
from flashdraft.kernels.cuda.quantized.layout import PackedWeight
from flashdraft.kernels.kinds import Activation

# Rows of x for which this is the way. On an H200 Triton is as fast with 64, floats are with 512;
# the most lies between, and is estimated.
MIN_ROWS, MAX_ROWS = 65, 256
ROWS = 128  # of x, in a tile
MAX_STAGES = 12
WARPS = 12  # two warpgroups that multiply, and one that copies x
FULL = 0.95  # of the processors, where fewer blocks than these have tiles, or parts of them, alike
_COLUMNS = 64  # rows of the weight in a tile of a warpgroup
_SPARE_BYTES = 1024  # of shared memory, besides stages and results


class ManyPlan(NamedTuple):
    """Launch settings of one product; most are said in many_rows.cu."""

    rows: int  # of x, in a tile
    tiles: int
    pieces: int
    stages: int
    num_blocks: int
    warps: int = WARPS

    @property
    def warpgroups(self) -> int:
        """Those that multiply."""
        return self.warps // 4 - 1

    def count_tiles(self, num_rows: int, product: Product) -> tuple[int, int]:
        """Of the result: by rows of the weight, and by rows of x."""
        columns = self.warpgroups * self.tiles * _tile_columns(product)
        return -(-product.columns // columns), -(-num_rows // self.rows)

    def result_bytes(self, product: Product) -> int:
        """Of shared memory: where a result is turned."""
        return self.warpgroups * self.rows * (_tile_columns(product) + 8) * 2

    def shared_bytes(self, product: Product) -> int:
        """As the kernel has them."""
        signals = 16 * self.stages + -(-4 * self.warpgroups // 8) * 8
        return self.stages * self.rows * 128 + self.result_bytes(product) + signals


class _Work(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("x", "arranged", "codes", "scale", "output")),
        *((name, c_void_p) for name in ("parts", "arrivals")),
        *((name, c_int) for name in ("num_rows", "num_columns", "up_rows", "packed_rows")),
        *((name, c_int) for name in ("depth", "row_stride", "num_steps", "row_tiles")),
        *((name, c_int) for name in ("block_units", "spare_units")),
        ("zero", c_float),
    ]


class Prepared(NamedTuple):
    """The kernels' argument, with what it points to besides its inputs."""

    work: _Work
    output: Tensor
    arranged: Tensor
    parts: Tensor
    arrange_blocks: int


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
    if product is None or not _is_hopper(x.device):
        return None
    plan = plan_many(x.shape[0], product, limits)
    return None if plan is None else launch(x, weight, product, plan, arrivals, activation)


@functools.lru_cache(maxsize=1024)
def plan_many(num_rows: int, product: Product, limits: DeviceLimits) -> ManyPlan | None:
    """None where shared memory has no room."""
    # What registers have room for: if a row has several scales, there are two sums of everything.
    tiles = 1 if product.num_scales else 2
    pieces = 2 if product.num_scales else 1
    plan = ManyPlan(ROWS, tiles, pieces, MAX_STAGES, 1)
    spare = limits.shared_bytes - _SPARE_BYTES - plan.result_bytes(product)
    stages = min(MAX_STAGES, spare // (ROWS * 128))
    if stages < 2:
        return None
    columns, row_tiles = plan.count_tiles(num_rows, product)
    blocks = _count_blocks(columns * row_tiles, product.num_steps, limits.num_processors)
    return plan._replace(stages=stages, num_blocks=blocks)


def _count_blocks(num_tiles: int, num_steps: int, num_processors: int) -> int:
    """All processors, or nearly so where no block then has parts of two tiles."""
    most = min(num_processors, num_tiles * num_steps)
    for blocks in range(most, int(FULL * most), -1):
        parts, rest = divmod(blocks, num_tiles)
        if num_tiles % blocks == 0 or (rest == 0 and num_steps % parts == 0):
            return blocks
    return most


def launch(
    x: Tensor,
    weight: PackedWeight,
    product: Product,
    plan: ManyPlan,
    arrivals: Tensor,
    activation: Activation | None = None,
) -> Tensor:
    """A product on the current stream, in two launches."""
    prepared = prepare(x, weight, product, plan, arrivals)
    flags, threads = make_flags(product, plan, activation).items(), 32 * plan.warps
    overlaps = overlap.can_overlap(x.device)
    arrange = Kernel.load("quantized/many_rows.cu", "arrange", x.device, *flags)
    arrange.launch(prepared.arrange_blocks, threads, 0, prepared.work, overlaps)
    multiply = Kernel.load("quantized/many_rows.cu", "multiply_many", x.device, *flags)
    shared_bytes = plan.shared_bytes(product)
    multiply.launch(plan.num_blocks, threads, shared_bytes, prepared.work, overlaps)
    return prepared.output


def prepare(
    x: Tensor, weight: PackedWeight, product: Product, plan: ManyPlan, arrivals: Tensor
) -> Prepared:
    """What the kernels need."""
    num_rows, depth = x.shape[0], product.num_steps * product.step
    columns, row_tiles = plan.count_tiles(num_rows, product)
    num_units = columns * row_tiles * product.num_steps
    num_chunks = row_tiles * plan.rows * depth // 32  # that a thread arranges each
    assert 0 < plan.num_blocks <= num_units < 1 << 31 and num_chunks < 1 << 31
    assert arrivals.numel() >= columns * row_tiles * plan.warpgroups and x.stride(1) == 1
    output = torch.empty(num_rows, product.columns, device=x.device, dtype=x.dtype)
    arranged = torch.empty(row_tiles * plan.rows, depth, device=x.device, dtype=x.dtype)
    # Of the tile that a block began with, and of its last one, unless all tiles are whole.
    sums = plan.num_blocks * 2 * plan.warpgroups * plan.tiles * _COLUMNS * plan.rows
    sums *= columns * row_tiles % plan.num_blocks > 0
    parts = torch.empty(sums, device=x.device, dtype=torch.float32)
    work = _Work(
        x.data_ptr(),
        arranged.data_ptr(),
        weight.codes.data_ptr(),
        weight.scale.values.data_ptr(),
        output.data_ptr(),
        parts.data_ptr(),
        arrivals.data_ptr(),
        num_rows,
        product.columns,
        product.up_rows,
        weight.packed_rows,
        weight.shape[-1],
        x.stride(0),
        product.num_steps,
        row_tiles,
        *divmod(num_units, plan.num_blocks),
        find_zero(weight),
    )
    return Prepared(work, output, arranged, parts, -(-num_chunks // (32 * plan.warps)))


def make_flags(product: Product, plan: ManyPlan, activation: Activation | None) -> dict[str, int]:
    """What the kernels are compiled with."""
    return {
        "CODE": int(product.code),
        "WIDTH": product.width,
        "SCALES": product.num_scales,
        "SCALE": product.scale,
        "GATED": int(product.up_rows > 0),
        "GELU": int(activation is Activation.GELU_TANH),
        "ROWS": plan.rows,
        "TILES": plan.tiles,
        "PIECES": plan.pieces,
        "STAGES": plan.stages,
        "WARPS": plan.warps,
        "BLOCKS": 1,
    }


def _tile_columns(product: Product) -> int:
    """Of the result, in a tile of a warpgroup."""
    return _COLUMNS // 2 if product.up_rows else _COLUMNS


@functools.cache
def _is_hopper(device: torch.device) -> bool:
    """Whether the device has the instructions."""
    return torch.cuda.get_device_capability(device) == (9, 0)
