"""How one attention or linear call is cut into Triton programs: tile sizes, warps, splits.

Pure arithmetic on sizes the host knows already; the kernels are in attention/paged.py and
dense/linear.py. A plan fixes the order of every sum. The `exact` plans depend on the layer's shape
alone, so that a row gets the same bits at every width, in every batch and however a prompt is cut;
the others are the fastest for the call at hand.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from torch import Tensor

from flashdraft.kernels.interface import PagedKeys, PageView

MAX_SPLITS = 64
MIN_SPLIT_KEYS = 64  # a smaller split costs more in merging than it wins
MIN_KEYS_TO_SPLIT = 256
MANY_PAIRS, MOST_PAIRS = 256, 1024  # (row, head) pairs for which tiles of 64 and 128 pay
MAX_RESIDENT = 4  # programs one processor works on at a time, where shared memory allows
EXACT_SPLIT_KEYS = 2048  # more cuts cost memory in proportion to context and rows
EXACT_WINDOW_SPLIT_KEYS = 256
MAX_SKINNY_ROWS = 32
MIN_SKINNY_DEPTH = 2048  # torch's are faster on small weights
MAX_DEPTH_SPLITS = 16
MIN_DEEP_STEPS = 8  # of twice the depth: fewer do not pay for a longer start
FULL = 0.9  # of the programs that all processors together hold
LEAST_FP8_CAPABILITY = (8, 9)  # Ada: older cards have no instruction between fp8 and floats


class DeviceLimits(NamedTuple):
    """What a plan needs to know of the device."""

    num_processors: int
    shared_bytes: int  # the most one program may use
    generation: int = 9  # the first number of its compute capability

    @property
    def multiplies_from_shared(self) -> bool:
        """Whether tensor cores read shared memory themselves: on Hopper, and Blackwell's B cards.

        All others, RTX cards of any age among them, are handed everything in registers.
        """
        return 9 <= self.generation <= 11


class AttentionPlan(NamedTuple):
    """Tile sizes and launch settings of one attention call."""

    block_m: int  # (row, head) pairs in a tile
    block_n: int  # keys read at a time
    num_warps: int
    num_stages: int
    num_splits: int = 1  # programs that share one tile's keys
    split_keys: int = 0  # keys in each of them, a multiple of block_n
    spread: bool = False  # split_keys is the least: more keys spread evenly over the splits


class HeadBytes(NamedTuple):
    """What a head of attention takes, padded."""

    item: int  # one number of a query
    query: int
    stored: int  # a key or a value in the cache
    query_pairs: int = 0  # what rotates of a query, once more; 0 where keys are stored
    key_pairs: int = 0  # what rotates of a value, once more, and its angles

    @property
    def is_rebuilt(self) -> bool:
        """Whether keys are made of values."""
        return self.key_pairs > 0


class LinearPlan(NamedTuple):
    """Tile sizes and launch settings of one linear."""

    block_m: int  # rows of x in a tile
    block_n: int  # rows of the weight
    block_k: int  # depth read at a time
    num_warps: int
    num_stages: int
    num_splits: int = 1  # programs that share one tile's depth
    swap: bool = False  # the weight is the tensor core's left operand, of which it takes 64 rows


def plan_attention(query: Tensor, keys: PagedKeys, limits: DeviceLimits) -> AttentionPlan:
    """Tiles that fit the registers and shared memory, and splits that fill the device.

    How long a split is, the device works out from each sequence's own length: the launch is right,
    and fast, for every length up to view.max_key_len.
    """
    num_rows, num_heads, _ = query.shape
    view = keys.view
    num_kv_heads, num_seqs = keys.value_cache.shape[2], view.context_lens.shape[0]
    group = num_heads // num_kv_heads
    num_pairs = view.max_query_len * group
    head = _head_bytes(query, keys)
    plan = _choose_tiles(head, num_pairs, limits)
    num_tiles = min(
        num_seqs * _ceil_div(num_pairs, plan.block_m),
        num_rows * group // plan.block_m + num_seqs,
    )
    num_keys = most_keys(view, keys.window)
    resident = min(MAX_RESIDENT, limits.shared_bytes // _tile_bytes(plan, head, limits))
    room = limits.num_processors * max(1, resident) // max(1, num_tiles * num_kv_heads)
    num_splits = min(room, num_keys // MIN_SPLIT_KEYS, MAX_SPLITS)
    if num_splits < 2 or num_keys < MIN_KEYS_TO_SPLIT:
        return plan
    least = _ceil_div(MIN_SPLIT_KEYS, plan.block_n) * plan.block_n
    return plan._replace(num_splits=num_splits, split_keys=least, spread=True)


def plan_exact_attention(query: Tensor, keys: PagedKeys, limits: DeviceLimits) -> AttentionPlan:
    """One tile shape for every width, and cuts at fixed places: only their number grows."""
    plan = _choose_tiles(_head_bytes(query, keys), 64, limits)
    view, window = keys.view, keys.window
    split_keys = EXACT_SPLIT_KEYS if window is None else EXACT_WINDOW_SPLIT_KEYS
    num_splits = _ceil_div(most_keys(view, window), split_keys)
    if window is not None:  # the first and the last split may both be partly filled
        num_splits += 1
    # At least two: a single one would skip the merge and with it a rounding.
    return plan._replace(num_splits=max(2, num_splits), split_keys=split_keys)


def most_keys(view: PageView, window: int | None) -> int:
    """The most keys that one tile sees."""
    if window is None:
        return view.max_key_len
    return min(view.max_key_len, window + 2 * view.max_query_len)


def _head_bytes(query: Tensor, keys: PagedKeys) -> HeadBytes:
    rebuild = keys.rebuild
    block_d = padded_head_dim(query.shape[2])
    sizes = (query.itemsize, block_d * query.itemsize, block_d * keys.value_cache.itemsize)
    if rebuild is None:
        return HeadBytes(*sizes)
    block_r = padded_head_dim(rebuild.num_rotated)
    angles = rebuild.rope.cos.itemsize
    return HeadBytes(
        *sizes, 2 * block_r * query.itemsize, 2 * block_r * (keys.value_cache.itemsize + angles)
    )


def _choose_tiles(head: HeadBytes, num_pairs: int, limits: DeviceLimits) -> AttentionPlan:
    """Tile sizes that neither spill registers nor outgrow shared memory, up to head size 512.

    Three stages: one looks pages up, one copies keys and values, one computes.
    """
    row_bytes = head.query
    if head.item == 4:  # no tensor cores: small tiles, the operands live in registers
        num_warps = 8 if head.is_rebuilt else 4
        return AttentionPlan(16, 32 if row_bytes <= 512 else 16, num_warps, num_stages=1)
    # Keys of 8 bits are widened in registers, and rebuilt ones are rotated there: large heads need
    # twice the threads for it.
    is_heavy = (head.stored < row_bytes or head.is_rebuilt) and row_bytes > 256
    num_warps = 8 if is_heavy else 4
    narrow = AttentionPlan(16, 64 if row_bytes <= 512 else 32, num_warps, num_stages=3)
    if num_pairs <= (16 if row_bytes <= 512 else 32):
        return narrow
    if row_bytes <= 256:
        block_m = 128 if num_pairs >= 512 else 64
        wide = AttentionPlan(block_m, 64, num_warps=block_m // 16, num_stages=3)
    else:
        # Operands in registers leave less room for sums.
        if row_bytes > 512 or not limits.multiplies_from_shared:
            num_warps = 8
        block_m, block_n = 32 if is_heavy and row_bytes > 512 else 64, 32
        if row_bytes == 512 and num_warps == 4 and num_pairs >= MANY_PAIRS:  # prompts
            block_m, block_n, num_warps = (128, 64, 8) if num_pairs >= MOST_PAIRS else (64, 64, 4)
        wide = AttentionPlan(block_m, block_n, num_warps, num_stages=3)
    fits = _tile_bytes(wide, head, limits) <= limits.shared_bytes
    return wide if fits else narrow


def _tile_bytes(plan: AttentionPlan, head: HeadBytes, limits: DeviceLimits) -> int:
    """Shared memory of queries, keys and values, and four bytes for every score.

    Where tensor cores read it, wide tiles hold two of the keys and the values. Values that keys are
    made of are there once, in the queries' dtype.
    """
    num_copies = 2 if plan.block_m >= 64 and limits.multiplies_from_shared else 1
    key_bytes = head.query + head.key_pairs if head.is_rebuilt else 2 * head.stored
    num_bytes = plan.block_m * (head.query + head.query_pairs)
    num_bytes += num_copies * plan.block_n * key_bytes
    return num_bytes + 4 * plan.block_m * plan.block_n + 512


@functools.lru_cache(maxsize=1024)
def plan_linear(
    num_rows: int, num_columns: int, depth: int, itemsize: int, limits: DeviceLimits
) -> LinearPlan | None:
    """A plan where it should beat torch's own linear, else None."""
    if itemsize != 2 or not 0 < num_rows <= MAX_SKINNY_ROWS or depth < MIN_SKINNY_DEPTH:
        return None
    block_m = 16 if num_rows <= 16 else 32
    plan = LinearPlan(block_m, 64, 128, num_warps=4, num_stages=4, swap=True)
    one_round = 64 * _room(plan, itemsize, limits)  # columns
    most_programs = _ceil_div(num_columns, 64) * _most_splits(depth, plan.block_k)
    num_narrow = _ceil_div(num_columns, 32)
    if most_programs < limits.num_processors or _fills(num_narrow, limits.num_processors):
        plan = LinearPlan(block_m, 32, 128, num_warps=4, num_stages=5)
    elif depth % plan.block_k:
        plan = LinearPlan(block_m, 64, 64, num_warps=4, num_stages=6)
    elif one_round < num_columns <= 2 * one_round:
        # one round of wide tiles rather than two, the second nearly empty
        plan = LinearPlan(block_m, 128, 64, num_warps=4, num_stages=5, swap=True)
    plan = _fit(plan, itemsize, limits)
    room = _room(plan, itemsize, limits)
    plan = _fill_processors(plan, num_columns, depth, room, limits.num_processors)
    num_programs = _ceil_div(num_columns, plan.block_n) * plan.num_splits
    deep = _fit(plan._replace(block_k=256, num_stages=3), itemsize, limits)
    if (
        plan.swap
        and num_programs <= limits.num_processors
        and deep.num_stages == 3
        and depth % deep.block_k == 0
        and depth // deep.block_k // plan.num_splits >= MIN_DEEP_STEPS
    ):  # alone on its processor, a program must ask for more at a time
        return deep
    return plan


@functools.lru_cache(maxsize=1024)
def plan_exact_linear(
    num_columns: int, depth: int, itemsize: int, limits: DeviceLimits
) -> LinearPlan:
    """The one plan for a weight of this shape, whatever the number of rows.

    64 rows a tile: one and the same tensor-core instruction for one row and for thousands.
    """
    if itemsize == 4:  # no tensor cores
        plan = LinearPlan(16, 64, 32, num_warps=4, num_stages=2)
    else:
        plan = LinearPlan(64, 64 if num_columns <= 8192 else 128, 64, num_warps=4, num_stages=4)
    return _split_depth(_fit(plan, itemsize, limits), num_columns, depth, itemsize, limits)


def _fit(plan: LinearPlan, itemsize: int, limits: DeviceLimits) -> LinearPlan:
    """The same tiles with as many stages as shared memory allows."""
    most = limits.shared_bytes // _stage_bytes(plan, itemsize) + _num_unshared(limits)
    return plan._replace(num_stages=max(1, min(plan.num_stages, most)))


def _stage_bytes(plan: LinearPlan, itemsize: int) -> int:
    return (plan.block_m + plan.block_n) * plan.block_k * itemsize


def _num_unshared(limits: DeviceLimits) -> int:
    """Stages that take no shared memory: the one at work, where it works from registers."""
    return 0 if limits.multiplies_from_shared else 1


def _room(plan: LinearPlan, itemsize: int, limits: DeviceLimits) -> int:
    """Programs that all processors work on at a time."""
    num_shared = max(1, plan.num_stages - _num_unshared(limits))
    shared = num_shared * _stage_bytes(plan, itemsize)
    return limits.num_processors * max(1, min(MAX_RESIDENT, limits.shared_bytes // shared))


def _fills(num_programs: int, num_places: int) -> bool:
    return FULL * num_places <= num_programs <= num_places


def _most_splits(depth: int, block_k: int) -> int:
    """Two steps at least in every part."""
    return max(1, min(MAX_DEPTH_SPLITS, _ceil_div(depth, block_k) // 2))


def _fill_processors(
    plan: LinearPlan, num_columns: int, depth: int, room: int, num_processors: int
) -> LinearPlan:
    """The fewest parts that give every processor the same number of programs, or nearly so."""
    num_tiles, num_steps = _ceil_div(num_columns, plan.block_n), _ceil_div(depth, plan.block_k)
    most = min(_most_splits(depth, plan.block_k), max(1, room // num_tiles))

    def fullness(num_splits: int) -> float:
        num_programs = num_tiles * num_splits
        return num_programs / (_ceil_div(num_programs, num_processors) * num_processors)

    # Steps are dealt out whole: some numbers of parts would leave the last one empty.
    choices = [n for n in range(1, most + 1) if _ceil_div(num_steps, _ceil_div(num_steps, n)) == n]
    full = [n for n in choices if fullness(n) >= FULL]
    return plan._replace(num_splits=full[0] if full else max(choices, key=fullness))


def _split_depth(
    plan: LinearPlan, num_columns: int, depth: int, itemsize: int, limits: DeviceLimits
) -> LinearPlan:
    """As many parts as make the card's last round of programs a full one, and no more."""
    room = _room(plan, itemsize, limits)
    num_tiles, num_steps = _ceil_div(num_columns, plan.block_n), _ceil_div(depth, plan.block_k)
    if num_tiles >= room:
        return plan

    def cost(num_splits: int) -> int:
        # In steps: those of all rounds, two to fill a program's pipeline, one to add its part.
        rounds = _ceil_div(num_tiles * num_splits, room)
        return rounds * (_ceil_div(num_steps, num_splits) + 2) + (num_splits > 1) * num_splits

    best = min(range(1, min(MAX_DEPTH_SPLITS, num_steps) + 1), key=cost)
    # Steps are dealt out whole: as few parts as hold them all.
    return plan._replace(num_splits=_ceil_div(num_steps, _ceil_div(num_steps, best)))


def padded_head_dim(head_dim: int) -> int:
    """The power of two a head fills in a tile; tensor cores take 16 and more."""
    return max(16, 1 << (head_dim - 1).bit_length())


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)
