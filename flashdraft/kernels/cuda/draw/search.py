# Triton's decorators carry no types that mypy can see.
# mypy: disallow-untyped-decorators=False
"""Where a row's kept tokens end, whatever the filters and however flat the row. Triton, CUDA only.

What the filters keep is always the first tokens of one order (rule.py), so it has a last one: with
top-k the k-th, with top-p the first by which so much weight is reached. `find_last` finds it among
a few tokens by bisection. Among many, a look at the whole row takes the `measure` of the tokens
above each of CUTS keys, and `narrow` says between which two of them the last one is. `search_row`
looks until few enough are left for `find_last`, or all that are left are equal.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flashdraft.kernels.cuda.draw.arithmetic import (
    LARGEST_ID,
    NOTHING,
    key_of,
    order,
    pack,
    value_of,
    weigh,
)
from flashdraft.kernels.cuda.draw.look import least_key, load_scaled
from flashdraft.kernels.draw import arithmetic

CUTS = tl.constexpr(8)
DEEPEST_CUT = tl.constexpr(-28.0)  # the first cuts are at -28 (j / 8)**2
WEIGHTLESS = tl.constexpr(arithmetic.WEIGHTLESS)
MANY = tl.constexpr(2**62)


@triton.jit
def find_last(
    packed: tl.tensor, measure: tl.tensor, before: tl.tensor, goal: tl.tensor
) -> tl.tensor:
    """The first packed token, in their order, by which `before` and the measures reach the goal.

    The last of all where they never do. What is not there is NOTHING with measure 0.
    """
    low = tl.min(tl.where(packed == NOTHING, 0x7FFFFFFFFFFFFFFF, packed), 0)
    high = tl.max(packed, 0) + 1
    while high - low > 1:
        middle = low + ((high - low) >> 1)
        reached = before + tl.sum(tl.where(packed >= middle, measure, 0), 0)
        is_enough = reached.to(tl.float64) >= goal
        low = tl.where(is_enough, middle, low)
        high = tl.where(is_enough, high, middle)
    return low


@triton.jit
def weighed_key(lowest: tl.tensor) -> tl.tensor:
    """The least key, of at least `lowest`, that tokens with a weight can have."""
    return tl.maximum(lowest, order(tl.full([], WEIGHTLESS, tl.float32)))


@triton.jit
def open_bracket(low: tl.tensor) -> tl.tensor:
    """What is known at first: `narrow` says what. The best token's key is 0."""
    nothing = low * 0
    return low, nothing + 1, nothing, nothing, nothing + MANY


@triton.jit
def is_wide(bracket: tl.tensor, ROOM: tl.constexpr) -> tl.tensor:
    """Whether another look at the row is needed, and of use."""
    low, high, _, _, num_inside = bracket
    return (num_inside == MANY) | ((num_inside > ROOM) & (high - low > 1))


@triton.jit
def first_cuts(low: tl.tensor) -> tl.tensor:
    """Keys between which the last token may lie if nothing is known but that it has at least `low`.

    The first is `low` itself, so that the measure of everything is found, too.
    """
    places = tl.arange(0, CUTS)
    steps = places.to(tl.float32) / CUTS - 1.0
    cuts = tl.maximum(order(steps * steps * DEEPEST_CUT).to(tl.int64), low + 1)
    return tl.where(places == 0, low, cuts)


@triton.jit
def next_cuts(low: tl.tensor, high: tl.tensor) -> tl.tensor:
    """The same if the key is known to be below `high`."""
    places, span = tl.arange(0, CUTS), high - low
    return low + tl.where(span > CUTS, span * places // CUTS, places)


@triton.jit
def narrow(
    bracket: tl.tensor,
    goal: tl.tensor,
    share: tl.tensor,
    by_count: tl.tensor,
    cuts: tl.tensor,
    counts: tl.tensor,
    weights: tl.tensor,
) -> tl.tensor:
    """The bracket and the goal after a look at the whole row.

    A bracket is (low, high, count, weight, num_inside): the last token's key is in low .. high - 1,
    which so many have; from `high` on there are `count` tokens, that weigh so much together. A goal
    below 0 is the share of all weight; one that is a number of tokens may be more than there are.
    """
    low, high, count, weight, num_inside = bracket
    total = tl.max(weights, 0).to(tl.float64)
    by_weight = tl.where(goal < 0.0, total * share, goal)
    goal = tl.where(by_count, tl.minimum(goal, tl.max(counts, 0).to(tl.float64)), by_weight)
    is_enough = tl.where(by_count, counts, weights).to(tl.float64) >= goal
    count = tl.maximum(count, tl.max(tl.where(is_enough, 0, counts), 0))
    weight = tl.maximum(weight, tl.max(tl.where(is_enough, 0, weights), 0))
    num_inside = tl.min(tl.where(is_enough, counts, MANY), 0) - count
    low = tl.max(tl.where(is_enough, cuts, low), 0)
    high = tl.min(tl.where(is_enough, high, cuts), 0)
    return (low, high, count, weight, num_inside), goal


@triton.jit
def measure(
    look: tl.tensor,
    row: tl.tensor,
    peak: tl.tensor,
    cuts: tl.tensor,
    start: tl.tensor,
    end: tl.tensor,
    vocab_size: tl.tensor,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    MASKED: tl.constexpr,
) -> tl.tensor:
    """How many tokens of start .. end - 1 have at least each of the cuts as their keys, and what
    they weigh together: [CUTS] int64 both.
    """
    counts = tl.zeros([CUTS, BLOCK], dtype=tl.int32)
    weights = tl.zeros([CUTS, BLOCK], dtype=tl.int64)
    for first in range(start, end, BLOCK):
        ids = first + tl.arange(0, BLOCK)
        scaled = load_scaled(look, row, ids, peak, vocab_size, WIDTH, MASKED)
        keys = order(scaled).to(tl.int64)
        above = (keys[None, :] >= cuts[:, None]) & (ids < end)[None, :]
        counts += above.to(tl.int32)
        weights += tl.where(above, weigh(scaled)[None, :], 0)
    return tl.sum(counts.to(tl.int64), 1), tl.sum(weights, 1)


@triton.jit
def _collect(
    look: tl.tensor,
    row: tl.tensor,
    peak: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    found: tl.tensor,
    vocab_size: tl.tensor,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    MASKED: tl.constexpr,
) -> None:
    """Write the tokens with keys in low .. high - 1, packed, in the order of their ids."""
    count = 0
    for first in range(0, vocab_size, BLOCK):
        ids = first + tl.arange(0, BLOCK)
        keys = order(load_scaled(look, row, ids, peak, vocab_size, WIDTH, MASKED))
        inside = (keys >= low) & (keys < high) & (ids < vocab_size)
        places = count + tl.cumsum(inside.to(tl.int32), 0) - 1
        tl.store(found + places, pack(keys, ids), mask=inside)
        count += tl.sum(inside.to(tl.int32), 0)


@triton.jit
def _find_equal(
    look: tl.tensor,
    row: tl.tensor,
    peak: tl.tensor,
    key: tl.tensor,
    number: tl.tensor,
    vocab_size: tl.tensor,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    MASKED: tl.constexpr,
) -> tl.tensor:
    """The id of so manieth token with this key, counted from 1; the largest id if there is none."""
    count = 0
    last = tl.full([], LARGEST_ID, tl.int32)
    for first in range(0, vocab_size, BLOCK):
        ids = first + tl.arange(0, BLOCK)
        keys = order(load_scaled(look, row, ids, peak, vocab_size, WIDTH, MASKED))
        equal = (keys == key) & (ids < vocab_size)
        places = count + tl.cumsum(equal.to(tl.int32), 0)
        here = tl.where(equal & (places == number), ids, LARGEST_ID)
        last = tl.minimum(last, tl.min(here, 0))
        count += tl.sum(equal.to(tl.int32), 0)
    return last


@triton.jit
def _find_boundary(
    look: tl.tensor,
    row: tl.tensor,
    peak: tl.tensor,
    lowest: tl.tensor,
    goal: tl.tensor,
    share: tl.tensor,
    found: tl.tensor,
    vocab_size: tl.tensor,
    BY_COUNT: tl.constexpr,
    ROOM: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    MASKED: tl.constexpr,
) -> tl.tensor:
    """The last token kept, packed, of those with a key of at least `lowest`, and the kept weight.

    Kept are the first by which the goal is reached: a number of tokens, or a weight. A goal below
    0 is the share of all that they weigh.
    """
    low = lowest.to(tl.int64)
    bracket = open_bracket(low)
    cuts = first_cuts(low)
    by_count = tl.full([], BY_COUNT, tl.int1)
    while is_wide(bracket, ROOM):
        counts, weights = measure(
            look, row, peak, cuts, 0, vocab_size, vocab_size, BLOCK, WIDTH, MASKED
        )
        bracket, goal = narrow(bracket, goal, share, by_count, cuts, counts, weights)
        cuts = next_cuts(bracket[0], bracket[1])
    low, high, before_count, before_weight, num_inside = bracket
    if num_inside <= ROOM:
        tl.debug_barrier()  # the room may have been read before
        _collect(look, row, peak, low, high, found, vocab_size, BLOCK, WIDTH, MASKED)
        tl.debug_barrier()
        rooms = tl.arange(0, ROOM)
        packed = tl.load(found + rooms, mask=rooms < num_inside, other=NOTHING)
        weights = tl.where(packed == NOTHING, 0, weigh(value_of(key_of(packed))))
        if BY_COUNT:
            last = find_last(packed, (packed != NOTHING).to(tl.int64), before_count, goal)
        else:
            last = find_last(packed, weights, before_weight, goal)
        weight = before_weight + tl.sum(tl.where(packed >= last, weights, 0), 0)
    else:  # all that are left are equal
        each = weigh(value_of(low.to(tl.int32)))
        fewest, most = low * 0 + 1, num_inside
        while fewest < most:
            middle = (fewest + most) >> 1
            reached = before_count + middle if BY_COUNT else before_weight + middle * each
            is_enough = reached.to(tl.float64) >= goal
            most = tl.where(is_enough, middle, most)
            fewest = tl.where(is_enough, fewest, middle + 1)
        key = low.to(tl.int32)
        last_id = _find_equal(look, row, peak, key, fewest, vocab_size, BLOCK, WIDTH, MASKED)
        last = pack(key, last_id)
        weight = before_weight + fewest * each
    return last, weight


@triton.jit
def search_row(
    look: tl.tensor,
    row: tl.tensor,
    peak: tl.tensor,
    found: tl.tensor,
    vocab_size: tl.tensor,
    ROOM: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    MASKED: tl.constexpr,
) -> tl.tensor:
    """The last token that a row's filters keep, packed; `found` has room for ROOM packed tokens."""
    slot = tl.load(look.owner + row)
    lowest = least_key(look, slot)
    top_k = tl.load(look.top_k + slot)
    top_p = tl.load(look.top_p + slot)
    last = pack(lowest, tl.full([], LARGEST_ID, tl.int32))
    goal = tl.full([], -1.0, tl.float64)
    if top_k < vocab_size:
        last, weight = _find_boundary(
            look,
            row,
            peak,
            lowest,
            top_k.to(tl.float64),
            top_p,
            found,
            vocab_size,
            True,
            ROOM,
            BLOCK,
            WIDTH,
            MASKED,
        )
        goal = weight.to(tl.float64) * top_p
    if top_p < 1.0:
        last, _ = _find_boundary(
            look,
            row,
            peak,
            weighed_key(lowest),
            goal,
            top_p,
            found,
            vocab_size,
            False,
            ROOM,
            BLOCK,
            WIDTH,
            MASKED,
        )
    return last
