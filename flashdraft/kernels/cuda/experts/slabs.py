"""A mixture of experts over some rows in CUDA C++ for Hopper (slabs.cu), in 16 bits or in few.

Four launches: gather (routing.py), up with the activation, down, and the weighted sum. Every expert
that was chosen is read once for a tile of its rows. This owns the two products' plans and launches.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import c_char, c_int, c_uint64, c_void_p
from typing import NamedTuple

import torch
from torch import Tensor

from flashdraft.kernels.cuda.driver import Kernel, Map, make_map
from flashdraft.kernels.cuda.experts.grouped import mix_parts
from flashdraft.kernels.cuda.experts.plan import SlabsPlan, plan_slabs
from flashdraft.kernels.cuda.experts.routing import GatheredRows, gather_rows
from flashdraft.kernels.cuda.plan import DeviceLimits
from flashdraft.kernels.cuda.quantized.few_rows import is_readable
from flashdraft.kernels.cuda.quantized.few_rows_plan import find_zero
from flashdraft.kernels.cuda.quantized.layout import Code, Number, PackedWeight
from flashdraft.kernels.kinds import Activation

HOPPER = 9
BLOCK_DEPTH, BOX_ROWS, AT_A_TIME = 64, 8, 32  # as in the kernel
_SCALES = {Number.FLOAT16: 1, Number.BFLOAT16: 2, Number.FLOAT32: 3}
MIN_STAGES = 3
_MAX_SCALE_BYTES = 8  # of a row in a step
_RESERVED_BYTES = 1024  # of shared memory, for every block


class ExpertsProduct(NamedTuple):
    """All experts' weights in one product: their format and their sizes."""

    columns: int  # of the result
    depth: int
    is_gated: bool
    code: Code | None = None  # none: bfloat16
    width: int = 32  # of a plane
    num_scales: int = 0  # of a row in a step; 0: one for all of it
    scale: int = 3
    zero: int = 0

    @property
    def step(self) -> int:
        """Values of the depth in a step."""
        if self.code is None:
            return BLOCK_DEPTH
        return self.width * (4 if self.code is Code.INT4 else 2)

    @property
    def num_steps(self) -> int:
        """Of the whole depth."""
        return -(-self.depth // self.step)

    @property
    def num_slabs(self) -> int:
        """Of an expert."""
        return self.columns // (32 if self.is_gated else 64)

    @property
    def row_bytes(self) -> tuple[int, int]:
        """What a row of the weight has in a step: values, and their scales."""
        if self.code is None:
            return 2 * BLOCK_DEPTH, 0
        return 2 * self.width, self.num_scales * (4 if self.scale == 3 else 2)


class _Work(ctypes.Structure):
    _fields_ = [
        *((name, Map) for name in ("weight", "x")),
        *((name, c_void_p) for name in ("codes", "scale")),
        *((name, c_uint64) for name in ("expert_codes", "expert_scales")),
        *((name, c_void_p) for name in ("output", "places", "experts", "firsts", "lasts")),
        ("num_tiles", c_void_p),
        *((name, c_int) for name in ("num_columns", "num_slabs")),
        *((name, c_int) for name in ("num_steps", "up_rows", "packed_rows")),
        ("filler", c_char * 28),  # to a multiple of 64 bytes
    ]


def mix_slabs(
    x: Tensor,
    gate_up: Tensor | PackedWeight,
    down: Tensor | PackedWeight,
    chosen: Tensor,
    weights: Tensor,
    activation: Activation,
    limits: DeviceLimits,
) -> Tensor | None:
    """`Kernels.experts` with all experts in one weight each; None where this is not the way.

    gate_up.shape [num_experts, 2 * inner, hidden], down.shape [num_experts, hidden, inner].
    """
    plan = plan_slabs(x.shape[0], isinstance(gate_up, PackedWeight))
    is_here = limits.generation == HOPPER and x.shape[1] % 32 == 0 and is_readable(x)
    if plan is None or not is_here:
        return None
    return mix_planned(x, gate_up, down, chosen, weights, activation, plan, limits)


def mix_planned(
    x: Tensor,
    gate_up: Tensor | PackedWeight,
    down: Tensor | PackedWeight,
    chosen: Tensor,
    weights: Tensor,
    activation: Activation,
    plan: SlabsPlan,
    limits: DeviceLimits,
) -> Tensor | None:
    """`mix_slabs` by a plan; None where weights or the card's memory do not allow it."""
    up, last = describe_experts(gate_up, gated=True), describe_experts(down, gated=False)
    if up is None or last is None:
        return None
    if min(count_stages(plan, product, limits) for product in (up, last)) < MIN_STAGES:
        return None
    rows = gather_rows(x, chosen, gate_up.shape[0], plan.rows, up.code is not None)
    between = multiply(rows.x, gate_up, up, rows, plan, limits, activation, last.code is not None)
    return mix_parts(multiply(between, down, last, rows, plan, limits), weights)


def describe_experts(weight: Tensor | PackedWeight, gated: bool) -> ExpertsProduct | None:
    """A product that the kernel can compute, else None."""
    num_experts, rows, depth = weight.shape
    columns = rows // 2 if gated else rows
    if rows % 64 or columns % 32 or depth % 8:
        return None
    if isinstance(weight, Tensor):
        is_plain = weight.is_contiguous() and weight.data_ptr() % 16 == 0
        is_half = weight.dtype is torch.bfloat16
        return ExpertsProduct(columns, depth, gated) if is_plain and is_half else None
    zero, kind = find_zero(weight), weight.scale.kind
    num_scales = weight.groups_per_step if weight.steps_per_group else 0
    fits = weight.code is not Code.INT6 and weight.minimum is None and weight.lanes >= 32
    fits = fits and weight.steps_per_group <= 1 and kind in _SCALES
    fits = fits and (weight.code is Code.FP8 or zero & (zero - 1) == 0)  # exact times a scale
    if not fits:
        return None
    format = weight.code, weight.lanes, num_scales, _SCALES[kind], zero
    product = ExpertsProduct(columns, depth, gated, *format)
    return product if product.row_bytes[1] <= _MAX_SCALE_BYTES else None


def multiply(
    x: Tensor,
    weight: Tensor | PackedWeight,
    product: ExpertsProduct,
    rows: GatheredRows,
    plan: SlabsPlan,
    limits: DeviceLimits,
    activation: Activation | None = None,
    is_arranged: bool = False,
) -> Tensor:
    """Every gathered row times its expert's weight, on the current stream.

    With an activation the weight is [gate | up] by its rows, and results lie as x does, in the
    order of codes if `is_arranged`; without one they lie in the order of the pairs themselves.
    """
    stages = count_stages(plan, product, limits)
    work, output, _kept = prepare(x, weight, product, rows)
    flags = make_flags(plan, stages, product, activation, is_arranged)
    Kernel.load("experts/slabs.cu", "multiply_slabs", x.device, *flags.items()).launch(
        limits.num_processors * plan.resident,
        32 * flags["WARPS"],
        shared_bytes(plan, stages, product),
        work,
        overlaps=False,
    )
    return output


def count_stages(plan: SlabsPlan, product: ExpertsProduct, limits: DeviceLimits) -> int:
    """As many as shared memory has room for."""
    spare = limits.shared_bytes // plan.resident - (plan.resident > 1) * _RESERVED_BYTES
    spare -= shared_bytes(plan, 0, product)
    each = shared_bytes(plan, 1, product) - shared_bytes(plan, 0, product)
    return min(plan.max_stages, spare // each)


def shared_bytes(plan: SlabsPlan, stages: int, product: ExpertsProduct) -> int:
    """Of the kernel's `Memory`."""
    weight, scales = (64 * plan.slabs * size for size in product.row_bytes)
    stage = weight + scales + 16 + plan.rows * 2 * product.step + 16
    columns = 32 if product.is_gated else 64
    return stages * stage + plan.slabs * min(plan.rows, AT_A_TIME) * (columns + 8) * 2


def prepare(
    x: Tensor,
    weight: Tensor | PackedWeight,
    product: ExpertsProduct,
    rows: GatheredRows,
    make_map: Callable[[Tensor, tuple[int, ...]], Map] = make_map,
) -> tuple[_Work, Tensor, list[Tensor]]:
    """The kernel's argument, its result, and what the argument points to besides its inputs."""
    output = torch.empty(x.shape[0], product.columns, device=x.device, dtype=x.dtype)
    num_experts, num_rows, depth = weight.shape
    weight_map, codes, scale, strides, packed_rows = Map(), None, None, (0, 0), 0
    if isinstance(weight, Tensor):
        # Eights of rows by turns: of gates and ups, or of neighbours.
        eights = weight.view(num_experts, -1, 2, 8, depth)
        if product.is_gated:
            eights = weight.view(num_experts, 2, -1, 8, depth).transpose(1, 2)
        weight_map = make_map(eights, (1, 4, 2, 8, BLOCK_DEPTH))
    else:
        codes, scale = weight.codes, weight.scale.values
        strides = codes[0].nbytes, scale[0].nbytes
        packed_rows = weight.packed_rows
    work = _Work(
        weight_map,
        make_map(x.unsqueeze(1), (BOX_ROWS, 1, BLOCK_DEPTH)),
        None if codes is None else codes.data_ptr(),
        None if scale is None else scale.data_ptr(),
        *strides,
        output.data_ptr(),
        None if product.is_gated else rows.order.data_ptr(),
        rows.expert.data_ptr(),
        rows.first.data_ptr(),
        rows.last.data_ptr(),
        rows.num_tiles.data_ptr(),
        product.columns,
        product.num_slabs,
        product.num_steps,
        product.columns if product.is_gated else 0,
        packed_rows,
    )
    return work, output, [x]


def make_flags(
    plan: SlabsPlan,
    stages: int,
    product: ExpertsProduct,
    activation: Activation | None,
    is_arranged: bool,
) -> dict[str, int]:
    """What the kernel is compiled with."""
    return {
        "FLOATS": int(product.code is None),
        "CODE": int(product.code or 0),
        "WIDTH": product.width,
        "SCALES": product.num_scales,
        "SCALE": product.scale,
        "ZERO": product.zero,
        "GATED": int(product.is_gated),
        "GELU": int(activation is Activation.GELU_TANH),
        "ARRANGED": int(is_arranged),
        "ROWS": plan.rows,
        "STAGES": stages,
        "WARPS": 4 * (plan.slabs + 1),
        "BLOCKS": plan.resident,
    }
