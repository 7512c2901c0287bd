# Triton's decorators carry no types that mypy can see.
# mypy: disallow-untyped-decorators=False
"""The draw of many rows at once, each by its own slot's settings (kernels/draw/rule.py). CUDA only.

Eleven launches, whatever the rows want; a program with nothing to do for its row ends at once.

1. `_scan` reads the logits: the largest of every part of SUB tokens, and the sum of powers. For
   greedy rows this is all. `_readjust` finds the largest anew in rows whose logits are adjusted,
   apart from it: what adjusts takes so many registers that few programs would scan side by side.
2. `_settle` puts a row's parts together, and decides how it goes on. With a small top-k, the k-th
   largest of the parts' largest is a value that at least k tokens reach, and seldom many more.
3. `_weigh`, three times: with top-p alone, or a large top-k alone, the row's pieces are measured
   side by side, which narrows the keys that the last token kept can have (search.py).
4. `_gather` writes down who has a key in question, skipping the parts in which nobody does.
5. `_pick` filters and draws among them, or finds the last token kept. Should they be too many,
6. `_search` finds it in the whole row; so it does for a large top-k together with top-p.
7. `_contest` draws from a whole row down to its last token. Only where a token's random bits let it
   beat the likeliest one's noise is its own computed.
8. `_conclude` puts a row's winners together, and finds its likeliest tokens for log-probabilities:
   the best part's best, again and again.

They are launched plainly (overlap.py): a start that overlaps would gain little among so few, and
every kernel would be compiled twice.

Atomic additions are of integers, and what they order is put into one order afterwards: the same
rows give the same tokens.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashdraft.kernels.cuda.draw.arithmetic import (
    NOTHING,
    UNFUSED,
    gumbel,
    id_of,
    key_of,
    noise_key,
    order,
    pack,
    random_bits,
    value_of,
    weigh,
)
from flashdraft.kernels.cuda.draw.look import (
    Look,
    adjust,
    is_adjusted,
    least_key,
    load_raw,
    load_scaled,
    make_look,
    scale,
)
from flashdraft.kernels.cuda.draw.search import (
    CUTS,
    find_last,
    first_cuts,
    is_wide,
    measure,
    narrow,
    next_cuts,
    open_bracket,
    search_row,
    weighed_key,
)
from flashdraft.kernels.draw import arithmetic, rule

MAX_TOP = tl.constexpr(rule.MAX_TOP)
TOP_BLOCK = tl.constexpr(triton.next_power_of_2(rule.MAX_TOP))
DONE, PICKS, WEIGHS, SEARCHES, CONTESTS = (tl.constexpr(mode) for mode in range(5))
ROUNDS = tl.constexpr(3)  # of `_weigh`
BRACKET = tl.constexpr(5)  # numbers in a bracket
LARGEST_INT = tl.constexpr(2**31 - 1)
NUM_BITS = tl.constexpr(arithmetic.NUM_BITS)


class DrawPlan(NamedTuple):
    """How a row is cut, in powers of two."""

    sub: int = 256  # tokens in a part
    parts: int = 8  # in a block, which is what a program looks at together
    blocks: int = 4  # in a piece, which is what a program has to do
    room: int = 1024  # tokens written down for `_pick`, and by `_search`
    max_picked: int = 256  # the largest top_k that is picked from gathered tokens
    search_block: int = 1024
    weigh_block: int = 512

    @property
    def block(self) -> int:
        return self.sub * self.parts


PLAN = DrawPlan()


class Notes(NamedTuple):
    """What the kernels tell each other, [rows] each unless said otherwise."""

    maxima: Tensor  # [rows, parts] float32, of adjusted logits
    raw_maxima: Tensor  # [rows, parts] float32
    sums: Tensor  # [rows, pieces] float32: of exp(raw - the piece's largest)
    peak: Tensor  # float32: the largest adjusted logit
    noise: Tensor  # float32: of the first token that has it
    key: Tensor  # int64: of the row's noise
    mode: Tensor  # int32
    last: Tensor  # int64: the last token that may be drawn, packed
    num_found: Tensor  # int32: tokens written to `found`
    found: Tensor  # [rows, room] int64, packed
    brackets: Tensor  # [rows, ROUNDS + 1, BRACKET] int64: before each round of `_weigh`, and after
    goals: Tensor  # [rows, ROUNDS + 1] float64
    counts: Tensor  # [rows, ROUNDS, pieces, CUTS] int64
    weights: Tensor  # [rows, ROUNDS, pieces, CUTS] int64
    best: Tensor  # [rows, pieces] int64: the winners, packed


def draw(
    head: rule.HeadProducts,
    settings: rule.SlotSettings,
    rows: rule.DrawnRows,
    plan: DrawPlan = PLAN,
) -> rule.Draw:
    """`Kernels.draw`. Products become logits wherever they are read: nobody writes them down."""
    (num_rows, vocab_size), device = head.products.shape, head.products.device
    drawn = _make_draw(num_rows, device)
    if num_rows == 0:
        return drawn
    num_blocks = triton.cdiv(vocab_size, plan.block)
    num_pieces = triton.cdiv(num_blocks, plan.blocks)
    notes = _make_notes(num_rows, num_blocks, num_pieces, plan, device)
    look = make_look(head, settings, rows)
    follows = rows.followed is not None and rows.ancestors is not None
    shared: dict[str, Any] = {
        "WIDTH": rows.followed.shape[1] if follows and rows.followed is not None else 0,
        "MASKED": rows.mask_of is not None,
        **UNFUSED,
        "num_warps": 4,
    }
    cut = {"SUB": plan.sub, "PARTS": plan.parts}
    room = {"ROOM": plan.room}
    pieces, each = (num_rows, num_pieces), (num_rows,)
    share = {**cut, "BLOCKS": plan.blocks}
    whole = {**cut, "WHOLE": triton.next_power_of_2(num_blocks)}
    joined = {"PIECES": triton.next_power_of_2(num_pieces)}
    less = _without_look(shared)
    _scan[pieces](look, notes, vocab_size, **share, **less)
    _readjust[pieces](look, notes, vocab_size, **share, **shared)
    picked = {"MAX_PICKED": plan.max_picked}
    _settle[each](look, notes, drawn, vocab_size, **share, **joined, **picked, **shared)
    for turn in range(ROUNDS.value):
        block = {"BLOCK": min(plan.weigh_block, plan.block), "TURN": turn}
        _weigh[pieces](look, notes, vocab_size, **share, **room, **joined, **block, **shared)
    _gather[pieces](look, notes, vocab_size, **share, **room, **joined, **shared)
    _pick[each](look, notes, drawn, vocab_size, **room, **less)
    wide = shared | {"num_warps": 8}
    _search[each](look, notes, vocab_size, **room, BLOCK=plan.search_block, **wide)
    _contest[pieces](look, notes, vocab_size, **share, **shared)
    _conclude[each](look, notes, drawn, vocab_size, num_pieces, **whole, **joined, **less)
    return drawn


def _without_look(shared: dict[str, Any]) -> dict[str, Any]:
    """For kernels that adjust no logits."""
    return {name: value for name, value in shared.items() if name not in ("WIDTH", "MASKED")}


def _make_draw(num_rows: int, device: torch.device) -> rule.Draw:
    tops = num_rows, rule.MAX_TOP
    return rule.Draw(
        torch.empty(num_rows, dtype=torch.int64, device=device),
        torch.empty(num_rows, dtype=torch.float32, device=device),
        torch.empty(num_rows, dtype=torch.float32, device=device),
        torch.empty(tops, dtype=torch.int64, device=device),
        torch.empty(tops, dtype=torch.float32, device=device),
    )


def _make_notes(
    num_rows: int, num_blocks: int, num_pieces: int, plan: DrawPlan, device: torch.device
) -> Notes:
    def make(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.empty(num_rows, *shape, dtype=dtype, device=device)

    return Notes(
        maxima=make(torch.float32, num_blocks * plan.parts),
        raw_maxima=make(torch.float32, num_blocks * plan.parts),
        sums=make(torch.float32, num_pieces),
        peak=make(torch.float32),
        noise=make(torch.float32),
        key=make(torch.int64),
        mode=make(torch.int32),
        last=make(torch.int64),
        num_found=make(torch.int32),
        found=make(torch.int64, plan.room),
        brackets=make(torch.int64, ROUNDS.value + 1, BRACKET.value),
        goals=make(torch.float64, ROUNDS.value + 1),
        counts=make(torch.int64, ROUNDS.value, num_pieces, CUTS.value),
        weights=make(torch.int64, ROUNDS.value, num_pieces, CUTS.value),
        best=make(torch.int64, num_pieces),
    )


@triton.jit
def _scan(
    look: Look,
    notes: Notes,
    vocab_size: tl.tensor,
    SUB: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    num_parts = tl.cdiv(vocab_size, SUB * PARTS) * PARTS
    parts = tl.program_id(1) * (BLOCKS * PARTS) + tl.arange(0, BLOCKS * PARTS)
    ids = parts[:, None] * SUB + tl.arange(0, SUB)[None, :]
    raw = load_raw(look, row, ids, vocab_size)  # all at once: nothing waits for anything else
    maxima = tl.max(raw, 1)
    places, there = row * num_parts + parts, parts < num_parts
    tl.store(notes.raw_maxima + places, maxima, mask=there)
    tl.store(notes.maxima + places, maxima, mask=there)
    peak = tl.max(maxima, 0)
    powers = tl.exp(raw - tl.where(tl.abs(peak) == float("inf"), 0.0, peak))
    total = tl.sum(tl.sum(powers, 1), 0)
    tl.store(notes.sums + row * tl.num_programs(1) + tl.program_id(1), total)


@triton.jit
def _readjust(
    look: Look,
    notes: Notes,
    vocab_size: tl.tensor,
    SUB: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCKS: tl.constexpr,
    WIDTH: tl.constexpr,
    MASKED: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    if is_adjusted(look, row, MASKED):
        num_blocks = tl.cdiv(vocab_size, SUB * PARTS)
        first = tl.program_id(1) * BLOCKS
        for block in range(first, tl.minimum(first + BLOCKS, num_blocks)):
            parts = block * PARTS + tl.arange(0, PARTS)
            ids = parts[:, None] * SUB + tl.arange(0, SUB)[None, :]
            raw = load_raw(look, row, ids, vocab_size)
            x = adjust(look, row, raw, ids, vocab_size, WIDTH, MASKED)
            tl.store(notes.maxima + row * num_blocks * PARTS + parts, tl.max(x, 1))


@triton.jit
def _settle(
    look: Look,
    notes: Notes,
    drawn: rule.Draw,
    vocab_size: tl.tensor,
    SUB: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCKS: tl.constexpr,
    PIECES: tl.constexpr,
    MAX_PICKED: tl.constexpr,
    WIDTH: tl.constexpr,
    MASKED: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    num_parts = tl.cdiv(vocab_size, SUB * PARTS) * PARTS
    num_pieces = tl.cdiv(vocab_size, SUB * PARTS * BLOCKS)
    pieces = tl.arange(0, PIECES)
    places = pieces[:, None] * (BLOCKS * PARTS) + tl.arange(0, BLOCKS * PARTS)[None, :]
    there = places < num_parts
    start = row * num_parts
    maxima = tl.load(notes.maxima + start + places, mask=there, other=float("-inf"))
    raw = tl.load(notes.raw_maxima + start + places, mask=there, other=float("-inf"))
    sums = tl.load(notes.sums + row * num_pieces + pieces, mask=pieces < num_pieces, other=0.0)
    peaks = tl.max(raw, 1)
    raw_peak = tl.max(peaks, 0)
    peak = tl.max(tl.max(maxima, 1), 0)
    is_sound = (tl.abs(raw_peak) != float("inf")) & (tl.abs(peak) != float("inf"))
    base = tl.where(tl.abs(raw_peak) == float("inf"), 0.0, raw_peak)
    powers = tl.where(peaks == float("-inf"), 0.0, tl.exp((peaks - base).to(tl.float64)))
    total = base.to(tl.float64) + tl.log(tl.sum(sums.to(tl.float64) * powers, 0))
    tl.store(drawn.log_total + row, total.to(tl.float32))
    # The first of the largest: in the first of the parts that have it.
    part = tl.min(tl.min(tl.where(maxima == peak, places, LARGEST_INT), 1), 0)
    ids = tl.minimum(part, num_parts - 1) * SUB + tl.arange(0, SUB)
    x = adjust(look, row, load_raw(look, row, ids, vocab_size), ids, vocab_size, WIDTH, MASKED)
    best = tl.min(tl.where(x == peak, ids, LARGEST_INT), 0)
    best = tl.minimum(best, vocab_size - 1)
    tl.store(drawn.tokens + row, tl.where(is_sound, best, -1).to(tl.int64))
    slot = tl.load(look.owner + row)
    key = noise_key(tl.load(look.noise + slot), tl.load(look.positions + row))
    tl.store(notes.peak + row, peak)
    tl.store(notes.key + row, key)
    tl.store(notes.noise + row, gumbel(random_bits(key, best)))
    tl.store(notes.num_found + row, 0)
    top_k = tl.load(look.top_k + slot)
    picks = (top_k < vocab_size) & (top_k <= MAX_PICKED) & (top_k <= num_parts)
    by_count, by_weight = top_k < vocab_size, tl.load(look.top_p + slot) < 1.0
    mode = tl.where(
        by_count | by_weight, tl.where(by_count & by_weight, SEARCHES, WEIGHS), CONTESTS
    )
    mode = tl.where(picks, PICKS, mode)
    mode = tl.where(is_sound & (tl.load(look.temperature + slot) > 0.0), mode, DONE)
    tl.store(notes.mode + row, mode)
    lowest = least_key(look, slot)
    if mode == PICKS:
        keys = tl.where(there, order(scale(look, row, maxima, peak)).to(tl.int64), NOTHING)
        low, high = lowest.to(tl.int64), lowest.to(tl.int64) * 0 + 1
        while high - low > 1:  # the largest that at least k parts reach, or else `lowest`
            middle = (low + high) >> 1
            count = tl.sum(tl.sum((keys >= middle).to(tl.int32), 1), 0)
            low = tl.where(count >= top_k, middle, low)
            high = tl.where(count >= top_k, high, middle)
        lowest = low.to(tl.int32)
    tl.store(notes.last + row, pack(lowest, tl.full([], LARGEST_INT, tl.int32)))
    if mode == WEIGHS:
        goal = tl.where(by_count, top_k.to(tl.float64), -1.0)
        bracket = open_bracket(tl.where(by_count, lowest, weighed_key(lowest)).to(tl.int64))
        _store_bracket(notes, row, 0, bracket, goal)


@triton.jit
def _store_bracket(
    notes: Notes, row: tl.tensor, turn: tl.tensor, bracket: tl.tensor, goal: tl.tensor
) -> None:
    there = notes.brackets + (row * (ROUNDS + 1) + turn) * BRACKET
    for place in tl.static_range(BRACKET):
        tl.store(there + place, bracket[place])
    tl.store(notes.goals + row * (ROUNDS + 1) + turn, goal)


@triton.jit
def _load_bracket(notes: Notes, row: tl.tensor, turn: tl.tensor) -> tl.tensor:
    there = notes.brackets + (row * (ROUNDS + 1) + turn) * BRACKET
    low, high, count = tl.load(there), tl.load(there + 1), tl.load(there + 2)
    bracket = (low, high, count, tl.load(there + 3), tl.load(there + 4))
    return bracket, tl.load(notes.goals + row * (ROUNDS + 1) + turn)


@triton.jit
def _narrow_row(
    look: Look,
    notes: Notes,
    row: tl.tensor,
    vocab_size: tl.tensor,
    TURN: tl.constexpr,
    ROOM: tl.constexpr,
    PIECES: tl.constexpr,
) -> tl.tensor:
    """The bracket and the goal before this turn, from the last one's measures.

    Every program of a row finds them for itself; one writes them down for the next turn.
    """
    if TURN == 0:
        bracket, goal = _load_bracket(notes, row, 0)
    else:
        bracket, goal = _load_bracket(notes, row, TURN - 1)
        if is_wide(bracket, ROOM):
            cuts = _cuts_of(bracket, TURN - 1)
            num_pieces = tl.num_programs(1)
            pieces = tl.arange(0, PIECES)
            start = (row * ROUNDS + TURN - 1) * num_pieces
            cells = (start + pieces[:, None]) * CUTS + tl.arange(0, CUTS)[None, :]
            there = (pieces < num_pieces)[:, None] & (cells >= 0)
            counts = tl.sum(tl.load(notes.counts + cells, mask=there, other=0), 0)
            weights = tl.sum(tl.load(notes.weights + cells, mask=there, other=0), 0)
            slot = tl.load(look.owner + row)
            share, by_count = (
                tl.load(look.top_p + slot),
                tl.load(look.top_k + slot) < vocab_size,
            )
            bracket, goal = narrow(bracket, goal, share, by_count, cuts, counts, weights)
        if tl.program_id(1) == 0:
            _store_bracket(notes, row, TURN, bracket, goal)
    return bracket, goal


@triton.jit
def _cuts_of(bracket: tl.tensor, TURN: tl.constexpr) -> tl.tensor:
    return first_cuts(bracket[0]) if TURN == 0 else next_cuts(bracket[0], bracket[1])


@triton.jit
def _weigh(
    look: Look,
    notes: Notes,
    vocab_size: tl.tensor,
    SUB: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCKS: tl.constexpr,
    ROOM: tl.constexpr,
    PIECES: tl.constexpr,
    BLOCK: tl.constexpr,
    TURN: tl.constexpr,
    WIDTH: tl.constexpr,
    MASKED: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    if tl.load(notes.mode + row) == WEIGHS:
        bracket, _ = _narrow_row(look, notes, row, vocab_size, TURN, ROOM, PIECES)
        if is_wide(bracket, ROOM):
            start = tl.program_id(1) * (SUB * PARTS * BLOCKS)
            end = tl.minimum(start + SUB * PARTS * BLOCKS, vocab_size)
            peak, cuts = tl.load(notes.peak + row), _cuts_of(bracket, TURN)
            counts, weights = measure(
                look, row, peak, cuts, start, end, vocab_size, BLOCK, WIDTH, MASKED
            )
            place = (row * ROUNDS + TURN) * tl.num_programs(1) + tl.program_id(1)
            cells = place * CUTS + tl.arange(0, CUTS)
            tl.store(notes.counts + cells, counts)
            tl.store(notes.weights + cells, weights)


@triton.jit
def _gather(
    look: Look,
    notes: Notes,
    vocab_size: tl.tensor,
    SUB: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCKS: tl.constexpr,
    ROOM: tl.constexpr,
    PIECES: tl.constexpr,
    WIDTH: tl.constexpr,
    MASKED: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    mode = tl.load(notes.mode + row)
    low = (tl.load(notes.last + row) >> 32).to(tl.int64)
    high = low * 0 + 1
    fits = mode == PICKS
    if mode == WEIGHS:
        bracket, _ = _narrow_row(look, notes, row, vocab_size, ROUNDS, ROOM, PIECES)
        low, high = bracket[0], bracket[1]
        fits = bracket[4] <= ROOM
    if fits:
        num_blocks = tl.cdiv(vocab_size, SUB * PARTS)
        peak = tl.load(notes.peak + row)
        first = tl.program_id(1) * BLOCKS
        for block in range(first, tl.minimum(first + BLOCKS, num_blocks)):
            parts = (row * num_blocks + block) * PARTS + tl.arange(0, PARTS)
            highest = tl.max(tl.load(notes.maxima + parts), 0)
            if order(scale(look, row, highest, peak)) >= low:
                ids = block * (SUB * PARTS) + tl.arange(0, SUB * PARTS)
                keys = order(load_scaled(look, row, ids, peak, vocab_size, WIDTH, MASKED))
                wanted = (keys >= low) & (keys < high) & (ids < vocab_size)
                ranks = tl.cumsum(wanted.to(tl.int32), 0)
                start = tl.atomic_add(notes.num_found + row, tl.max(ranks, 0))
                places = start + ranks - 1
                cells = notes.found + row * ROOM + places
                tl.store(cells, pack(keys, ids), mask=wanted & (places < ROOM))


@triton.jit
def _pick(
    look: Look,
    notes: Notes,
    drawn: rule.Draw,
    vocab_size: tl.tensor,
    ROOM: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    mode = tl.load(notes.mode + row)
    if (mode == PICKS) | (mode == WEIGHS):
        slot = tl.load(look.owner + row)
        top_k, top_p = tl.load(look.top_k + slot), tl.load(look.top_p + slot)
        count = tl.load(notes.num_found + row)
        rooms = tl.arange(0, ROOM)
        found = tl.load(notes.found + row * ROOM + rooms, mask=rooms < count, other=NOTHING)
        is_real = found != NOTHING
        scaled = value_of(key_of(found))
        if mode == WEIGHS:
            bracket, goal = _load_bracket(notes, row, ROUNDS)
            if bracket[4] > ROOM:
                tl.store(notes.mode + row, SEARCHES)
            else:
                by_count = top_k < vocab_size
                each = tl.where(by_count, is_real.to(tl.int64), weigh(scaled))
                before = tl.where(by_count, bracket[2], bracket[3])
                last = find_last(found, tl.where(is_real, each, 0), before, goal)
                tl.store(notes.last + row, last)
                tl.store(notes.mode + row, CONTESTS)
        elif count > ROOM:
            tl.store(notes.mode + row, SEARCHES)
        else:
            nothing = tl.full([], 0, tl.int64)
            goal = tl.minimum(top_k, count).to(tl.float64)
            last = find_last(found, is_real.to(tl.int64), nothing, goal)
            if top_p < 1.0:
                weights = tl.where(found >= last, weigh(scaled), 0)
                goal = tl.sum(weights, 0).to(tl.float64) * top_p
                last = find_last(found, weights, nothing, goal)
            ids = id_of(found)
            rivals = order(scaled + gumbel(random_bits(tl.load(notes.key + row), ids)))
            winner = tl.max(tl.where(is_real & (found >= last), pack(rivals, ids), NOTHING), 0)
            tl.store(drawn.tokens + row, id_of(winner).to(tl.int64))


@triton.jit
def _search(
    look: Look,
    notes: Notes,
    vocab_size: tl.tensor,
    ROOM: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    MASKED: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    if tl.load(notes.mode + row) == SEARCHES:
        peak = tl.load(notes.peak + row)
        found = notes.found + row * ROOM
        last = search_row(look, row, peak, found, vocab_size, ROOM, BLOCK, WIDTH, MASKED)
        tl.store(notes.last + row, last)
        tl.store(notes.mode + row, CONTESTS)


@triton.jit
def _contest(
    look: Look,
    notes: Notes,
    vocab_size: tl.tensor,
    SUB: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCKS: tl.constexpr,
    WIDTH: tl.constexpr,
    MASKED: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    if tl.load(notes.mode + row) == CONTESTS:
        num_blocks = tl.cdiv(vocab_size, SUB * PARTS)
        peak = tl.load(notes.peak + row)
        last = tl.load(notes.last + row)
        key = tl.load(notes.key + row)
        to_beat = tl.load(notes.noise + row)
        best = tl.full([], NOTHING, tl.int64)
        first = tl.program_id(1) * BLOCKS
        for block in range(first, tl.minimum(first + BLOCKS, num_blocks)):
            parts = (row * num_blocks + block) * PARTS + tl.arange(0, PARTS)
            highest = tl.max(tl.load(notes.maxima + parts), 0)
            if order(scale(look, row, highest, peak)) >= key_of(last):
                ids = block * (SUB * PARTS) + tl.arange(0, SUB * PARTS)
                scaled = load_scaled(look, row, ids, peak, vocab_size, WIDTH, MASKED)
                kept = (pack(order(scaled), ids) >= last) & (ids < vocab_size)
                bits = random_bits(key, ids)
                # noise >= y only if v <= -log(1 - v) <= exp(-y), v being the bits as a fraction
                bound = tl.exp(scaled - to_beat) * (1.01 * 2.0**NUM_BITS) + 1.0
                kept = kept & (bits.to(tl.float32) <= bound)
                if tl.max(kept.to(tl.int32), 0) > 0:
                    rivals = pack(order(scaled + gumbel(bits)), ids)
                    best = tl.maximum(best, tl.max(tl.where(kept, rivals, NOTHING), 0))
        tl.store(notes.best + row * tl.num_programs(1) + tl.program_id(1), best)


@triton.jit
def _conclude(
    look: Look,
    notes: Notes,
    drawn: rule.Draw,
    vocab_size: tl.tensor,
    num_pieces: tl.tensor,
    SUB: tl.constexpr,
    PARTS: tl.constexpr,
    WHOLE: tl.constexpr,
    PIECES: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(drawn.tokens + row)
    if tl.load(notes.mode + row) == CONTESTS:
        pieces = tl.arange(0, PIECES)
        best = notes.best + row * num_pieces + pieces
        winner = tl.max(tl.load(best, mask=pieces < num_pieces, other=NOTHING), 0)
        # Nobody wins only where logits differ by less than a normal float: the likeliest stays.
        token = tl.where(winner == NOTHING, token, id_of(winner).to(tl.int64))
        tl.store(drawn.tokens + row, token)
    logit = load_raw(look, row, tl.maximum(token, 0), vocab_size)
    tl.store(drawn.logit + row, tl.where(token >= 0, logit, float("-inf")))
    tops = tl.arange(0, TOP_BLOCK)
    num_top = tl.where(token >= 0, tl.load(look.num_top + tl.load(look.owner + row)), 0)
    top_ids = drawn.top_ids + row * MAX_TOP + tops
    top_logits = drawn.top_logits + row * MAX_TOP + tops
    ids, logits = (
        tl.full([TOP_BLOCK], -1, tl.int64),
        tl.full([TOP_BLOCK], float("-inf"), tl.float32),
    )
    if num_top > 0:
        ids, logits = _find_top(look, notes, row, num_top, vocab_size, SUB, PARTS, WHOLE)
    tl.store(top_ids, ids, mask=tops < MAX_TOP)
    tl.store(top_logits, logits, mask=tops < MAX_TOP)


@triton.jit
def _find_top(
    look: Look,
    notes: Notes,
    row: tl.tensor,
    num_top: tl.tensor,
    vocab_size: tl.tensor,
    SUB: tl.constexpr,
    PARTS: tl.constexpr,
    WHOLE: tl.constexpr,
) -> tl.tensor:
    """The likeliest ids and their logits, [TOP_BLOCK] each."""
    tops = tl.arange(0, TOP_BLOCK)
    top_ids = tl.full([TOP_BLOCK], -1, tl.int64)
    top_logits = tl.full([TOP_BLOCK], float("-inf"), tl.float32)
    num_parts = tl.cdiv(vocab_size, SUB * PARTS) * PARTS
    places = tl.arange(0, WHOLE * PARTS)
    there = places < num_parts
    lowest = order(tl.full([], float("-inf"), tl.float32))
    raw = tl.load(notes.raw_maxima + row * num_parts + places, mask=there, other=float("-inf"))
    keys = order(raw)  # of every part's best token that is not taken yet
    last = tl.full([], 0x7FFFFFFFFFFFFFFF, tl.int64)
    for number in range(num_top):
        part = tl.min(tl.where(keys == tl.max(keys, 0), places, LARGEST_INT), 0)
        ids = part * SUB + tl.arange(0, SUB)
        logits = load_raw(look, row, ids, vocab_size)
        packed = tl.where(ids < vocab_size, pack(order(logits), ids), NOTHING)
        taken = tl.max(tl.where(packed < last, packed, NOTHING), 0)
        is_real = key_of(taken) > lowest
        logit = tl.max(tl.where(packed == taken, logits, float("-inf")), 0)
        here = (tops == number) & is_real
        top_ids = tl.where(here, id_of(taken).to(tl.int64), top_ids)
        top_logits = tl.where(here, logit, top_logits)
        left = key_of(tl.max(tl.where(packed < taken, packed, NOTHING), 0))
        keys = tl.where(places == part, tl.maximum(left, lowest), keys)
        last = taken
    return top_ids, top_logits
