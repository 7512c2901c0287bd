"""Rows in e4m3 times weights in e4m3, in CUDA C++ for Hopper's tensor cores. CUDA only.

What the kernel does is said in fp8_rows.cu; this plans and launches it.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from ctypes import c_int, c_void_p
from typing import NamedTuple

import torch
from torch import Tensor

from flashdraft.kernels.cuda import overlap
from flashdraft.kernels.cuda.card import is_hopper
from flashdraft.kernels.cuda.driver import Kernel, Map, can_compile, make_map
from flashdraft.kernels.cuda.plan import DeviceLimits
from flashdraft.kernels.cuda.quantized.activations import CodedRows
from flashdraft.kernels.cuda.quantized.layout import Code, PackedWeight
from flashdraft.kernels.kinds import Activation

LANES = 64  # of a step, with two codes in each
BYTES = 2 * LANES  # of a row, in a step
MAX_STAGES = 12
FULL = 0.95  # of the processors, where fewer blocks than these have tiles, or parts of them, alike
PAIRED_ROWS = 1 << 20  # from so many on blocks are in pairs: no card has shown yet what they bring
_WIDE = 64  # rows of the weight, of a warpgroup
_CHUNK = 64  # rows of the result that are turned at a time
_SPARE_BYTES = 1024  # of shared memory, besides what the kernel says


class Tile(NamedTuple):
    """How rows of x are multiplied; said in fp8_rows.cu. By registers there is room for these."""

    rows: int
    pieces: int
    parts: int


TILES = (Tile(32, 1, 2), Tile(64, 1, 2), Tile(128, 1, 2), Tile(192, 1, 1), Tile(256, 2, 1))


class Fp8Plan(NamedTuple):
    """Launch settings of one product; most are said in fp8_rows.cu."""

    tile: Tile
    stages: int
    num_blocks: int
    team: int = 1
    warpgroups: int = 2  # that multiply

    @property
    def num_threads(self) -> int:
        """Of a block: one more warpgroup copies."""
        return 128 * (self.warpgroups + 1)

    def count_tiles(self, num_rows: int, columns: int, gated: bool) -> tuple[int, int]:
        """Of teams: by columns of the result, and by rows of x."""
        wide = self.team * _WIDE * (1 if gated else self.warpgroups)
        return -(-columns // wide), -(-num_rows // self.tile.rows)

    @property
    def shared_bytes(self) -> int:
        """As the kernel has them."""
        stage = (self.warpgroups * _WIDE + self.tile.rows) * BYTES
        turned = self.warpgroups * min(self.tile.rows, _CHUNK) * (_WIDE + 8) * 2
        signals = 16 * self.stages + -(-4 * self.warpgroups // 8) * 8
        return self.stages * stage + turned + signals


class _Work(ctypes.Structure):
    _fields_ = [
        *((name, Map) for name in ("weight", "x")),
        *((name, c_void_p) for name in ("scale", "scales", "output", "parts", "arrivals")),
        *((name, c_int) for name in ("num_rows", "num_columns", "up_rows", "packed_rows")),
        *((name, c_int) for name in ("num_steps", "row_tiles", "team_units", "spare_units")),
        ("filler", c_int * 14),  # to a multiple of 64 bytes
    ]


class Fp8Launch(NamedTuple):
    """The kernel's argument, with what it points to besides its inputs."""

    work: _Work
    output: Tensor
    parts: Tensor


def can_multiply(weight: PackedWeight, device: torch.device) -> bool:
    """Whether this is a weight, and a card, for the kernel."""
    fits = weight.code is Code.FP8 and weight.lanes == LANES and weight.is_whole
    return fits and weight.steps_per_group == 0 and is_hopper(device) and can_compile(device)


def choose_tile(num_rows: int) -> Tile:
    """The smallest that has all of them; else of the large ones that with the fewest not there."""
    if num_rows <= TILES[-1].rows:
        return next(tile for tile in TILES if num_rows <= tile.rows)
    large = TILES[2:]
    return min(large, key=lambda tile: (-(-num_rows // tile.rows) * tile.rows, -tile.rows))


@functools.lru_cache(maxsize=1024)
def plan_fp8(
    num_rows: int,
    columns: int,
    num_steps: int,
    gated: bool,
    limits: DeviceLimits,
    tile: Tile | None = None,
    team: int | None = None,
) -> Fp8Plan | None:
    """None where shared memory has no room."""
    team = team or (2 if num_rows >= PAIRED_ROWS else 1)
    plan = Fp8Plan(tile or choose_tile(num_rows), 0, team, team)
    spare = limits.shared_bytes - _SPARE_BYTES - plan.shared_bytes
    a_stage = plan._replace(stages=1).shared_bytes - plan.shared_bytes
    stages = min(MAX_STAGES, spare // a_stage)
    if stages < 2:
        return None
    tiles = plan.count_tiles(num_rows, columns, gated)
    teams = _count_teams(tiles[0] * tiles[1], num_steps, limits.num_processors // team)
    return plan._replace(stages=stages, num_blocks=teams * team)


def _count_teams(num_tiles: int, num_steps: int, room: int) -> int:
    """As many as there is room for, or nearly so where none then has parts of two tiles."""
    most = min(room, num_tiles * num_steps)
    for count in range(most, int(FULL * most), -1):
        parts, rest = divmod(count, num_tiles)
        if num_tiles % count == 0 or (rest == 0 and num_steps % parts == 0):
            return count
    return most


def multiply_fp8(
    x: CodedRows,
    weight: PackedWeight,
    plan: Fp8Plan,
    arrivals: Tensor,
    dtype: torch.dtype,
    activation: Activation | None = None,
) -> Tensor:
    """The rows that x stands for @ weight.T; `arrivals` as in dense.linear.multiply_rows.

    With an activation the weight is [gate | up] by its rows: the result is that of `Kernels.gated`.
    """
    prepared = prepare(x, weight, plan, arrivals, dtype, activation)
    device = x.codes.device
    flags = make_flags(plan, activation).items()
    kernel = Kernel.load("quantized/fp8_rows.cu", "multiply_coded", device, *flags)
    overlaps = overlap.can_overlap(device)
    settings = plan.num_blocks, plan.num_threads, plan.shared_bytes
    kernel.launch(*settings, prepared.work, overlaps)
    return prepared.output


def prepare(
    x: CodedRows,
    weight: PackedWeight,
    plan: Fp8Plan,
    arrivals: Tensor,
    dtype: torch.dtype,
    activation: Activation | None,
    make_map: Callable[[Tensor, tuple[int, int, int]], Map] = make_map,
) -> Fp8Launch:
    """What the kernel needs."""
    gated, device = activation is not None, x.codes.device
    num_rows, columns = len(x.codes), weight.shape[0] // (2 if gated else 1)
    by_columns, row_tiles = plan.count_tiles(num_rows, columns, gated)
    num_tiles, num_teams = by_columns * row_tiles, plan.num_blocks // plan.team
    num_units = num_tiles * weight.num_steps
    assert 0 < num_teams <= num_units < 1 << 31
    assert arrivals.numel() >= num_tiles * plan.team * plan.warpgroups
    assert x.scale.numel() >= row_tiles * plan.tile.rows
    output = torch.empty(num_rows, columns, device=device, dtype=dtype)
    # Of the tile that a block began with, and of its last one, unless all tiles are whole.
    sums = plan.num_blocks * 2 * plan.warpgroups * _WIDE * plan.tile.rows
    sums *= num_tiles % num_teams > 0
    parts = torch.empty(sums, device=device, dtype=torch.float32)
    work = _Work(
        make_map(weight.codes, (1, _WIDE, LANES)),
        make_map(x.codes, (plan.tile.rows // plan.team, 1, LANES)),
        weight.scale.values.data_ptr(),
        x.scale.data_ptr(),
        output.data_ptr(),
        parts.data_ptr(),
        arrivals.data_ptr(),
        num_rows,
        columns,
        columns if gated else 0,
        weight.packed_rows,
        weight.num_steps,
        row_tiles,
        *divmod(num_units, num_teams),
    )
    return Fp8Launch(work, output, parts)


def make_flags(plan: Fp8Plan, activation: Activation | None) -> dict[str, int]:
    """What the kernel is compiled with."""
    return {
        "CODE": int(Code.FP8),
        "WIDTH": LANES,
        "SCALES": 0,
        "SCALE": 3,
        "GATED": int(activation is not None),
        "GELU": int(activation is Activation.GELU_TANH),
        "ROWS": plan.tile.rows,
        "PIECES": plan.tile.pieces,
        "PARTS": plan.tile.parts,
        "STAGES": plan.stages,
        "TEAM": plan.team,
        "WARPS": plan.num_threads // 32,
        "BLOCKS": 1,
    }
