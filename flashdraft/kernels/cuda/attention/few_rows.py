"""Attention of a few rows of one sequence in CUDA C++ (attend_few.cu), in a single launch.

Owns its plan and its launch. It is the way for short contexts and sliding windows, where three
small kernels (`prepare_heads`, `paged_attention` and its merge) would take turns at doing little.
"""

from __future__ import annotations

import ctypes
import functools
import math
from ctypes import c_float, c_int, c_uint64, c_void_p
from typing import NamedTuple

import torch
from torch import Tensor

from flashdraft.kernels.cuda import overlap
from flashdraft.kernels.cuda.driver import Kernel, can_compile
from flashdraft.kernels.cuda.plan import DeviceLimits, most_keys
from flashdraft.kernels.interface import BlockMask, Heads, PagedKeys, QKVSpec

MAX_ROWS = 16
MAX_KEYS = 2048  # with more of them, more programs than SPLITS have to share them
HEAD_DIMS = (128, 256, 512)
SPLITS = 8
WARPS = 8  # of a block
MANY_WARPS = 16  # where it has a processor to itself, and much to do
MAX_RESIDENT = 2  # blocks on a processor: more would spill registers
LEAN = 3  # one row needs no more registers than so many have: it lies ready beside a linear
RESERVED_BYTES = 1 << 10  # of shared memory, for each of them
MAX_MEETINGS = 1 << 10  # of blocks with the same pairs


class FewRowsPlan(NamedTuple):
    """Launch settings of one attention."""

    stored_rows: int  # of angles
    tiles: int  # of sixteen pairs of a row and a head, in a block
    warps: int
    num_keys: int  # that shared memory holds at a time
    num_blocks: int
    resident: int  # blocks on a processor at a time
    shared_bytes: int

    @property
    def num_pairs(self) -> int:
        """Of a block."""
        return 16 * self.tiles


class _Work(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("qkv", "q_norm", "k_norm", "cos", "sin")),
        *((name, c_void_p) for name in ("positions", "slots", "keys", "values", "output")),
        *((name, c_void_p) for name in ("parts", "states", "meetings")),
        *((name, c_void_p) for name in ("query_start", "context_lens", "pages", "ahead")),
        *((name, c_void_p) for name in ("ancestors", "depths")),
        *((name, c_uint64) for name in ("page_stride", "slot_stride", "head_stride")),
        *((name, c_int) for name in ("num_kv_heads", "row_stride", "rope_stride", "page_size")),
        *((name, c_int) for name in ("window", "num_rows", "num_pages")),
        ("eps", c_float),
        ("scale", c_float),
    ]


def attend_few(
    qkv: Tensor, heads: Heads, keys: PagedKeys, meetings: Tensor, limits: DeviceLimits
) -> Tensor | None:
    """`Kernels.attend`; None where this is not the way.

    `meetings`: MAX_MEETINGS int32, zeros before the first call, and of no other use.
    """
    if keys.key_cache is None or not can_compile(qkv.device):
        return None
    spec, view = heads.spec, keys.view
    tensors = (qkv, keys.key_cache, keys.value_cache, spec.q_norm, spec.k_norm)
    are_halves = all(
        x is None or (x.dtype is torch.bfloat16 and x.data_ptr() % 16 == 0) for x in tensors
    )
    is_one = view.context_lens.shape[0] == 1 and 0 < qkv.shape[0] <= MAX_ROWS
    num_keys = most_keys(view, keys.window)
    if not are_halves or not is_one or num_keys > MAX_KEYS or limits.generation < 9:
        return None
    plan = plan_few(qkv.shape[0], spec.num_heads, spec.num_kv_heads, spec.head_dim, limits)
    if plan is None:
        return None
    work, output, _kept = prepare(qkv, heads, keys, meetings, plan)
    flags = make_flags(plan, spec, keys.window, keys.mask)
    Kernel.load("attention/attend_few.cu", "attend_few", qkv.device, *flags.items()).launch(
        plan.num_blocks,
        32 * plan.warps,
        plan.shared_bytes,
        work,
        overlap.can_overlap(qkv.device),
    )
    return output


@functools.lru_cache(maxsize=1024)
def plan_few(
    num_rows: int, num_heads: int, num_kv_heads: int, head_dim: int, limits: DeviceLimits
) -> FewRowsPlan | None:
    """As many keys at a time as there is room for; None where blocks would take turns."""
    if head_dim not in HEAD_DIMS or num_heads == 0:
        return None
    num_pairs = num_rows * (num_heads // num_kv_heads)
    stored_rows, tiles = (1 if num_rows == 1 else MAX_ROWS), 1 if num_pairs <= 16 else 2
    num_tiles = -(-num_pairs // (16 * tiles))
    num_blocks = num_tiles * num_kv_heads * SPLITS
    resident = -(-num_blocks // limits.num_processors)
    if resident > MAX_RESIDENT or num_blocks > MAX_MEETINGS * SPLITS:
        return None
    are_many = resident == 1 and (tiles == 2 or head_dim == HEAD_DIMS[-1])
    warps = MANY_WARPS if are_many else WARPS
    for num_keys in (64, 32):
        shared_bytes = _shared_bytes(stored_rows, tiles, warps, num_keys, head_dim)
        if resident * (shared_bytes + RESERVED_BYTES) <= limits.shared_bytes + RESERVED_BYTES:
            sizes = num_keys, num_blocks, resident, shared_bytes
            return FewRowsPlan(stored_rows, tiles, warps, *sizes)
    return None


def _shared_bytes(stored_rows: int, tiles: int, warps: int, num_keys: int, head_dim: int) -> int:
    """Of the kernel's `Memory`."""
    num_pairs, stride = 16 * tiles, 2 * (head_dim + 8)
    num_bytes = (2 * num_keys + num_pairs) * stride + num_pairs * (num_keys + 8) * 2
    num_bytes += 4 * stored_rows * (head_dim + 4) + 4 * num_pairs * (num_keys + 1)
    return num_bytes + 8 * num_keys + 128 * warps + 12 * num_pairs


def prepare(
    qkv: Tensor, heads: Heads, keys: PagedKeys, meetings: Tensor, plan: FewRowsPlan
) -> tuple[_Work, Tensor, list[Tensor]]:
    """The kernel's argument, its result, and what the argument points to besides its inputs."""
    spec, rope, positions, view = heads.spec, heads.rope, heads.positions, keys.view
    key_cache, value_cache = keys.key_cache, keys.value_cache
    ahead, trees = keys.mask.ahead, keys.mask.trees
    qkv = qkv.contiguous()
    assert key_cache is not None
    assert key_cache.stride() == value_cache.stride() and value_cache.stride(3) == 1
    assert rope.cos.is_contiguous() and rope.sin.is_contiguous()
    assert positions.dtype is view.slots.dtype is torch.int64
    assert view.block_table.stride(1) == 1
    for table in (view.query_start, view.context_lens, view.block_table):
        assert table.dtype is torch.int32
    assert ahead is None or ahead.dtype is torch.int32
    if trees is not None:
        assert trees.ancestors.dtype is torch.int64 and trees.depths.dtype is torch.int32
        assert trees.ancestors.is_contiguous() and trees.depths.is_contiguous()
    width = spec.num_heads * spec.head_dim
    output = torch.empty(qkv.shape[0], width, device=qkv.device, dtype=qkv.dtype)
    count = plan.num_blocks * plan.num_pairs
    parts = torch.empty(count * spec.head_dim, device=qkv.device, dtype=torch.float32)
    states = torch.empty(count * 2, device=qkv.device, dtype=torch.float32)
    q_norm, k_norm = spec.q_norm, spec.k_norm
    work = _Work(
        qkv.data_ptr(),
        None if q_norm is None else q_norm.data_ptr(),
        None if k_norm is None else k_norm.data_ptr(),
        rope.cos.data_ptr(),
        rope.sin.data_ptr(),
        positions.data_ptr(),
        view.slots.data_ptr(),
        key_cache.data_ptr(),
        value_cache.data_ptr(),
        output.data_ptr(),
        parts.data_ptr(),
        states.data_ptr(),
        meetings.data_ptr(),
        view.query_start.data_ptr(),
        view.context_lens.data_ptr(),
        view.block_table.data_ptr(),
        None if ahead is None else ahead.data_ptr(),
        None if trees is None else trees.ancestors.data_ptr(),
        None if trees is None else trees.depths.data_ptr(),
        *value_cache.stride()[:3],
        spec.num_kv_heads,
        qkv.stride(0),
        rope.cos.stride(0),
        view.page_size,
        keys.window or 0,
        qkv.shape[0],
        view.block_table.shape[1],
        spec.eps,
        keys.scale * math.log2(math.e),  # the kernel's exponentials are powers of two
    )
    return work, output, [qkv, parts, states]


def make_flags(
    plan: FewRowsPlan, spec: QKVSpec, window: int | None, mask: BlockMask
) -> dict[str, int]:
    """What the kernel is compiled with."""
    is_lean = plan.stored_rows == plan.tiles == 1 and plan.warps == WARPS
    return {
        "HEAD": spec.head_dim,
        "ROWS": plan.stored_rows,
        "GROUP": spec.num_heads // spec.num_kv_heads,
        "TILES": plan.tiles,
        "KEYS": plan.num_keys,
        "WARPS": plan.warps,
        "BLOCKS": max(plan.resident, LEAN if is_lean else 1),
        "CAUSAL": int(mask.causal),
        "WINDOWED": int(window is not None),
        "AHEAD": int(mask.ahead is not None),
        "TREES": int(mask.trees is not None),
        "Q_NORM": int(spec.q_norm is not None),
        "K_NORM": int(spec.k_norm is not None),
        "V_NORM": int(spec.v_norm),
        "SHARE_KV": int(spec.share_kv),
    }
