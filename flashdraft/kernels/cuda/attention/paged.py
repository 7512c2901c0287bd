# Triton's decorators carry no types that mypy can see.
# mypy: disallow-untyped-decorators=False
"""Paged attention in Triton: grouped heads, windows, pictures, trees, split keys. CUDA only.

Owns the kernels and their launch. It knows nothing of models, schedulers or cache management, and
never waits for the device: everything a launch needs is on the host already.

A tile holds `block_m` (row, head) pairs of one sequence that share a key head, so that grouped
queries read each key once. Keys stream by in tiles that start at absolute multiples of `block_n`;
long contexts are split over several programs and merged in order by a second kernel. A `spread`
plan divides each tile's keys evenly over the splits, on the device: one captured launch is fast at
300 keys and at 130,000. Other plans cut at absolute multiples of `split_keys`. An fp8 cache is read
in 8 bits and multiplied in the queries' dtype, which holds its values exactly.

Keys that nobody stored (`KeyRebuild`) cost one tile of values instead of two: the norm's weight is
folded into the queries, which then multiply the values themselves, and only the pairs that rotate
(64 of Gemma 4's 256) are read once more, turned by their position and multiplied apart.
There are no atomics. What follows for the exactness contract (interface.py):
- The same call always gives the same bits.
- Under one and the same plan that is not `spread`, a row's result depends on its own query, on the
  keys it sees and on their indices alone, not on its neighbours, its place in a tile, its pages or
  the width of its block: hidden keys and empty splits add exact zeros.
- So a tree's row has the bits of a chain where its path begins its tree, rows 0, 1, 2 and on. Other
  paths have hidden keys in between: the same keys at other indices, summed in another order.
- Between plans the bits may differ: `block_m` may change the tensor-core instruction, `block_n` and
  the splits change the order of the sums. `plan_exact_attention` fixes all of them.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashdraft.kernels.cuda.overlap import overlap, stand_by, wait
from flashdraft.kernels.cuda.plan import MAX_SPLITS, AttentionPlan, padded_head_dim
from flashdraft.kernels.interface import MAX_TREE, PagedKeys

LAST_BIT = tl.constexpr(MAX_TREE - 1)


def paged_attention(
    query: Tensor, keys: PagedKeys, plan: AttentionPlan, output: Tensor | None = None
) -> Tensor:
    """`Kernels.attention` under a given plan. A row that sees no key gives zeros.

    The view's sequences may own but some of the rows, from query_start[0] on: the others are left
    as `output` has them.
    """
    key_cache, value_cache, view = keys.key_cache, keys.value_cache, keys.view
    window, mask, trees, rebuild = keys.window, keys.mask, keys.mask.trees, keys.rebuild
    num_rows, num_heads, head_dim = query.shape
    num_kv_heads, num_seqs = value_cache.shape[2], view.context_lens.shape[0]
    if output is None:
        output = query.new_empty(num_rows, num_heads * head_dim)
    if num_rows == 0 or num_seqs == 0:
        return output
    assert value_cache.stride(3) == 1 and (key_cache is None) == (rebuild is not None)
    assert key_cache is None or key_cache.stride() == value_cache.stride()
    weight, cos, sin, num_rotated = None, None, None, 0
    if rebuild is not None:
        weight, cos, sin = rebuild.weight, rebuild.rope.cos, rebuild.rope.sin
        num_rotated = rebuild.num_rotated
        assert cos.is_contiguous() and sin.is_contiguous()
    assert plan.split_keys % plan.block_n == 0
    target, state = output, None
    if plan.num_splits > 1:
        pairs = (plan.num_splits, num_rows, num_heads)
        target = torch.empty(*pairs, head_dim, device=query.device, dtype=torch.float32)
        state = torch.empty(2, *pairs, device=query.device, dtype=torch.float32)
    group, block_d = num_heads // num_kv_heads, padded_head_dim(head_dim)
    _attend[(num_rows * group // plan.block_m + num_seqs, num_kv_heads, plan.num_splits)](
        query.contiguous(),
        key_cache,
        value_cache,
        weight,
        cos,
        sin,
        target,
        state,
        view.query_start,
        view.context_lens,
        view.block_table,
        mask.ahead,
        None if trees is None else trees.ancestors,
        None if trees is None else trees.depths,
        keys.scale * math.log2(math.e),  # the kernel's exponentials are powers of two
        0 if window is None else window,
        plan.split_keys,
        num_seqs,
        num_rows,
        *value_cache.stride()[:3],
        view.block_table.stride(0),
        GROUP=group,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_D=block_d,
        ROTATED=num_rotated,
        BLOCK_R=padded_head_dim(num_rotated),
        PAGE_SIZE=view.page_size,
        BLOCK_M=plan.block_m,
        BLOCK_N=plan.block_n,
        CAUSAL=mask.causal,
        WINDOWED=window is not None,
        SPREAD=plan.spread,
        **overlap(query),
        num_warps=plan.num_warps,
        num_stages=plan.num_stages,
    )
    if state is not None:
        _merge[(num_rows * num_heads,)](
            target,
            state,
            output,
            view.query_start,
            num_seqs,
            plan.num_splits,
            num_heads,
            head_dim,
            block_d,
            max(MAX_SPLITS, triton.next_power_of_2(plan.num_splits)),
            **overlap(query),
            num_warps=2,
        )
    return output


@triton.jit
def _find_tile(
    query_start: tl.tensor,
    num_seqs: tl.tensor,
    tile: tl.tensor,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """A tile's sequence, that one's first row and number of rows, and the tile's first pair in it.

    Sequence s owns the tiles from query_start[s] * GROUP // BLOCK_M + s on. That leaves each room
    for a last, partly filled tile, so the grid follows from the number of rows and sequences alone;
    a few programs find nothing to do. Tiles are counted from the first sequence's on.
    """
    tile += tl.load(query_start) * GROUP // BLOCK_M
    s = tile * 0 - 1
    for first in range(0, num_seqs, 128):
        index = first + tl.arange(0, 128)
        start = tl.load(query_start + index, mask=index < num_seqs, other=0)
        owned = (index < num_seqs) & (start * GROUP // BLOCK_M + index <= tile)
        s += tl.sum(owned.to(tl.int32), 0)
    first_row = tl.load(query_start + s)
    num_rows = tl.load(query_start + s + 1) - first_row
    return s, first_row, num_rows, (tile - (first_row * GROUP // BLOCK_M + s)) * BLOCK_M


@triton.jit
def _key_range(
    first: tl.tensor,
    last: tl.tensor,
    num_keys: tl.tensor,
    window: tl.tensor,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """The keys low .. high - 1 that a tile may read, whose rows are at indices first .. last."""
    low = first * 0
    high = num_keys
    if WINDOWED:
        low = tl.maximum(first - window + 1, 0)
        high = tl.minimum(num_keys, last + window)
    if CAUSAL:
        high = last + 1
    return low, high


@triton.jit
def _split(
    low: tl.tensor,
    high: tl.tensor,
    split_keys: tl.tensor,
    BLOCK_N: tl.constexpr,
    SPREAD: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """This program's share of the keys low .. high - 1; empty if its end is not past its begin."""
    begin = low // split_keys * split_keys
    share = split_keys
    if SPREAD:
        begin = low // BLOCK_N * BLOCK_N
        even = tl.cdiv(high - begin, tl.num_programs(2))
        share = tl.maximum(share, tl.cdiv(even, BLOCK_N) * BLOCK_N)
    begin += tl.program_id(2) * share
    return tl.maximum(begin, low), tl.minimum(high, begin + share)


@triton.jit
def _reach(
    distance: tl.tensor,
    until: tl.tensor,
    window: tl.tensor,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
) -> tl.tensor:
    """Whether a row sees a key so far behind it (or, if negative, ahead), by order and window.

    `until` is how far behind the last key in order: the same, but where rows see some ahead, or
    stand by their depth.
    """
    seen = until >= 0 if CAUSAL else until == until
    if WINDOWED:
        seen = seen & (distance < window) & (until > -window)
    return seen


@triton.jit
def _end_ahead(
    high: tl.tensor, ahead: tl.tensor, last_row: tl.tensor, num_keys: tl.tensor
) -> tl.tensor:
    """Where the keys of a tile end, whose last row sees some ahead: none before it sees further."""
    return tl.minimum(high + tl.maximum(tl.load(ahead + last_row), 0), num_keys)


@triton.jit
def _follow(ancestors: tl.tensor, column: tl.tensor) -> tl.tensor:
    """Whether rows follow these rows of their sequence, of which those below 0 are earlier keys.

    All follow row 0, and so what is earlier. Who has more rows than there are bits has every bit.
    """
    bit = tl.minimum(tl.maximum(column, 0), LAST_BIT)
    return ((ancestors[:, None] >> bit[None, :]) & 1) != 0


@triton.jit
def _stand(key: tl.tensor, context: tl.tensor, depths: tl.tensor, readable: tl.tensor) -> tl.tensor:
    """Where keys stand, of which those of a tree's rows stand by their depth."""
    own = readable & (key >= context)
    depth = tl.load(depths + (key - context), mask=own, other=0)
    return tl.where(own, context + depth, key)


@triton.jit
def _weigh(scores: tl.tensor, best: tl.tensor) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The best score so far, the new scores' weights against it, and the old weights' decay."""
    new_best = tl.maximum(best, tl.max(scores, 1))
    # Nothing seen so far: any finite reference keeps the weights at exact zeros.
    reference = tl.where(new_best == float("-inf"), 0.0, new_best)
    return new_best, tl.exp2(scores - reference[:, None]), tl.exp2(best - reference)


@triton.jit
def _load_pairs(
    heads: tl.tensor, turned: tl.tensor, mask: tl.tensor, HALF: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """The left and the right of the pairs that rotate, in heads that begin at these places."""
    left = tl.load(heads + turned, mask=mask, other=0.0)
    return left, tl.load(heads + HALF + turned, mask=mask, other=0.0)


@triton.jit
def _load_angles(
    cos: tl.tensor, sin: tl.tensor, angle: tl.tensor, mask: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    return tl.load(cos + angle, mask=mask, other=0.0), tl.load(sin + angle, mask=mask, other=0.0)


@triton.jit
def _fold_weight(
    q: tl.tensor, weight: tl.tensor, dims: tl.tensor, HEAD_DIM: tl.constexpr, ROTATED: tl.constexpr
) -> tl.tensor:
    """Queries to be multiplied with values, in the dimensions where a key is weight * value."""
    still = (dims < HEAD_DIM) & (dims % (HEAD_DIM // 2) >= ROTATED)
    weights = tl.load(weight + dims, mask=still, other=0.0).to(tl.float32)
    return (q.to(tl.float32) * weights[None, :]).to(q.dtype)


@triton.jit
def _rotate_values(
    left: tl.tensor,
    right: tl.tensor,
    weight_left: tl.tensor,
    weight_right: tl.tensor,
    cosine: tl.tensor,
    sine: tl.tensor,
    dtype: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """The left and the right of keys, from those of their values."""
    left = left.to(tl.float32) * weight_left
    right = right.to(tl.float32) * weight_right
    return (left * cosine - right * sine).to(dtype), (right * cosine + left * sine).to(dtype)


@triton.jit(
    do_not_specialize=[
        "window",
        "split_keys",
        "num_seqs",
        "total_rows",
        "table_stride",
    ],
    do_not_specialize_on_alignment=[
        "query_start",
        "context_lens",
        "block_table",
        "ahead",
        "ancestors",
        "depths",
    ],
)
def _attend(
    query: tl.tensor,
    key_cache: tl.tensor,  # None where keys are made of values
    value_cache: tl.tensor,
    weight: tl.tensor,  # this and the angles: None where keys are stored
    cos: tl.tensor,
    sin: tl.tensor,
    output: tl.tensor,
    state: tl.tensor,  # None where the keys are not split
    query_start: tl.tensor,
    context_lens: tl.tensor,
    block_table: tl.tensor,
    ahead: tl.tensor,  # None where no row sees a later one by it
    ancestors: tl.tensor,  # this and the depths: None where there are no trees
    depths: tl.tensor,
    scale: tl.tensor,
    window: tl.tensor,
    split_keys: tl.tensor,
    num_seqs: tl.tensor,
    total_rows: tl.tensor,
    page_stride: tl.tensor,
    slot_stride: tl.tensor,
    head_stride: tl.tensor,
    table_stride: tl.tensor,
    GROUP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROTATED: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    SPREAD: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One tile of (row, head) pairs against its keys, or against one split of them."""
    kv_head = tl.program_id(1)
    tile = tl.program_id(0)
    s, first_row, num_rows, pair = _find_tile(query_start, num_seqs, tile, GROUP, BLOCK_M)
    context = tl.load(context_lens + s)
    wait(PDL)  # up to here it has read where to look, which is older than the last linear
    if pair >= num_rows * GROUP:
        return
    first = context + pair // GROUP
    if ancestors is not None:  # no row of the tile stands farther back
        first = tl.maximum(first - LAST_BIT, context)
    last = context + tl.minimum((pair + BLOCK_M - 1) // GROUP, num_rows - 1)
    low, high = _key_range(first, last, context + num_rows, window, CAUSAL, WINDOWED)
    if ahead is not None:
        high = _end_ahead(high, ahead, first_row + last - context, context + num_rows)
    begin = low
    if state is not None:
        begin, high = _split(low, high, split_keys, BLOCK_N, SPREAD)

    # An empty split runs through without reading anything: leaving early costs registers.
    pairs = pair + tl.arange(0, BLOCK_M)
    row = pairs // GROUP
    head = kv_head * GROUP + pairs % GROUP
    dims = tl.arange(0, BLOCK_D)
    place = ((first_row + row) * (GROUP * NUM_KV_HEADS) + head).to(tl.int64)
    if ahead is not None:
        further = tl.load(ahead + first_row + row, mask=row < num_rows, other=0)
    if ancestors is not None:
        followed = tl.load(ancestors + first_row + row, mask=row < num_rows, other=0)
        depth = tl.load(depths + first_row + row, mask=row < num_rows, other=0)
    real = (row < tl.where(begin < high, num_rows, 0))[:, None] & (dims < HEAD_DIM)[None, :]
    q = tl.load(query + place[:, None] * HEAD_DIM + dims[None, :], mask=real, other=0.0)
    if key_cache is None:
        HALF: tl.constexpr = HEAD_DIM // 2
        turned = tl.arange(0, BLOCK_R)[None, :]
        rotated = turned < ROTATED
        heads = query + place[:, None] * HEAD_DIM
        q_left, q_right = _load_pairs(heads, turned, (row < num_rows)[:, None] & rotated, HALF)
        weight_left, weight_right = _load_pairs(weight, turned, rotated, HALF)
        q = _fold_weight(q, weight, dims, HEAD_DIM, ROTATED)

    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    mixed = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start in range(begin // BLOCK_N * BLOCK_N, high, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        # Pages of keys outside this range may be stale or unused: they must not even be looked up.
        readable = (key >= low) & (key < high)
        page = tl.load(block_table + s * table_stride + key // PAGE_SIZE, mask=readable, other=0)
        slot = page.to(tl.int64) * page_stride + key % PAGE_SIZE * slot_stride
        head_slot = (slot + kv_head * head_stride)[:, None]
        slot = head_slot + dims[None, :]
        full = readable[:, None] & (dims < HEAD_DIM)[None, :]
        if key_cache is None:
            v = tl.load(value_cache + slot, mask=full, other=0.0).to(q.dtype)
            scores = tl.dot(q, tl.trans(v), input_precision="ieee")
            few = readable[:, None] & rotated
            left, right = _load_pairs(value_cache + head_slot, turned, few, HALF)
            stand = key if depths is None else _stand(key, context, depths + first_row, readable)
            cosine, sine = _load_angles(cos, sin, stand[:, None] * HALF + turned, few)
            k_left, k_right = _rotate_values(
                left, right, weight_left, weight_right, cosine, sine, q.dtype
            )
            scores = tl.dot(q_left, tl.trans(k_left), scores, input_precision="ieee")
            scores = tl.dot(q_right, tl.trans(k_right), scores, input_precision="ieee")
            scores *= scale
        else:
            k = tl.load(key_cache + slot, mask=full, other=0.0).to(q.dtype)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        behind = (context + row)[:, None] - key[None, :]  # [BLOCK_M, BLOCK_N]
        until = behind if ahead is None else behind + further[:, None]
        distance = behind if depths is None else (context + depth)[:, None] - key[None, :]
        seen = readable[None, :] & _reach(distance, until, window, CAUSAL, WINDOWED)
        seen = seen if ancestors is None else seen & _follow(followed, key - context)
        best, powers, decay = _weigh(tl.where(seen, scores, float("-inf")), best)
        total = total * decay + tl.sum(powers, 1)
        if key_cache is not None:
            v = tl.load(value_cache + slot, mask=full, other=0.0).to(q.dtype)
        mixed = tl.dot(powers.to(v.dtype), v, mixed * decay[:, None], input_precision="ieee")

    if state is None:
        mixed = mixed / tl.where(total == 0.0, 1.0, total)[:, None]
    else:
        num_pairs = total_rows * (GROUP * NUM_KV_HEADS)
        place += tl.program_id(2).to(tl.int64) * num_pairs
        tl.store(state + place, best, mask=row < num_rows)
        tl.store(state + tl.num_programs(2) * num_pairs + place, total, mask=row < num_rows)
    if begin < high:  # an empty split leaves no sums
        target = output + place[:, None] * HEAD_DIM + dims[None, :]
        tl.store(target, mixed.to(output.dtype.element_ty), mask=real)


@triton.jit(
    do_not_specialize=["num_splits", "num_seqs"], do_not_specialize_on_alignment=["query_start"]
)
def _merge(
    partial: tl.tensor,
    state: tl.tensor,
    output: tl.tensor,
    query_start: tl.tensor,
    num_seqs: tl.tensor,
    num_splits: tl.tensor,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Add the splits of one (row, head) pair, in order and eight loads at a time."""
    stand_by(PDL)
    pair = tl.program_id(0).to(tl.int64)
    num_pairs = tl.num_programs(0).to(tl.int64)
    row = pair // NUM_HEADS
    if (row < tl.load(query_start)) | (row >= tl.load(query_start + num_seqs)):
        return
    dims = tl.arange(0, BLOCK_D)
    splits = tl.arange(0, MAX_SPLITS)
    filled = splits < num_splits
    bests = tl.load(state + splits * num_pairs + pair, mask=filled, other=float("-inf"))
    best = tl.max(bests, 0)
    reference = tl.where(best == float("-inf"), 0.0, best)
    totals = state + num_splits * num_pairs + pair
    total = reference * 0.0
    mixed = tl.zeros([BLOCK_D], tl.float32)
    for first in range(0, num_splits, 8):
        for i in tl.static_range(8):
            split = (first + i) * num_pairs
            other = tl.load(state + split + pair, mask=first + i < num_splits, other=float("-inf"))
            weight = tl.exp2(other - reference)
            total += weight * tl.load(totals + split, mask=weight > 0.0, other=0.0)
            # An empty split has written no sums: leave its memory alone.
            num_dims = tl.where(weight > 0.0, HEAD_DIM, 0)
            place = partial + (split + pair) * HEAD_DIM + dims
            mixed += weight * tl.load(place, mask=dims < num_dims, other=0.0)
    mixed = mixed / tl.where(total == 0.0, 1.0, total)
    target = output + pair * HEAD_DIM + dims
    tl.store(target, mixed.to(output.dtype.element_ty), mask=dims < HEAD_DIM)
