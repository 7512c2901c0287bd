"""Attention of many rows, or of several sequences, in CUDA C++ (attend_many.cu), in one launch.

Owns its plan and its launch. It is the way on Hopper wherever `attend_few` is not: every processor
is given an equal part of all that is to be read, whatever sequences have how many rows and keys.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable
from ctypes import c_char, c_float, c_int, c_void_p
from typing import NamedTuple

import torch
from torch import Tensor

from flashdraft.kernels.cuda.driver import Kernel, Map, can_compile, make_map
from flashdraft.kernels.cuda.plan import DeviceLimits
from flashdraft.kernels.interface import PagedKeys

HOPPER = 9
MAX_SEQS = 256  # a block's memory has no room for more
MAX_ROWS = (1 << 16) - 1
MAX_PLACES = 1 << 16  # where blocks meet
MAX_PARTS = 4  # of a tile, by and large: one block after the other joins them
DEPTH, WARPS, WARPGROUPS, MAX_DEALT = 64, 12, 2, 160  # as in the kernel
PAIRS = {128: 128, 256: 128, 512: 64}  # of a row and a head in a block, by the size of a head
KEYS = 64  # that are multiplied at a time
SLICES = {128: 1, 256: 1, 512: 4}  # in which they are copied
STAGES = {128: 8, 256: 5, 512: 9}  # of so many slices of keys or values
TURN_PAIRS = {128: 1, 256: 1, 512: 64}


class ManyRowsPlan(NamedTuple):
    """Launch settings of one attention."""

    team: int  # so many blocks have a tile together
    stages: int
    num_places: int  # for tiles, of a key head
    num_blocks: int
    shared_bytes: int


class _Work(ctypes.Structure):
    _fields_ = [
        *((name, Map) for name in ("keys", "values", "query")),
        *((name, c_void_p) for name in ("output", "parts", "arrivals")),
        *((name, c_void_p) for name in ("query_start", "context_lens", "pages", "ahead")),
        *((name, c_void_p) for name in ("ancestors", "depths")),
        *((name, c_int) for name in ("num_kv_heads", "num_seqs", "num_places", "table_stride")),
        *((name, c_int) for name in ("page_size", "window")),
        ("scale", c_float),
        ("filler", c_char * 28),  # to a multiple of 64 bytes
    ]


def attend_many(
    query: Tensor, keys: PagedKeys, meetings: Tensor, limits: DeviceLimits
) -> Tensor | None:
    """`Kernels.attention`; None where this is not the way.

    `meetings`: MAX_PLACES int32, zeros before and after every call.
    """
    if limits.generation != HOPPER or not is_readable(query, keys):
        return None
    if not can_compile(query.device):
        return None
    num_rows, num_heads, head_dim = query.shape
    num_kv_heads, num_seqs = keys.value_cache.shape[2], keys.view.context_lens.shape[0]
    plan = plan_many(num_rows, num_seqs, num_heads, num_kv_heads, head_dim, limits)
    if plan is None or num_kv_heads * plan.num_places * plan.team * WARPGROUPS > meetings.shape[0]:
        return None
    return attend_by(plan, query, keys, meetings)


def attend_by(plan: ManyRowsPlan, query: Tensor, keys: PagedKeys, meetings: Tensor) -> Tensor:
    """`attend_many` under a given plan."""
    work, output, _kept = prepare(query, keys, meetings, plan)
    flags = make_flags(plan, query, keys)
    Kernel.load("attention/attend_many.cu", "attend_many", query.device, *flags.items()).launch(
        plan.num_blocks, 32 * WARPS, plan.shared_bytes, work, overlaps=False
    )
    return output


def is_readable(query: Tensor, keys: PagedKeys) -> bool:
    """Whether keys are stored in 16 bits, and lie as the kernel expects them."""
    key_cache, value_cache = keys.key_cache, keys.value_cache
    if key_cache is None or key_cache.stride() != value_cache.stride():
        return False
    page, slot, head, item = value_cache.stride()
    are_halves = all(
        x.dtype is torch.bfloat16 and x.data_ptr() % 16 == 0
        for x in (query, key_cache, value_cache)
    )
    is_even = item == 1 and slot % 8 == head % 8 == 0 and page == value_cache.shape[1] * slot
    view, page_size = keys.view, keys.view.page_size
    tables = [view.query_start, view.context_lens, view.block_table]
    if keys.mask.ahead is not None:
        tables.append(keys.mask.ahead)
    if keys.mask.trees is not None:
        tables.append(keys.mask.trees.depths)
        ancestors = keys.mask.trees.ancestors
        if ancestors.dtype is not torch.int64 or not ancestors.is_contiguous():
            return False
    if not all(table.dtype is torch.int32 and table.stride(-1) == 1 for table in tables):
        return False
    is_whole = page_size in (8, 16, 32, 64) or page_size % 64 == 0
    return are_halves and is_even and is_whole and value_cache.shape[1] == page_size


@functools.lru_cache(maxsize=1024)
def plan_many(
    num_rows: int,
    num_seqs: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    limits: DeviceLimits,
) -> ManyRowsPlan | None:
    """In teams where keys are read once for two blocks that both have pairs, by and large."""
    plan = plan_alone(num_rows, num_seqs, num_heads, num_kv_heads, head_dim, limits)
    if plan is None or head_dim != 512:
        return plan
    pairs_of_sequence = num_rows * (num_heads // num_kv_heads) // num_seqs
    return plan_teams(plan, num_seqs) if pairs_of_sequence >= 2 * PAIRS[head_dim] else plan


def plan_alone(
    num_rows: int,
    num_seqs: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    limits: DeviceLimits,
) -> ManyRowsPlan | None:
    """A block on every processor, each with tiles of its own.

    None where there is no room, or too little to share.
    """
    if head_dim not in STAGES or num_rows * num_heads == 0 or num_rows > MAX_ROWS:
        return None
    if not 0 < num_seqs <= MAX_SEQS:
        return None
    group = num_heads // num_kv_heads
    if PAIRS[head_dim] % group:
        return None
    num_places = num_rows * group // PAIRS[head_dim] + num_seqs
    shared_bytes = _shared_bytes(head_dim)
    is_split_much = MAX_PARTS * num_places * num_kv_heads < limits.num_processors
    if is_split_much or shared_bytes > limits.shared_bytes:
        return None
    return ManyRowsPlan(1, STAGES[head_dim], num_places, limits.num_processors, shared_bytes)


def plan_teams(plan: ManyRowsPlan, num_seqs: int) -> ManyRowsPlan:
    """The same where two blocks have each tile together, if there are two."""
    if plan.num_blocks < 2:
        return plan
    num_places = (plan.num_places - num_seqs) // 2 + num_seqs
    return plan._replace(team=2, num_places=num_places, num_blocks=plan.num_blocks // 2 * 2)


def _shared_bytes(head_dim: int) -> int:
    """Of the kernel's `Memory`."""
    stages, turn_pairs = STAGES[head_dim], TURN_PAIRS[head_dim]
    num_bytes = 2 * head_dim * (PAIRS[head_dim] + stages * KEYS // SLICES[head_dim])
    num_bytes += WARPGROUPS * (turn_pairs * (2 * KEYS + 4) + 16) + 16 * (stages + 1)
    num_bytes += 4 * MAX_SEQS + -(-2 * (MAX_SEQS + 1) // 4) * 4
    num_bytes += 4 * (2 * WARPS + 2 + MAX_DEALT + WARPGROUPS)
    return -(-num_bytes // 8) * 8


def prepare(
    query: Tensor,
    keys: PagedKeys,
    meetings: Tensor,
    plan: ManyRowsPlan,
    make_map: Callable[[Tensor, tuple[int, int, int]], Map] = make_map,
) -> tuple[_Work, Tensor, list[Tensor]]:
    """The kernel's argument, its result, and what the argument points to besides its inputs."""
    view, value_cache = keys.view, keys.value_cache
    ahead, trees = keys.mask.ahead, keys.mask.trees
    assert keys.key_cache is not None
    num_rows, num_heads, head_dim = query.shape
    query, group = query.contiguous(), num_heads // value_cache.shape[2]
    output = query.new_empty(num_rows, num_heads * head_dim)
    quads = 1 + head_dim * PAIRS[head_dim] // (64 * WARPGROUPS) // 8  # a thread's
    count = plan.num_blocks * 2 * WARPGROUPS * quads * 128 * 4
    parts = torch.empty(count, device=query.device, dtype=torch.float32)
    box = _box_rows(head_dim, view.page_size), 1, DEPTH
    work = _Work(
        make_map(keys.key_cache.flatten(0, 1), box),
        make_map(value_cache.flatten(0, 1), box),
        make_map(query, (PAIRS[head_dim] // group, group, DEPTH)),
        output.data_ptr(),
        parts.data_ptr(),
        meetings.data_ptr(),
        view.query_start.data_ptr(),
        view.context_lens.data_ptr(),
        view.block_table.data_ptr(),
        None if ahead is None else ahead.data_ptr(),
        None if trees is None else trees.ancestors.data_ptr(),
        None if trees is None else trees.depths.data_ptr(),
        value_cache.shape[2],
        view.context_lens.shape[0],
        plan.num_places,
        view.block_table.stride(0),
        view.page_size,
        keys.window or 0,
        keys.scale * math.log2(math.e),  # the kernel's exponentials are powers of two
    )
    return work, output, [query, parts]


def make_flags(plan: ManyRowsPlan, query: Tensor, keys: PagedKeys) -> dict[str, int]:
    """What the kernel is compiled with."""
    _, num_heads, head_dim = query.shape
    return {
        "HEAD": head_dim,
        "GROUP": num_heads // keys.value_cache.shape[2],
        "TEAM": plan.team,
        "STAGES": plan.stages,
        "BOX": _box_rows(head_dim, keys.view.page_size),
        "CAUSAL": int(keys.mask.causal),
        "WINDOWED": int(keys.window is not None),
        "AHEAD": int(keys.mask.ahead is not None),
        "TREES": int(keys.mask.trees is not None),
    }


def _box_rows(head_dim: int, page_size: int) -> int:
    """So many of a page are copied at a time."""
    return min(KEYS // SLICES[head_dim], page_size)
