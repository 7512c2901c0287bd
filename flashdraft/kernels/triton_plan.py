"""How one paged attention call is cut into Triton programs: tile sizes, warps, splits of the keys.

Pure arithmetic on sizes the host knows already; the kernels are in triton_attention.py. A plan
fixes the order of every sum: whoever needs the same bits at every width uses one plan for all.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from flashdraft.kernels.interface import PageView

MAX_SPLITS = 64
MIN_SPLIT_KEYS = 128  # a smaller split costs more in merging than it wins
MIN_KEYS_TO_SPLIT = 512
MAX_RESIDENT = 4  # programs one processor works on at a time, where shared memory allows


class DeviceLimits(NamedTuple):
    """What a plan needs to know of the device."""

    num_processors: int
    shared_bytes: int  # the most one program may use


class AttentionPlan(NamedTuple):
    """Tile sizes and launch settings of one attention call."""

    block_m: int  # (row, head) pairs in a tile
    block_n: int  # keys read at a time
    num_warps: int
    num_stages: int
    num_splits: int = 1  # programs that share one tile's keys
    split_keys: int = 0  # keys in each of them, a multiple of block_n


def plan_attention(
    query: Tensor, key_cache: Tensor, view: PageView, window: int | None, limits: DeviceLimits
) -> AttentionPlan:
    """Tiles that fit the registers and shared memory, and splits that fill the device."""
    num_rows, num_heads, head_dim = query.shape
    num_kv_heads, num_seqs = key_cache.shape[2], view.context_lens.shape[0]
    group = num_heads // num_kv_heads
    num_pairs = view.max_query_len * group
    row_bytes = padded_head_dim(head_dim) * query.itemsize
    plan = _choose_tiles(row_bytes, query.itemsize, num_pairs, limits.shared_bytes)
    num_tiles = min(
        num_seqs * _ceil_div(num_pairs, plan.block_m),
        num_rows * group // plan.block_m + num_seqs,
    )
    num_keys = view.max_key_len
    if window is not None:  # no tile sees more than this
        num_keys = min(num_keys, window + 2 * view.max_query_len)
    resident = min(MAX_RESIDENT, limits.shared_bytes // _tile_bytes(plan, row_bytes))
    room = limits.num_processors * max(1, resident)
    return _split_keys(plan, num_keys, room // max(1, num_tiles * num_kv_heads))


def _choose_tiles(
    row_bytes: int, itemsize: int, num_pairs: int, shared_bytes: int
) -> AttentionPlan:
    """Tile sizes that neither spill registers nor outgrow shared memory, up to head size 512.

    Three stages: one looks pages up, one copies keys and values, one computes.
    """
    if itemsize == 4:  # no tensor cores: small tiles, the operands live in registers
        return AttentionPlan(16, 32 if row_bytes <= 512 else 16, num_warps=4, num_stages=1)
    narrow = AttentionPlan(16, 64 if row_bytes <= 256 else 32, num_warps=4, num_stages=3)
    if num_pairs <= 16:
        return narrow
    if row_bytes <= 256:
        block_m = 128 if num_pairs >= 512 else 64
        wide = AttentionPlan(block_m, 64, num_warps=block_m // 16, num_stages=3)
    else:
        wide = AttentionPlan(64, 32, num_warps=4 if row_bytes <= 512 else 8, num_stages=3)
    return wide if _tile_bytes(wide, row_bytes) <= shared_bytes else narrow


def _tile_bytes(plan: AttentionPlan, row_bytes: int) -> int:
    """Shared memory of queries, keys and values (wide tiles hold two of each), explicit mask."""
    num_copies = 2 if plan.block_m >= 64 else 1
    num_rows = plan.block_m + 2 * num_copies * plan.block_n
    return num_rows * row_bytes + 4 * plan.block_m * plan.block_n + 512


def _split_keys(plan: AttentionPlan, num_keys: int, num_wanted: int) -> AttentionPlan:
    num_wanted = min(num_wanted, num_keys // MIN_SPLIT_KEYS, MAX_SPLITS - 1)
    if num_wanted < 2 or num_keys < MIN_KEYS_TO_SPLIT:
        return plan
    split_keys = _ceil_div(_ceil_div(num_keys, num_wanted), plan.block_n) * plan.block_n
    # One more: behind a window the first and the last split may both be partly filled.
    return plan._replace(num_splits=_ceil_div(num_keys, split_keys) + 1, split_keys=split_keys)


def padded_head_dim(head_dim: int) -> int:
    """The power of two a head fills in a tile; tensor cores take 16 and more."""
    return max(16, 1 << (head_dim - 1).bit_length())


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)
