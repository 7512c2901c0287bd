# Triton's decorators carry no types that mypy can see.
# mypy: disallow-untyped-decorators=False
"""The draw of many rows at once, each by its own slot's settings (kernels/draw/rule.py). CUDA only.

Seven launches, whatever the rows want; a program with nothing to do for its row ends at once.

1. `_scan` reads the logits: the largest of every part of SUB tokens, raw and adjusted, and the sum
   of powers. For greedy rows this is all.
2. `_settle` puts a row's parts together, and decides how it goes on. With a small top-k, the k-th
   largest of the parts' largest is a value that at least k tokens reach, and seldom many more.
3. `_gather` writes down who reaches it, skipping the parts in which nobody does.
4. `_pick` filters and draws among them. Should they be too many for their room,
5. `_search` finds the last token that is kept by looking at the row several times (search.py); so
   it does for a large top-k, and for top-p alone.
6. `_contest` draws from a whole row down to its last token. Only where a token's random bits let it
   beat the likeliest one's noise is its own computed.
7. `_conclude` puts a row's winners together, and finds its likeliest tokens for log-probabilities:
   the best part's best, again and again.

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
    least_key,
    load_raw,
    load_scaled,
    make_look,
    scale,
)
from flashdraft.kernels.cuda.draw.search import find_last, search_row
from flashdraft.kernels.cuda.overlap import overlap, wait
from flashdraft.kernels.draw import arithmetic, rule

MAX_TOP = tl.constexpr(rule.MAX_TOP)
TOP_BLOCK = tl.constexpr(triton.next_power_of_2(rule.MAX_TOP))
DONE, PICKS, SEARCHES, CONTESTS = (tl.constexpr(mode) for mode in range(4))
LARGEST_INT = tl.constexpr(2**31 - 1)
NUM_BITS = tl.constexpr(arithmetic.NUM_BITS)


class DrawPlan(NamedTuple):
    """How a row is cut."""

    sub: int = 256  # tokens in a part
    parts: int = 8  # in a block, which is what a program looks at together
    blocks: int = 4  # in a piece, which is what a program has to do
    room: int = 1024  # tokens written down for `_pick`, and by `_search`
    max_picked: int = 256  # the largest top_k that is picked from gathered tokens
    search_block: int = 1024

    @property
    def block(self) -> int:
        return self.sub * self.parts


PLAN = DrawPlan()


class Notes(NamedTuple):
    """What the kernels tell each other, [rows] each unless said otherwise."""

    maxima: Tensor  # [rows, parts] float32, of adjusted logits
    raw_maxima: Tensor  # [rows, parts] float32
    sums: Tensor  # [rows, blocks] float32: of exp(raw - the block's largest)
    peak: Tensor  # float32: the largest adjusted logit
    noise: Tensor  # float32: of the first token that has it
    key: Tensor  # int64: of the row's noise
    mode: Tensor  # int32
    last: Tensor  # int64: the last token that may be drawn, packed
    num_found: Tensor  # int32: tokens written to `found`
    found: Tensor  # [rows, room] int64, packed
    best: Tensor  # [rows, pieces] int64: the winners, packed


def draw(
    logits: Tensor, settings: rule.SlotSettings, rows: rule.DrawnRows, plan: DrawPlan = PLAN
) -> rule.Draw:
    """`Kernels.draw`."""
    num_rows, vocab_size = logits.shape
    drawn = _make_draw(num_rows, logits.device)
    if num_rows == 0:
        return drawn
    num_blocks = triton.cdiv(vocab_size, plan.block)
    num_pieces = triton.cdiv(num_blocks, plan.blocks)
    notes = _make_notes(num_rows, num_blocks, num_pieces, plan, logits.device)
    look = make_look(logits.contiguous(), settings, rows)
    follows = rows.followed is not None and rows.place is not None
    shared: dict[str, Any] = {
        "WIDTH": rows.followed.shape[1] if follows and rows.followed is not None else 0,
        "MASKED": rows.masks is not None,
        **overlap(logits),
        **UNFUSED,
        "num_warps": 4,
    }
    cut = {"SUB": plan.sub, "PARTS": plan.parts}
    pieces, each = (num_rows, num_pieces), (num_rows,)
    whole = triton.next_power_of_2(num_blocks)
    _scan[pieces](look, notes, vocab_size, **cut, BLOCKS=plan.blocks, **shared)
    _settle[each](
        look, notes, drawn, vocab_size, **cut, WHOLE=whole, MAX_PICKED=plan.max_picked, **shared
    )
    _gather[pieces](look, notes, vocab_size, **cut, BLOCKS=plan.blocks, ROOM=plan.room, **shared)
    _pick[each](look, notes, drawn, ROOM=plan.room, **_without_look(shared))
    _search[each](
        look,
        notes,
        vocab_size,
        ROOM=plan.room,
        BLOCK=plan.search_block,
        **shared | {"num_warps": 8},
    )
    _contest[pieces](look, notes, vocab_size, **cut, BLOCKS=plan.blocks, **shared)
    _conclude[each](
        look,
        notes,
        drawn,
        vocab_size,
        num_pieces,
        **cut,
        WHOLE=whole,
        PIECES=triton.next_power_of_2(num_pieces),
        **_without_look(shared),
    )
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
        sums=make(torch.float32, num_blocks),
        peak=make(torch.float32),
        noise=make(torch.float32),
        key=make(torch.int64),
        mode=make(torch.int32),
        last=make(torch.int64),
        num_found=make(torch.int32),
        found=make(torch.int64, plan.room),
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
    WIDTH: tl.constexpr,
    MASKED: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    num_blocks = tl.cdiv(vocab_size, SUB * PARTS)
    first = tl.program_id(1) * BLOCKS
    for block in range(first, tl.minimum(first + BLOCKS, num_blocks)):
        parts = block * PARTS + tl.arange(0, PARTS)
        ids = parts[:, None] * SUB + tl.arange(0, SUB)[None, :]
        raw = load_raw(look, row, ids, vocab_size)
        raw_maxima = tl.max(raw, 1)
        x = adjust(look, row, raw, ids, vocab_size, WIDTH, MASKED)
        places = row * num_blocks * PARTS + parts
        tl.store(notes.raw_maxima + places, raw_maxima)
        tl.store(notes.maxima + places, tl.max(x, 1))
        peak = tl.max(raw_maxima, 0)
        powers = tl.exp(raw - tl.where(tl.abs(peak) == float("inf"), 0.0, peak))
        tl.store(notes.sums + row * num_blocks + block, tl.sum(tl.sum(powers, 1), 0))


@triton.jit
def _settle(
    look: Look,
    notes: Notes,
    drawn: rule.Draw,
    vocab_size: tl.tensor,
    SUB: tl.constexpr,
    PARTS: tl.constexpr,
    WHOLE: tl.constexpr,
    MAX_PICKED: tl.constexpr,
    WIDTH: tl.constexpr,
    MASKED: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    num_blocks = tl.cdiv(vocab_size, SUB * PARTS)
    num_parts = num_blocks * PARTS
    blocks = tl.arange(0, WHOLE)
    places = blocks[:, None] * PARTS + tl.arange(0, PARTS)[None, :]
    there = places < num_parts
    start = row * num_parts
    maxima = tl.load(notes.maxima + start + places, mask=there, other=float("-inf"))
    raw = tl.load(notes.raw_maxima + start + places, mask=there, other=float("-inf"))
    sums = tl.load(notes.sums + row * num_blocks + blocks, mask=blocks < num_blocks, other=0.0)
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
    searches = (top_k < vocab_size) | (tl.load(look.top_p + slot) < 1.0)
    mode = tl.where(picks, PICKS, tl.where(searches, SEARCHES, CONTESTS))
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


@triton.jit
def _gather(
    look: Look,
    notes: Notes,
    vocab_size: tl.tensor,
    SUB: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCKS: tl.constexpr,
    ROOM: tl.constexpr,
    WIDTH: tl.constexpr,
    MASKED: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    if tl.load(notes.mode + row) == PICKS:
        num_blocks = tl.cdiv(vocab_size, SUB * PARTS)
        peak = tl.load(notes.peak + row)
        lowest = key_of(tl.load(notes.last + row))
        first = tl.program_id(1) * BLOCKS
        for block in range(first, tl.minimum(first + BLOCKS, num_blocks)):
            parts = (row * num_blocks + block) * PARTS + tl.arange(0, PARTS)
            highest = tl.max(tl.load(notes.maxima + parts), 0)
            if order(scale(look, row, highest, peak)) >= lowest:
                ids = block * (SUB * PARTS) + tl.arange(0, SUB * PARTS)
                keys = order(load_scaled(look, row, ids, peak, vocab_size, WIDTH, MASKED))
                reach = (keys >= lowest) & (ids < vocab_size)
                ranks = tl.cumsum(reach.to(tl.int32), 0)
                start = tl.atomic_add(notes.num_found + row, tl.max(ranks, 0))
                places = start + ranks - 1
                cells = notes.found + row * ROOM + places
                tl.store(cells, pack(keys, ids), mask=reach & (places < ROOM))


@triton.jit
def _pick(
    look: Look, notes: Notes, drawn: rule.Draw, ROOM: tl.constexpr, PDL: tl.constexpr
) -> None:
    wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    mode = tl.load(notes.mode + row)
    count = tl.load(notes.num_found + row)
    if (mode == PICKS) & (count > ROOM):
        tl.store(notes.mode + row, SEARCHES)
    if (mode == PICKS) & (count <= ROOM):
        slot = tl.load(look.owner + row)
        rooms = tl.arange(0, ROOM)
        found = tl.load(notes.found + row * ROOM + rooms, mask=rooms < count, other=NOTHING)
        is_real = found != NOTHING
        scaled = value_of(key_of(found))
        goal = tl.minimum(tl.load(look.top_k + slot), count).to(tl.float64)
        nothing = tl.full([], 0, tl.int64)
        last = find_last(found, is_real.to(tl.int64), nothing, goal)
        top_p = tl.load(look.top_p + slot)
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
    PDL: tl.constexpr,
) -> None:
    wait(PDL)
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
    PDL: tl.constexpr,
) -> None:
    wait(PDL)
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
    PDL: tl.constexpr,
) -> None:
    wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(drawn.tokens + row)
    if tl.load(notes.mode + row) == CONTESTS:
        pieces = tl.arange(0, PIECES)
        best = notes.best + row * num_pieces + pieces
        winner = tl.max(tl.load(best, mask=pieces < num_pieces, other=NOTHING), 0)
        token = id_of(winner).to(tl.int64)
        tl.store(drawn.tokens + row, token)
    place = row * vocab_size + tl.maximum(token, 0)
    logit = tl.load(look.logits + place).to(tl.float32)
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
