# Triton's decorators carry no types that mypy can see.
# mypy: disallow-untyped-decorators=False
"""Trees of draft tokens (kernels/tree.py), as two launches: a program for each row or slot.

A tree takes as long as its nodes, one after another: what a program knows of its rows stays in one
warp's registers, and all that is sought among them are words of 32 bits, which a warp reduces by
one instruction.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashdraft.kernels import tree as rule
from flashdraft.kernels.cuda.draw.arithmetic import UNFUSED, gumbel, noise_key, random_bits
from flashdraft.kernels.draw.rule import LOWEST_TEMPERATURE, MAX_TOP, Draw, DrawnRows, SlotSettings
from flashdraft.kernels.nodes import MAX_NODES, TreeNodes
from flashdraft.kernels.tree import Offered, Offers

DOUBT = tl.constexpr(rule.DOUBT)
NUM_TOP = tl.constexpr(MAX_TOP)
CANDIDATES = tl.constexpr(triton.next_power_of_2(rule.MAX_OFFERS))
COLDEST = tl.constexpr(LOWEST_TEMPERATURE)
SEEDED_FROM = tl.constexpr(rule.SEEDED_FROM)
NUM_PROPOSERS = tl.constexpr(rule.NUM_PROPOSERS)
BRANCH, BEYOND = tl.constexpr(rule.BRANCH), tl.constexpr(rule.BEYOND)
TAKEN = tl.constexpr(rule.TAKEN)
ROW_BITS = tl.constexpr(MAX_NODES.bit_length())
LAST_ROW = tl.constexpr(MAX_NODES)
SIGN = tl.constexpr(-(2**31))
SOURCE_BITS = tl.constexpr(rule.NUM_SOURCES.bit_length())
LIST_BITS = tl.constexpr(6)  # of whose list follows a child: 0, 1 = a chain's, the others behind
LIST = tl.constexpr((1 << 6) - 1)
MOST_BEFORE = LIST.value - 1
SOURCE = tl.constexpr((1 << rule.NUM_SOURCES.bit_length()) - 1)
LARGEST_INT = tl.constexpr(2**31 - 1)
LOW_WORD = tl.constexpr(2**32 - 1)
ROWS = MAX_NODES + 1  # of any tree: fewer take as long, and would be compiled apart


def offer(drawn: Draw, settings: SlotSettings, rows: DrawnRows, count: int) -> Offers:
    """`Kernels.offer`."""
    num_rows, device = drawn.tokens.shape[0], drawn.tokens.device
    assert 1 <= count <= rule.MAX_OFFERS and all(one.is_contiguous() for one in drawn)
    offers = Offers(
        torch.empty(num_rows, count, dtype=torch.int64, device=device),
        torch.empty(num_rows, count, dtype=torch.float32, device=device),
    )
    told = settings.temperature, settings.noise, rows.owner, rows.positions
    _offer[(num_rows,)](drawn, *told, offers, count, num_warps=1, **UNFUSED)
    return offers


@triton.jit(do_not_specialize=["count"])
def _offer(
    drawn: Draw,
    temperature: tl.tensor,
    noise: tl.tensor,
    owner: tl.tensor,
    positions: tl.tensor,
    offers: Offers,
    count: tl.tensor,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    slot, place = tl.load(owner + row), tl.arange(0, CANDIDATES)
    token, top = tl.load(drawn.tokens + row), row * NUM_TOP + place - 1
    is_top = (place > 0) & (place <= NUM_TOP)
    ids = tl.load(drawn.top_ids + top, mask=is_top, other=-1)
    logits = tl.load(drawn.top_logits + top, mask=is_top, other=0.0)
    ids = tl.where(place == 0, token, tl.where((ids == token) | (token < 0), -1, ids))
    logits = tl.where(place == 0, tl.load(drawn.logit + row), logits)
    there = ids >= 0
    peak = tl.max(tl.where(there, logits, float("-inf")), 0)
    heat = tl.load(temperature + slot)
    key = noise_key(tl.load(noise + slot), tl.load(positions + row))
    scaled = tl.div_rn(logits - peak, tl.maximum(heat, COLDEST))
    scores = tl.div_rn(scaled + gumbel(random_bits(key, ids.to(tl.int32))), DOUBT)
    best = tl.max(tl.where(there, scores, float("-inf")), 0)
    shares = tl.where(there, tl.exp(scores - best), 0.0)
    shares = tl.div_rn(shares, tl.sum(shares, 0))
    is_sampled = heat > 0
    sure = tl.where(is_sampled, shares, tl.exp(logits - tl.load(drawn.log_total + row)))
    sure = tl.where((sure >= 0.0) & (sure < float("inf")), tl.minimum(sure, 1.0), 0.0)
    worth = tl.where(is_sampled, scores, logits)
    worth = tl.where(place == 0, float("inf"), worth)
    # everybody goes behind those that are better
    other = tl.where(there, worth, float("-inf"))[None, :]
    is_equal_before = (other == worth[:, None]) & (place[None, :] < place[:, None])
    is_before = ((other > worth[:, None]) | is_equal_before) & there[None, :]
    rank = tl.sum(is_before.to(tl.int32), 1)
    where = row * count + rank
    tl.store(offers.tokens + where, ids, mask=there & (rank < count))
    tl.store(offers.confidence + where, sure, mask=there & (rank < count))
    is_spare = (place >= tl.sum(there.to(tl.int32), 0)) & (place < count)
    tl.store(offers.tokens + row * count + place, tl.zeros_like(ids), mask=is_spare)
    tl.store(offers.confidence + row * count + place, tl.zeros_like(sure), mask=is_spare)


class _Lists(NamedTuple):
    """`_Children` of the rule: [slots, 2 + before, places, cells of a list] each."""

    chances: Tensor  # float32; a list ends with 0
    # int32: whose word a child is; above that, whose list follows it: 0 = it is the chain's token,
    # 1 = the rival chain's; above that, where an offer is among all of its slot
    kinds: Tensor


def grow(offered: Offered, nodes: TreeNodes) -> None:
    """`Kernels.grow`: of equal bits, as products are the rule's in the rule's order."""
    num_slots, width, num_before, count = offered.other_tokens.shape
    num_nodes, device = nodes.tokens.shape[1], offered.tokens.device
    assert num_nodes <= MAX_NODES and num_before <= MOST_BEFORE
    assert all(one.is_contiguous() for one in (*offered, *nodes))
    places, room = triton.next_power_of_2(1 + width), triton.next_power_of_2(3 + count)
    cells = num_slots, 2 + num_before, places, room
    lists = _Lists(
        torch.empty(cells, dtype=torch.float32, device=device),
        torch.empty(cells, dtype=torch.int32, device=device),
    )
    _grow[(num_slots,)](
        offered,
        lists,
        nodes,
        num_nodes,
        width,
        offered.rival_tokens.shape[1],
        num_before,
        count,
        offered.edges.shape[0],
        PLACES=places,
        ROOM=room,
        ROWS=ROWS,
        num_warps=1,
    )


@triton.jit(
    do_not_specialize=["num_nodes", "width", "rival_width", "num_before", "count", "num_edges"]
)
def _grow(
    offered: Offered,
    lists: _Lists,
    nodes: TreeNodes,
    num_nodes: tl.tensor,
    width: tl.tensor,
    rival_width: tl.tensor,
    num_before: tl.tensor,
    count: tl.tensor,
    num_edges: tl.tensor,
    PLACES: tl.constexpr,
    ROOM: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    slot, lane = tl.program_id(0).to(tl.int64), tl.arange(0, ROWS)
    sizes = width, rival_width, num_before, count, num_edges
    length = _list_children(offered, lists, slot, sizes, PLACES, ROOM)
    chances = lists.chances + slot * (2 + num_before) * (PLACES * ROOM)
    kinds = lists.kinds + slot * (2 + num_before) * (PLACES * ROOM)
    tl.debug_barrier()  # lists are read by others than wrote them
    is_seeded = (num_nodes >= SEEDED_FROM) | (tl.load(offered.branches + slot) <= 0)
    length_if = tl.where(is_seeded, length, 0)
    num_seeds = tl.minimum(length_if, num_nodes)
    alive = tl.full((), 1.0, tl.float64)
    survival = tl.where(lane == 0, alive, 0.0)
    for seed in range(1, num_seeds + 1):
        alive *= tl.load(chances + (seed - 1) * ROOM).to(tl.float64)
        survival = tl.where(lane == seed, alive, survival)
    is_seed = lane <= num_seeds
    parents, depths = tl.where(is_seed, lane - 1, 0), tl.where(is_seed, lane, 1)
    own = tl.full((), 1, tl.int64) << lane.to(tl.int64)
    ancestors = tl.where(is_seed, own | (own - 1), own | 1)
    low, high = ancestors.to(tl.int32), (ancestors >> 32).to(tl.int32)
    grown = tl.zeros_like(lane) + tl.load(offered.sources + slot).to(tl.int32)
    cursors = lane * ROOM + (lane < length_if).to(tl.int32)
    worth = tl.load(chances + cursors, mask=is_seed, other=0.0).to(tl.float64) * survival
    coming = tl.load(kinds + cursors, mask=is_seed, other=0)
    latest = lane
    row = num_seeds + 1
    while row <= num_nodes:
        best, chosen = _find_best(worth, depths, latest)
        is_any = best > 0.0
        parent = tl.where(is_any, chosen & LAST_ROW, ROWS)
        is_parent, is_new = lane == parent, lane == tl.where(is_any, row, ROWS)
        kind = tl.sum(tl.where(is_parent, coming, 0), 0)
        depth = (chosen >> (2 * ROW_BITS)) + 1
        first = (((kind >> SOURCE_BITS) & LIST) * PLACES + depth) * ROOM
        cursors = tl.where(is_new, first, cursors + is_parent.to(tl.int32))
        survival = tl.where(is_new, best, survival)
        is_moved = is_new | is_parent
        chance = tl.load(chances + cursors, mask=is_moved, other=0.0).to(tl.float64)
        coming = tl.load(kinds + cursors, mask=is_moved, other=0) + tl.where(is_moved, 0, coming)
        worth = tl.where(is_moved, tl.minimum(chance * survival, best), worth)
        latest = tl.where(is_moved, row, latest)
        depths, parents = tl.where(is_new, depth, depths), tl.where(is_new, parent, parents)
        grown = tl.where(is_new, kind, grown)
        low |= tl.where(is_new, tl.sum(tl.where(is_parent, low, 0), 0), 0)
        high |= tl.where(is_new, tl.sum(tl.where(is_parent, high, 0), 0), 0)
        row = tl.where(is_any, row, num_nodes) + 1
    ancestors = (high.to(tl.int64) << 32) | (low.to(tl.int64) & LOW_WORD)
    _write(offered, nodes, slot, num_nodes, sizes, (parents, ancestors, depths, survival, grown))


@triton.jit
def _write(
    offered: Offered,
    nodes: TreeNodes,
    slot: tl.tensor,
    num_nodes: tl.tensor,
    sizes: tl.tensor,
    grown: tl.tensor,
) -> None:
    """Write a slot's nodes, with what they are in its lists."""
    width, rival_width, num_before, count, _ = sizes
    parents, ancestors, depths, survival, kinds = grown
    lane = tl.arange(0, parents.shape[0])
    where, is_node = slot * num_nodes + lane - 1, (lane > 0) & (lane <= num_nodes)
    tl.store(nodes.parents + where, parents.to(tl.int64), mask=is_node)
    tl.store(nodes.ancestors + where, ancestors, mask=is_node)
    tl.store(nodes.depths + where, depths, mask=is_node)
    tl.store(nodes.survival + where, survival, mask=is_node)
    is_real, column = is_node & (survival > 0.0), (kinds >> SOURCE_BITS) & LIST
    is_chain, is_rival, is_other = is_real & (column == 0), is_real & (column == 1), column > 1
    is_other &= is_real
    chain, rival = slot * width + depths - 1, slot * rival_width + depths - 1
    other = slot * width * num_before * count + (kinds >> (SOURCE_BITS + LIST_BITS))
    token = tl.load(offered.tokens + chain, mask=is_chain, other=0)
    token += tl.load(offered.rival_tokens + rival, mask=is_rival, other=0)
    token += tl.load(offered.other_tokens + other, mask=is_other, other=0)
    sure = tl.load(offered.confidence + chain, mask=is_chain, other=0.0)
    sure += tl.load(offered.rival_confidence + rival, mask=is_rival, other=0.0)
    sure += tl.load(offered.other_confidence + other, mask=is_other, other=0.0)
    tl.store(nodes.tokens + where, token, mask=is_node)
    tl.store(nodes.confidence + where, sure, mask=is_node)
    tl.store(nodes.sources + where, tl.where(is_real, kinds & SOURCE, 0), mask=is_node)


@triton.jit
def _find_best(worth: tl.tensor, depths: tl.tensor, latest: tl.tensor) -> tl.tensor:
    """What the best next child is worth, and its parent's depth, latest child and row in a word."""
    bits = worth.to(tl.int64, bitcast=True)  # of numbers not below 0: ordered as they are
    high, low = (bits >> 32).to(tl.int32), bits.to(tl.int32) ^ SIGN
    most = tl.max(high, 0)
    second = tl.max(tl.where(high == most, low, SIGN), 0)
    is_best = (high == most) & (low == second)
    order = (((depths << ROW_BITS) | latest) << ROW_BITS) | tl.arange(0, worth.shape[0])
    bits = (most.to(tl.int64) << 32) | ((second ^ SIGN).to(tl.int64) & LOW_WORD)
    chosen = tl.min(tl.where(is_best, order, LARGEST_INT), 0)
    return bits.to(tl.float64, bitcast=True), chosen


@triton.jit
def _list_children(
    offered: Offered,
    lists: _Lists,
    slot: tl.tensor,
    sizes: tl.tensor,
    PLACES: tl.constexpr,
    ROOM: tl.constexpr,
) -> tl.tensor:
    """Write a slot's lists, of parents on the chain, the rival one and none; the chain's length."""
    width, rival_width, num_before, count, num_edges = sizes
    place, column = tl.arange(0, PLACES)[:, None], tl.arange(0, ROOM)[None, :]
    has_branches = tl.load(offered.branches + slot) > 0
    num_rivals = tl.where(has_branches, rival_width, 0)
    is_near = (place < width) & (place < _room(offered, slot))  # nothing is deeper
    is_own, is_rival = (column == 0) & is_near, (column == 1) & is_near & (place < num_rivals)
    own, rival = slot * width + place, slot * rival_width + place
    chain = tl.load(offered.tokens + own, mask=place < width, other=0)
    follows = tl.load(offered.rival_tokens + rival, mask=place < rival_width, other=-1)
    sure = tl.load(offered.confidence + own, mask=is_own, other=0.0)
    sure += tl.load(offered.rival_confidence + rival, mask=is_rival, other=0.0)
    proposer, row = tl.load(offered.sources + slot).to(tl.int32), 1 + num_edges
    source = tl.where(column == 0, proposer, tl.where(column == 1, 1 - proposer, BRANCH))
    leaving = source + tl.where(column == 1, NUM_PROPOSERS, 0)
    beyond = tl.full((), BEYOND, tl.int32)
    # of parents on the chain; their offers are those of its list
    before = tl.load(offered.chain_before + own, mask=place < width, other=0).to(tl.int32)
    tokens, all_sure, words, bucket = _offers(offered, slot, place, column, before, sizes, sure)
    chance = _chance(offered, all_sure, bucket + source * row, column)
    chance_leaving = _chance(offered, all_sure, bucket + leaving * row, column)
    there = all_sure > 0.0
    ends = tl.where((column == 0) & (chance <= 0.0), place, PLACES)
    length = tl.min(tl.min(ends, 1), 0)
    is_sure = tl.max((is_rival & there).to(tl.int32), 1)[:, None] > 0
    is_apart = (place >= length) | (is_sure == 0) | (chain != follows)
    leaves = tl.min(tl.min(tl.where(is_apart, place, PLACES), 1), 0)
    # whose token is a chain's is no other's
    on_chain = (chance_leaving > 0.0) & (place < length) & (column == 0)
    is_leaving = (chance_leaving > 0.0) & (column == 1) & (place == leaves)
    no_rival = (tl.max(is_leaving.to(tl.int32), 1)[:, None] == 0) | (tokens != follows)
    is_free = (chance > 0.0) & (column > 1)
    is_sibling = is_free & ((tokens != chain) | (place >= length)) & no_rival
    start = slot * (2 + num_before) * (PLACES * ROOM) + place * ROOM
    is_child = on_chain | is_leaving | is_sibling
    _list(lists, start, column, words + leaving, chance_leaving, is_child)
    # of parents on the rival chain alone
    before = tl.load(offered.rival_before + own, mask=place < width, other=0).to(tl.int32)
    tokens, all_sure, words, bucket = _offers(offered, slot, place, column, before, sizes, sure)
    chance = _chance(offered, all_sure, bucket + source * row, column)
    goes_on = (chance > 0.0) & (column == 1)
    no_rival = (tl.max(goes_on.to(tl.int32), 1)[:, None] == 0) | (tokens != follows)
    start += PLACES * ROOM
    is_child = goes_on | ((chance > 0.0) & (column > 1) & no_rival)
    _list(lists, start, column, words + source, chance, is_child)
    for number in range(num_before):  # of all others
        before = tl.zeros_like(before) + number
        tokens, all_sure, words, bucket = _offers(offered, slot, place, column, before, sizes, sure)
        chance = _chance(offered, all_sure, bucket + beyond * row, column)
        start += PLACES * ROOM
        _list(lists, start, column, words + beyond, chance, (chance > 0.0) & (column > 1))
    return length


@triton.jit
def _room(offered: Offered, slot: tl.tensor) -> tl.tensor:
    """How deep a slot's nodes may be, so that something is left for the target's own token."""
    return tl.load(offered.ends + slot) - tl.load(offered.lengths + slot) - TAKEN


@triton.jit
def _offers(
    offered: Offered,
    slot: tl.tensor,
    place: tl.tensor,
    column: tl.tensor,
    before: tl.tensor,
    sizes: tl.tensor,
    sure: tl.tensor,
) -> tl.tensor:
    """A list of offers at every place beside the chains: tokens, confidence, words and buckets."""
    width, _, num_before, count, num_edges = sizes
    num_others = tl.where(tl.load(offered.branches + slot) > 0, count, 0)
    is_near = (place < width) & (place < _room(offered, slot))
    is_other = is_near & (column > 1) & (column < 2 + num_others)
    cell = (place * num_before + before) * count + column - 2
    other = slot * width * num_before * count + cell
    tokens = tl.load(offered.other_tokens + other, mask=is_other, other=0)
    sure += tl.load(offered.other_confidence + other, mask=is_other, other=0.0)
    number = tl.load(offered.other_numbers + other, mask=is_other, other=0).to(tl.int32)
    words = tl.where(is_other, (cell << LIST_BITS) + 2 + number, column)
    bucket = tl.zeros_like(sure).to(tl.int32)
    for edge in range(num_edges):
        bucket += (sure >= tl.load(offered.edges + edge)).to(tl.int32)
    return tokens, sure, words << SOURCE_BITS, bucket


@triton.jit
def _chance(offered: Offered, sure: tl.tensor, cell: tl.tensor, column: tl.tensor) -> tl.tensor:
    """That the target agrees with what is so sure, by a cell of the chances."""
    part = tl.where(column > 1, sure, 1.0)
    return tl.minimum(part * tl.load(offered.chances + cell, mask=sure > 0.0, other=0.0), 1.0)


@triton.jit
def _list(
    lists: _Lists,
    start: tl.tensor,
    column: tl.tensor,
    words: tl.tensor,
    chance: tl.tensor,
    there: tl.tensor,
) -> None:
    """Write those that are there in the children's order, and zeros behind."""
    is_rival = there & (column == 1)
    has_rival = tl.max(is_rival.to(tl.int32), 1)[:, None]
    rival = tl.sum(tl.where(is_rival, chance, 0.0), 1)[:, None]
    others = (there & (column != 1)).to(tl.int32)
    is_behind = (there & (column > 1) & (chance <= rival)).to(tl.int32) * has_rival
    is_behind = (tl.cumsum(is_behind, 1) > 0).to(tl.int32)
    number = tl.cumsum(others, 1) - 1 + is_behind
    number = tl.where(is_rival, tl.sum(others * (1 - is_behind), 1)[:, None], number)
    tl.store(lists.chances + start + number, chance, mask=there)
    tl.store(lists.kinds + start + number, words + tl.zeros_like(number), mask=there)
    total = tl.sum(there.to(tl.int32), 1)[:, None]
    tl.store(lists.chances + start + column, tl.zeros_like(chance), mask=column >= total)
