"""How a few rows times a weight in few bits are cut up for few_rows.cu. Pure arithmetic."""

from __future__ import annotations

import functools
from typing import NamedTuple

from torch import Tensor

from flashdraft.kernels.cuda.plan import DeviceLimits
from flashdraft.kernels.cuda.quantized.layout import Code, Number, PackedWeight

MAX_PARTS_BYTES = 48 << 20  # of sums that blocks hand over: more take memory, and time
DEPTH = {1: 4, 8: 3, 16: 3}  # units in a warp's ring, on their way or being read, by rows of x
EARLY = 2  # of them are asked for before x
FEW_UNITS = 8  # of a warp, for one row: then smaller units are faster
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
    num_to_choose: int = 0  # of experts, beside it

    @property
    def spare_blocks(self) -> int:
        """Blocks beside those that multiply: one that chooses."""
        return 1 if self.num_to_choose else 0

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


def find_zero(weight: PackedWeight) -> int:
    """The code that is zero, as the kernels have it: to those of eight bits they add 128."""
    return weight.zero + (128 if weight.code is Code.INT8 else 0)


def plan_few(num_rows: int, product: Product, limits: DeviceLimits) -> FewPlan | None:
    """Slices of x as large as shared memory has room for beside the rings.

    None where it has not, or where the weight is too small to go round.
    """
    stored_rows = 1 if num_rows == 1 else 8 if num_rows <= 8 else 16
    return _plan(stored_rows, product, limits)


@functools.lru_cache(maxsize=1024)
def _plan(stored_rows: int, product: Product, limits: DeviceLimits) -> FewPlan | None:
    either = next(counts for least, counts in WARPS.items() if limits.shared_bytes >= least)
    warps = either[product.code is not Code.INT4]
    processors = limits.num_processors - product.spare_blocks
    tiles = _find_tiles(stored_rows, product, processors * warps)
    most = 1 if product.experts else min(product.num_steps, processors)
    found: list[tuple[float, FewPlan]] = []
    for slices in range(1, most + 1):
        if product.num_steps % slices:
            continue
        blocks = processors // slices
        plan = FewPlan(stored_rows, tiles, warps, DEPTH[stored_rows], slices, blocks * slices)
        sizes = find_sizes(plan, product)
        num_units = sizes.num_tiles * sizes.slice_steps
        blocks = min(blocks, num_units // warps)
        if sizes.shared_bytes > limits.shared_bytes or blocks == 0 or num_units >= 1 << 31:
            continue  # a warp must have a unit, and know which
        if sizes.parts_bytes > MAX_PARTS_BYTES:
            continue
        plan = plan._replace(num_blocks=blocks * slices)
        plan = plan._replace(job_pieces=_find_job_pieces(plan, sizes))
        idle = processors / plan.num_blocks
        found.append((idle * (1 + 0.01 * slices), plan))
    return min(found, key=lambda pair: pair[0])[1] if found else None


def _find_tiles(stored_rows: int, product: Product, num_warps: int) -> int:
    """Two of them share what is read of x: always for several rows, for one if units are many."""
    if product.width > 32:
        return 1
    if stored_rows > 1:
        return 2
    num_units = product.columns // (2 * product.unit_columns) * product.num_steps
    return 1 if num_units < FEW_UNITS * num_warps else 2


def _find_job_pieces(plan: FewPlan, sizes: Sizes) -> int:
    """As many as leave work for most warps: a warp's jobs wait for the memory one by one."""
    num_pieces = sizes.num_tiles * sizes.num_pieces // (plan.num_blocks // plan.num_slices)
    fits = [n for n in (4, 2) if sizes.num_pieces % n == 0 and 3 * num_pieces >= 2 * n * plan.warps]
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
    shared_bytes = plan.warps * (plan.depth * slot_bytes + sums_bytes)
    shared_bytes += slice_steps * product.step * 2 * plan.stored_rows
    max_parts = plan.num_slices * of_a_slice
    # A counter for each piece; without slices a box for what each block leaves to the next one.
    arrivals_bytes, parts_bytes = 4 * num_tiles * pieces, num_tiles * max_parts * sums_bytes
    if plan.num_slices == 1:
        arrivals_bytes, parts_bytes = plan.num_blocks * sums_bytes * 2, 0
    sums = pieces, sums_bytes, shared_bytes, parts_bytes, arrivals_bytes
    return Sizes(slice_steps, num_tiles, max_parts, *sums)
