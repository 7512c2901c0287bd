"""How many rows times a weight in few bits are cut up for many_rows.cu. Pure arithmetic."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

from flashdraft.kernels.cuda.plan import DeviceLimits
from flashdraft.kernels.cuda.quantized.few_rows_plan import Product
from flashdraft.kernels.cuda.quantized.layout import Code

# For so many rows of x this is the way, over weights of so many values. On an H200 Triton was
# faster with 17 and 32 rows, this with 48 to 512. What lies between and beyond was not measured:
# more rows multiply a weight that is bfloat16 for the moment.
MIN_ROWS, MAX_ROWS = 33, 512
MIN_VALUES = 1 << 22
BLOCK_DEPTH = 64  # of x, in a stage
TILE_ROWS = 64  # of the weight, in a tile of a warpgroup
TURNED_ROWS = 32  # of the result, in shared memory
MAX_STAGES, MIN_STAGES = 12, 3
MAX_STEPS, MIN_STEPS = 16, 2
FLIGHT_BYTES = 64 << 10  # of the weight, on its way to a processor: what the memory's latency takes
FULL = 0.95  # of the processors, where fewer blocks than these have tiles, or parts of them, alike
_SPARE_BYTES = 1024  # of shared memory

# Rows of x in a tile, tiles of a warpgroup, warps: what registers have room for.
SHAPES = [
    *((rows, tiles, 12) for rows in (32, 64, 96, 128) for tiles in (1, 2)),
    *((rows, 1, 12) for rows in (192, 256)),
    *((rows, 1, 16) for rows in (32, 64, 96, 128)),
]

# Weights of so many values have two tiles for a warpgroup; with 128 rows twice as many, unless they
# are 8 bits with groups. Smaller ones are better shared out evenly. Found on an H200.
TWO_TILES = 1 << 26

# What takes how long, in cycles of a processor: these say among how many blocks a small weight is
# shared. Estimated from an H200's peaks.
PRODUCTS = 2048  # of a cycle
LOST_ROWS = 24  # of every tile: as if tensor cores multiplied so many more
READ = 18.0  # bytes of the weight a cycle
COPIED = 30.0  # bytes a cycle from the cache that processors share, x among them
UNPACKING = {True: 60, False: 40}  # of a group of 32 values for a warp, by whether it has scales
JOINING = 2500  # until a block knows that all parts are there, and the result is written
BEGIN = 2500  # until the first products


class ManyPlan(NamedTuple):
    """Launch settings of one product; most are said in many_rows.cu."""

    rows: int  # of x, in a tile
    tiles: int
    stages: int
    steps: int
    num_blocks: int
    warps: int = 12  # two warpgroups that multiply, and one that copies

    @property
    def warpgroups(self) -> int:
        """Those that multiply."""
        return self.warps // 4 - 1

    def count_tiles(self, num_rows: int, product: Product) -> tuple[int, int]:
        """Of the result: by rows of the weight, and by rows of x."""
        columns = self.warpgroups * self.tiles * tile_columns(product)
        return -(-product.columns // columns), -(-num_rows // self.rows)

    def step_bytes(self, product: Product) -> int:
        """Of shared memory, for the weight's codes and scales in a step."""
        tiles = self.warpgroups * self.tiles
        scales = TILE_ROWS * _row_scale_bytes(product)
        none = 16 * (2 if product.up_rows else 1)
        return tiles * (TILE_ROWS * 2 * product.width + (scales or none))

    def shared_bytes(self, product: Product) -> int:
        """As the kernel has them."""
        signals = 16 * (self.stages + self.steps)
        turned = self.warpgroups * TURNED_ROWS * (tile_columns(product) + 8) * 2
        stages = self.stages * self.rows * 2 * BLOCK_DEPTH
        return stages + self.steps * self.step_bytes(product) + turned + signals


def tile_columns(product: Product) -> int:
    """Of the result, in a tile of a warpgroup."""
    return TILE_ROWS // 2 if product.up_rows else TILE_ROWS


@functools.lru_cache(maxsize=1024)
def plan_many(num_rows: int, product: Product, limits: DeviceLimits) -> ManyPlan | None:
    """With the tiles of `choose_shape`; None where shared memory has no room."""
    return make_plan(choose_shape(num_rows, product), num_rows, product, limits)


def choose_shape(num_rows: int, product: Product) -> tuple[int, int, int]:
    """As few tiles of x as can be, then small ones: every tile unpacks the weight anew.

    Up to 256 rows have one tile, 257 to 384 two of 192, and up to 512 two of 256.
    """
    sizes = {rows for rows, _, _ in SHAPES}
    rows = min(sizes, key=lambda rows: (-(-num_rows // rows), rows))
    values = product.columns * (2 if product.up_rows else 1) * product.num_steps * product.step
    are_groups_of_8_bits = product.code is Code.INT8 and product.num_scales > 0
    two = TWO_TILES * (2 if rows == 128 and not are_groups_of_8_bits else 1)
    return rows, 2 if values >= two and (rows, 2, 12) in SHAPES else 1, 12


def make_plan(
    shape: tuple[int, int, int], num_rows: int, product: Product, limits: DeviceLimits
) -> ManyPlan | None:
    """With tiles of this shape (one of SHAPES); None where shared memory has no room."""
    rows, tiles, warps = shape
    plan = ManyPlan(rows, tiles, 0, 0, 1, warps)
    step_bytes, stage_bytes = plan.step_bytes(product) + 16, rows * 2 * BLOCK_DEPTH + 16
    room = limits.shared_bytes - _SPARE_BYTES - plan.shared_bytes(product)
    steps = min(MAX_STEPS, max(MIN_STEPS, -(-FLIGHT_BYTES // step_bytes)))
    steps = min(steps, (room - MIN_STAGES * stage_bytes) // step_bytes)
    if steps < MIN_STEPS:
        return None
    stages = min(MAX_STAGES, (room - steps * step_bytes) // stage_bytes)
    steps = min(MAX_STEPS, (room - stages * stage_bytes) // step_bytes)  # what is left is theirs
    num_tiles = math.prod(plan.count_tiles(num_rows, product))
    shares = _share(num_tiles, product.num_steps, limits.num_processors)
    plans = [plan._replace(stages=stages, steps=steps, num_blocks=blocks) for blocks in shares]
    return min(plans, key=lambda plan: count_cycles(plan, num_rows, product))


def count_cycles(plan: ManyPlan, num_rows: int, product: Product) -> float:
    """What a product should take."""
    columns, row_tiles = plan.count_tiles(num_rows, product)
    tiles, step = plan.warpgroups * plan.tiles, product.step
    code_bytes = tiles * TILE_ROWS * (2 * product.width + _row_scale_bytes(product))
    unit = max(
        tiles * TILE_ROWS * (plan.rows + LOST_ROWS) * step / PRODUCTS,
        tiles * step // 32 * UNPACKING[product.num_scales > 0],
        code_bytes / READ,
        (code_bytes + plan.rows * step * 2) / COPIED,
    )
    num_tiles = columns * row_tiles
    cycles = BEGIN + -(-num_tiles * product.num_steps // plan.num_blocks) * unit
    if num_tiles % plan.num_blocks:
        part_bytes = tiles * TILE_ROWS * plan.rows * 4
        num_parts = max(2, -(-plan.num_blocks // num_tiles))
        cycles += JOINING + (num_parts - 1) * part_bytes / COPIED
    return cycles


def _row_scale_bytes(product: Product) -> int:
    """Of a row of the weight in a step."""
    return product.num_scales * (4 if product.scale == 3 else 2)


def _share(num_tiles: int, num_steps: int, num_processors: int) -> list[int]:
    """Blocks there may be: all processors, or nearly so where no block has parts of two tiles.

    Where all of them have small parts of a tile, also as few as leave larger parts.
    """
    most = best = min(num_processors, num_tiles * num_steps)
    for blocks in range(most, int(FULL * most), -1):
        parts, rest = divmod(blocks, num_tiles)
        if num_tiles % blocks == 0 or (rest == 0 and num_steps % parts == 0):
            best = blocks
            break
    return [best, *range(num_tiles, best, num_tiles)]
