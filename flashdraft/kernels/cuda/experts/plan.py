"""How a mixture of experts is cut into programs: which way, tile sizes, warps, stages.

Pure arithmetic on sizes the host knows already; the kernels are in one_row.py (one row),
few_rows.py and grouped.py, and on Hopper in slabs.py.
"""

from __future__ import annotations

from typing import NamedTuple


class TilePlan(NamedTuple):
    """One product's tiles: `block_n` of its columns, `block_k` of its depth at a time."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    resident: int = 1  # programs one processor works on at a time


class ExpertsPlan(NamedTuple):
    """The products of one mixture: gate and up together, then down."""

    up: TilePlan
    down: TilePlan
    block_m: int  # rows of one expert in a tile; 0: there is one row, and no tile
    splits: int = 0  # of the experts, where a tile holds all rows; 0: rows are sorted by expert


class SlabsPlan(NamedTuple):
    """Both products of a mixture in slabs.cu."""

    rows: int  # of one expert in a tile
    slabs: int  # of 64 rows of a weight, that a block multiplies at a time
    resident: int = 1  # blocks on a processor
    max_stages: int = 8


MIN_SLAB_ROWS = 17  # fewer: all of them are in one tile, for all experts
MAX_SLAB_ROWS = 1024  # of weights in 16 bits; those in few bits would be made 16 first
SOME_SLABS = SlabsPlan(rows=64, slabs=4)
MANY_SLABS = SlabsPlan(rows=128, slabs=3)  # what registers have room for
MAX_SOME_SLABS = 512  # rows: more would take several tiles of most experts

ONE_ROW = ExpertsPlan(
    up=TilePlan(block_n=16, block_k=256, num_warps=4, num_stages=3),
    down=TilePlan(block_n=4, block_k=128, num_warps=4, num_stages=3),
    block_m=0,
)
# Bound by memory: narrow tiles, so that a few experts keep the whole card reading.
ALL_ROWS = ExpertsPlan(
    up=TilePlan(block_n=32, block_k=128, num_warps=4, num_stages=4, resident=3),
    # Half of the stages: the expert's number must be there before its weights can be asked for.
    down=TilePlan(block_n=32, block_k=64, num_warps=4, num_stages=15),
    block_m=16,
    splits=4,
)
FEW_ROWS = ExpertsPlan(
    up=TilePlan(block_n=16, block_k=128, num_warps=4, num_stages=5, resident=4),
    down=TilePlan(block_n=64, block_k=64, num_warps=4, num_stages=5, resident=5),
    block_m=16,
)
SOME_ROWS = ExpertsPlan(
    up=TilePlan(block_n=32, block_k=128, num_warps=4, num_stages=3, resident=2),
    down=TilePlan(block_n=64, block_k=64, num_warps=4, num_stages=4, resident=3),
    block_m=64,
)
# Bound by arithmetic: tiles as large as registers hold.
MANY_ROWS = ExpertsPlan(
    up=TilePlan(block_n=64, block_k=64, num_warps=8, num_stages=4),
    down=TilePlan(block_n=128, block_k=64, num_warps=8, num_stages=4),
    block_m=128,
)
# No tensor cores: the operands live in registers.
FLOAT32 = ExpertsPlan(
    up=TilePlan(block_n=16, block_k=32, num_warps=4, num_stages=2, resident=4),
    down=TilePlan(block_n=32, block_k=32, num_warps=4, num_stages=2, resident=4),
    block_m=16,
)


def plan_experts(num_rows: int, num_chosen: int, num_experts: int, itemsize: int) -> ExpertsPlan:
    """Tiles that hold all rows of an expert while there are few, and fill the tensor cores then."""
    if num_rows == 1:
        return ONE_ROW
    if itemsize == 4:
        return FLOAT32
    if num_rows <= 16:
        return ALL_ROWS
    if num_rows <= 64:
        return FEW_ROWS
    mean_rows = num_rows * num_chosen // num_experts  # of one expert, were they all chosen alike
    return SOME_ROWS if mean_rows <= 64 else MANY_ROWS


def plan_slabs(num_rows: int, is_few_bits: bool) -> SlabsPlan | None:
    """Where a Hopper card has another way than these; None where it has not."""
    if num_rows < MIN_SLAB_ROWS or (num_rows > MAX_SLAB_ROWS and not is_few_bits):
        return None
    return SOME_SLABS if num_rows <= MAX_SOME_SLABS else MANY_SLABS


def plan_exact_experts(itemsize: int) -> ExpertsPlan:
    """One plan for any number of rows: a row's bits do not depend on how many others there are."""
    return FLOAT32 if itemsize == 4 else FEW_ROWS
