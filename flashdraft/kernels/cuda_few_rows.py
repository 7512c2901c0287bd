"""A few rows times weights in few bits, in CUDA C++: int4, int8 and e4m3. CUDA only.

Linears for at most MAX_ROWS rows, and a mixture of experts for one. What the kernel does is said in
cuda/few_rows.cu; this plans it and launches it.
"""

from __future__ import annotations

import ctypes
import functools
import math
from ctypes import c_float, c_int, c_uint64, c_void_p
from typing import NamedTuple

import torch
from torch import Tensor

from flashdraft.kernels import triton_launch
from flashdraft.kernels.cuda_driver import Kernel, can_compile
from flashdraft.kernels.interface import Activation, Residual
from flashdraft.kernels.triton_plan import DeviceLimits
from flashdraft.kernels.triton_quantized_layout import Code, Number, PackedWeight

# Rows of x for which this is the way, at most 16. With more than one, Triton is faster at e4m3, and
# at weights with fewer values.
MAX_ROWS = {Code.INT4: 16, Code.INT8: 16, Code.FP8: 1}
MIN_VALUES = 1 << 25
MAX_PARTS_BYTES = 48 << 20  # of sums that blocks hand over: more take memory, and time
CLUSTER = 2  # slices that meet in a cluster; larger ones leave processors without work
DEPTH = {1: 4, 8: 3, 16: 3}  # units in a warp's ring, on their way or being read, by rows of x
EARLY = 2  # of them are asked for before x
# By shared memory: rings leave most of it to x. A card with little of it has a slower memory too.
WARPS = {200 << 10: (12, 16), 128 << 10: (8, 8), 0: (4, 4)}  # of a block, with four bits or eight
_SCALES = {Number.FLOAT16: 1, Number.BFLOAT16: 2, Number.FLOAT32: 3}


class FewPlan(NamedTuple):
    """Launch settings of one product."""

    stored_rows: int  # of x
    tiles: int  # of sixteen rows of the weight, in a unit
    warps: int
    depth: int
    num_slices: int
    num_blocks: int
    job_pieces: int = 1  # of a tile of the result, that a warp adds up at a time
    clustered: bool = False  # a cluster of blocks has all slices


class Product(NamedTuple):
    """What is multiplied: the weight's format and its sizes, those of all chosen experts if any."""

    code: Code
    width: int  # of a plane
    num_scales: int  # of a row in a unit; 0: one for all of it
    scale: int
    columns: int
    up_rows: int  # 0: it is not gated
    num_steps: int
    experts: int = 0  # 1: below each other, 2: beside each other
    expert_columns: int = 0
    expert_steps: int = 0
    is_settled: bool = True  # which experts, if any
    normed: int = 0  # 1: the norm of one row; 2, 3: of a sum of so many

    @property
    def unit_columns(self) -> int:
        """Columns of the result in a tile of sixteen rows of the weight."""
        return 8 if self.up_rows else 16

    @property
    def step(self) -> int:
        """Values of the depth in a unit."""
        return self.width * (4 if self.code is Code.INT4 else 2)

    @property
    def scale_bytes(self) -> int:
        """Of a row in a unit, as they are copied."""
        return max(4, self.num_scales * (4 if self.scale == 3 else 2)) if self.num_scales else 0


class Sizes(NamedTuple):
    """What follows from a plan and a product."""

    slice_steps: int
    num_tiles: int
    max_parts: int  # of a tile
    num_pieces: int  # of a tile
    sums_bytes: int
    shared_bytes: int
    parts_bytes: int  # of all tiles, if all of them had so many
    arrivals_bytes: int


class Experts(NamedTuple):
    """Which experts one row has chosen, and, where their results meet, their shares."""

    chosen: Tensor
    shares: Tensor | None = None
    are_settled: bool = False  # were chosen before the kernel before this one began


class Normed(NamedTuple):
    """A row that is summed up, and normed, before it is multiplied."""

    residual: Residual
    norm: Tensor
    eps: float
    stream: Tensor  # where the sum is written

    @property
    def tensors(self) -> list[Tensor | None]:
        """As the kernel has them."""
        missing = [None] * (2 - len(self.residual.deltas))
        deltas = [delta for delta, _ in self.residual.deltas]
        norms = [norm for _, norm in self.residual.deltas]
        others = [self.residual.post, self.residual.scalar, self.stream]
        return [self.norm, *deltas, *missing, *norms, *missing, *others]


class _Work(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("x", "codes", "scale", "output", "parts", "arrivals")),
        *((name, c_void_p) for name in ("chosen", "shares")),
        ("expert_rows", c_uint64),
        *((name, c_int) for name in ("num_rows", "num_columns", "up_rows", "packed_rows")),
        *((name, c_int) for name in ("depth", "row_stride", "num_slices", "slice_steps")),
        *((name, c_int) for name in ("warp_units", "spare_units")),
        *((name, c_int) for name in ("expert_tiles", "expert_steps", "max_parts")),
        *((name, c_float) for name in ("zero", "eps")),
        *((name, c_void_p) for name in ("norm", "delta", "other", "delta_norm", "other_norm")),
        *((name, c_void_p) for name in ("post", "scalar", "stream")),
    ]


def describe_product(
    weight: PackedWeight, gated: bool = False, experts: Experts | None = None
) -> Product | None:
    """A product that the kernel can compute; None where Triton must."""
    if weight.code is Code.INT6 or weight.minimum is not None or weight.lanes < 32:
        return None
    num_scales = weight.groups_per_step if weight.steps_per_group else 0
    fits = weight.steps_per_group <= 1 and weight.scale.kind in _SCALES
    fits = fits and (weight.scale.kind is not Number.FLOAT32 or num_scales <= 1)
    *stack, rows, depth = weight.shape
    columns = rows // 2 if gated else rows
    fits = fits and depth % 8 == 0 and bool(stack) is (experts is not None)
    if experts is not None:
        fits = fits and num_scales > 0
    if not fits or columns % 32 and (gated or experts is not None):
        return None
    product = Product(
        weight.code,
        weight.lanes,
        num_scales,
        _SCALES[weight.scale.kind],
        columns,
        columns if gated else 0,
        weight.num_steps,
    )
    if experts is None:
        return product
    count, place = experts.chosen.numel(), 1 if experts.shares is None else 2
    return product._replace(
        columns=columns * (count if place == 1 else 1),
        num_steps=weight.num_steps * (count if place == 2 else 1),
        experts=place,
        expert_columns=columns,
        expert_steps=weight.num_steps,
        is_settled=experts.are_settled,
    )


def plan_few(
    num_rows: int, product: Product, limits: DeviceLimits, clusters: bool = True
) -> FewPlan | None:
    """Slices of x as large as shared memory has room for beside the rings, met in clusters if any.

    None where it has not, or where the weight is too small to go round.
    """
    stored_rows = 1 if num_rows == 1 else 8 if num_rows <= 8 else 16
    return _plan(stored_rows, product, limits, clusters and limits.generation >= 9)


@functools.lru_cache(maxsize=1024)
def _plan(
    stored_rows: int, product: Product, limits: DeviceLimits, clusters: bool
) -> FewPlan | None:
    tiles = 2 if product.width == 32 else 1
    either = next(counts for least, counts in WARPS.items() if limits.shared_bytes >= least)
    warps = either[product.code is not Code.INT4]
    most = 1 if product.experts else min(product.num_steps, limits.num_processors)
    found: list[tuple[float, FewPlan]] = []
    for slices in range(1, most + 1):
        if product.num_steps % slices:
            continue
        for clustered in (False, True) if clusters and slices == CLUSTER else (False,):
            blocks = limits.num_processors // slices
            plan = FewPlan(stored_rows, tiles, warps, DEPTH[stored_rows], slices, blocks * slices)
            plan = plan._replace(clustered=clustered)
            sizes = find_sizes(plan, product)
            num_units = sizes.num_tiles * sizes.slice_steps
            blocks = min(blocks, num_units // warps)
            if sizes.shared_bytes > limits.shared_bytes or blocks == 0 or num_units >= 1 << 31:
                continue  # a warp must have a unit, and know which
            if sizes.parts_bytes > MAX_PARTS_BYTES:
                continue
            if clustered and -(-num_units // (blocks * warps)) >= 2 * sizes.slice_steps:
                continue  # it would have more than one whole tile
            plan = plan._replace(num_blocks=blocks * slices)
            plan = plan._replace(job_pieces=_find_job_pieces(plan, sizes))
            idle = limits.num_processors / plan.num_blocks
            found.append((idle * (1 + 0.01 * slices) * (0.9 if clustered else 1), plan))
    return min(found, key=lambda pair: pair[0])[1] if found else None


def _find_job_pieces(plan: FewPlan, sizes: Sizes) -> int:
    """As many as leave work for most warps: a warp's jobs wait for the memory one by one."""
    num_pieces = sizes.num_tiles * sizes.num_pieces // (plan.num_blocks // plan.num_slices)
    warps = plan.warps * (plan.num_slices if plan.clustered else 1)
    fits = [n for n in (4, 2) if sizes.num_pieces % n == 0 and 3 * num_pieces >= 2 * n * warps]
    return fits[0] if fits else 1


def find_sizes(plan: FewPlan, product: Product) -> Sizes:
    """As the kernel has them."""
    slice_steps = product.num_steps // plan.num_slices
    num_tiles = -(-product.columns // (plan.tiles * product.unit_columns))
    num_warps = plan.num_blocks // plan.num_slices * plan.warps
    block_units = max(1, num_tiles * slice_steps // num_warps) * plan.warps  # at least
    of_a_slice = -(-(slice_steps - 1) // block_units) + 1
    one, row_tiles = plan.stored_rows == 1, -(-plan.stored_rows // 8)
    pieces = -(-plan.tiles // 2) if one else plan.tiles * row_tiles
    sums_bytes = pieces * (128 if one else 512)
    slot_bytes = 16 * plan.tiles * (2 * product.width + product.scale_bytes)
    shared_bytes = plan.warps * (plan.depth * slot_bytes + (1 + plan.clustered) * sums_bytes)
    shared_bytes += slice_steps * product.step * 2 * plan.stored_rows
    max_parts = plan.num_slices * of_a_slice
    # A counter for each piece; without slices a box for what each block leaves to the next one.
    arrivals_bytes, parts_bytes = 4 * num_tiles * pieces, num_tiles * max_parts * sums_bytes
    if plan.clustered or plan.num_slices == 1:
        arrivals_bytes, parts_bytes = plan.num_blocks // plan.num_slices * sums_bytes * 2, 0
    sums = pieces, sums_bytes, shared_bytes, parts_bytes, arrivals_bytes
    return Sizes(slice_steps, num_tiles, max_parts, *sums)


def multiply_few(
    x: Tensor,
    weight: PackedWeight,
    limits: DeviceLimits,
    arrivals: Tensor,
    activation: Activation | None = None,
) -> Tensor | None:
    """x [num_rows, depth] bfloat16 @ weight.T; `arrivals` as in triton_linear.multiply_rows.

    With an activation the weight is [gate | up] by its rows: the result is that of `Kernels.gated`.
    None where this is not the way to multiply.
    """
    if not beats_triton(x.shape[0], weight) or not _is_readable(x):
        return None
    product = describe_product(weight, activation is not None)
    if product is None:
        return None
    plan = plan_few(x.shape[0], product, limits)
    if plan is not None and plan.clustered and not _has_room(plan, product, activation, x.device):
        plan = plan_few(x.shape[0], product, limits, clusters=False)
    return None if plan is None else launch(x, weight, product, plan, arrivals, activation)


def multiply_normed(
    residual: Residual,
    norm: Tensor,
    eps: float,
    weight: PackedWeight,
    limits: DeviceLimits,
    arrivals: Tensor,
    activation: Activation | None = None,
) -> tuple[Tensor, Tensor] | None:
    """`Kernels.residual_linear` for one row; None where this is not the way."""
    x = residual.x
    if x.shape[0] != 1 or not beats_triton(1, weight) or not _is_readable(x):
        return None
    stream = torch.empty_like(x) if residual.deltas else x
    normed = Normed(residual, norm, eps, stream)
    if not all(t is None or t.numel() == 1 or _is_readable(t.view(1, -1)) for t in normed.tensors):
        return None
    product = describe_product(weight, activation is not None)
    if product is None:
        return None
    product = product._replace(normed=1 + len(residual.deltas))
    plan = plan_few(1, product, limits)
    if plan is None or plan.num_slices > 1:
        return None
    return stream, launch(x, weight, product, plan, arrivals, activation, normed=normed)


@functools.lru_cache(maxsize=1024)
def _has_room(
    plan: FewPlan, product: Product, activation: Activation | None, device: torch.device
) -> bool:
    """Whether all clusters run at the same time: how a card groups its processors is its secret."""
    kernel = _load(plan, product, activation, device)
    sizes = find_sizes(plan, product)
    count = kernel.count_clusters(plan.num_slices, 32 * plan.warps, sizes.shared_bytes)
    return count * plan.num_slices >= plan.num_blocks


def _load(
    plan: FewPlan, product: Product, activation: Activation | None, device: torch.device
) -> Kernel:
    flags = make_flags(product, plan, activation)
    return Kernel.load("few_rows.cu", "multiply_few", device, *flags.items())


def beats_triton(num_rows: int, weight: PackedWeight) -> bool:
    """Whether this is taken to be the faster way for so many rows: measured at 1 and 16 of them."""
    is_large = num_rows == 1 or math.prod(weight.shape) >= MIN_VALUES
    return 0 < num_rows <= MAX_ROWS.get(weight.code, 0) and is_large


def mix_one(
    x: Tensor,
    gate_up: PackedWeight,
    down: PackedWeight,
    experts: Experts,
    activation: Activation,
    limits: DeviceLimits,
    arrivals: Tensor,
) -> Tensor | None:
    """`Kernels.experts` for one row, in two launches; None where this is not the way."""
    chosen, shares, _ = experts
    if x.shape[0] != 1 or not beats_triton(1, gate_up) or not _is_readable(x):
        return None
    assert chosen.is_contiguous() and chosen.dtype is torch.int64
    assert shares is not None and shares.is_contiguous() and shares.dtype is torch.float32
    # The second of the launches: they were chosen before the first one.
    ups, downs = experts._replace(shares=None), experts._replace(are_settled=True)
    first, second = describe_product(gate_up, True, ups), describe_product(down, False, downs)
    if first is None or second is None:
        return None
    plans = plan_few(1, first, limits), plan_few(1, second, limits)
    if plans[0] is None or plans[1] is None:
        return None
    between = launch(x, gate_up, first, plans[0], arrivals, activation, ups)
    between = between.view(chosen.numel(), -1)
    return launch(between, down, second, plans[1], arrivals, experts=downs)


def launch(
    x: Tensor,
    weight: PackedWeight,
    product: Product,
    plan: FewPlan,
    arrivals: Tensor,
    activation: Activation | None = None,
    experts: Experts | None = None,
    normed: Normed | None = None,
) -> Tensor:
    """A product on the current stream."""
    work, sizes, output, _parts = prepare(x, weight, product, plan, arrivals, experts, normed)
    _load(plan, product, activation, x.device).launch(
        plan.num_blocks,
        32 * plan.warps,
        sizes.shared_bytes,
        work,
        triton_launch.can_overlap(x.device),
        plan.num_slices if plan.clustered else 1,
    )
    return output


def prepare(
    x: Tensor,
    weight: PackedWeight,
    product: Product,
    plan: FewPlan,
    arrivals: Tensor,
    experts: Experts | None = None,
    normed: Normed | None = None,
) -> tuple[_Work, Sizes, Tensor, Tensor]:
    """The kernel's argument, with what it points to besides its inputs."""
    sizes, num_rows = find_sizes(plan, product), 1 if product.experts else x.shape[0]
    num_warps = plan.num_blocks // plan.num_slices * plan.warps
    assert product.num_steps % plan.num_slices == 0 and num_rows <= plan.stored_rows
    assert plan.num_blocks % plan.num_slices == 0
    num_units = sizes.num_tiles * sizes.slice_steps
    assert 0 < num_warps <= num_units < 1 << 31
    if plan.clustered:  # a warp has room for one whole tile
        assert -(-num_units // num_warps) < 2 * sizes.slice_steps
    assert 4 * arrivals.numel() >= sizes.arrivals_bytes and x.stride(1) == 1
    output = torch.empty(num_rows, product.columns, device=x.device, dtype=x.dtype)
    parts = torch.empty(sizes.parts_bytes, device=x.device, dtype=torch.uint8)
    shares = None if experts is None or experts.shares is None else experts.shares
    work = _Work(
        x.data_ptr(),
        weight.codes.data_ptr(),
        weight.scale.values.data_ptr(),
        output.data_ptr(),
        parts.data_ptr(),
        arrivals.data_ptr(),
        None if experts is None else experts.chosen.data_ptr(),
        None if shares is None else shares.data_ptr(),
        weight.num_steps * weight.packed_rows,
        num_rows,
        product.columns,
        product.up_rows,
        weight.packed_rows,
        weight.shape[-1],
        x.stride(0),
        plan.num_slices,
        sizes.slice_steps,
        *divmod(num_units, num_warps),
        product.expert_columns // (plan.tiles * product.unit_columns),
        product.expert_steps,
        sizes.max_parts,
        weight.zero + (128 if weight.code is Code.INT8 else 0),
        *(() if normed is None else (normed.eps, *map(_address, normed.tensors))),
    )
    return work, sizes, output, parts


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def make_flags(product: Product, plan: FewPlan, activation: Activation | None) -> dict[str, int]:
    """What the kernel is compiled with."""
    return {
        "CODE": int(product.code),
        "WIDTH": product.width,
        "SCALES": product.num_scales,
        "SCALE": product.scale,
        "ROWS": plan.stored_rows,
        "GATED": int(product.up_rows > 0),
        "GELU": int(activation is Activation.GELU_TANH),
        "EXPERTS": product.experts,
        "SETTLED": int(product.is_settled),
        "NORMED": product.normed,
        "CHUNKS": -(-product.num_steps * product.step // (256 * plan.warps))
        if product.normed
        else 1,
        "TILES": plan.tiles,
        "WARPS": plan.warps,
        "DEPTH": plan.depth,
        "EARLY": min(EARLY, plan.depth - 1),
        "BLOCKS": 1,
        "JOB_PIECES": plan.job_pieces,
        "SLICES": 2 if plan.clustered else int(plan.num_slices > 1),
    }


def _is_readable(x: Tensor) -> bool:
    """Whether rows can be read sixteen bytes at a time, here and on this device."""
    is_aligned = x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0
    return x.dtype is torch.bfloat16 and is_aligned and can_compile(x.device)
