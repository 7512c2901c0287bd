# Triton's decorators carry no types that mypy can see.
# mypy: disallow-untyped-decorators=False
"""How slots go on behind a step (kernels/advance.py), as one launch: a program for each slot.

In torch it is some sixty launches of a few numbers each, which a small model's step feels.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from flashdraft.kernels.advance import SlotStates, Verified, num_columns
from flashdraft.kernels.draw import rule

PENALISED = tl.constexpr(rule.PENALISED)


class _Step(NamedTuple):
    """`Verified`, flat; the last three are unread where nobody decided."""

    samples: Tensor
    tokens: Tensor
    query_start: Tensor
    drafts: Tensor
    confidence: Tensor
    sources: Tensor
    accepted: Tensor
    bonus: Tensor
    drawn: Tensor


def advance(
    slots: SlotStates, step: Verified, lines: Tensor, history: Tensor | None, is_given: bool
) -> None:
    """`Kernels.advance`."""
    width, num_stops = step.width, slots.stops.shape[1]
    decided = [step.samples] * 3
    if step.decided is not None:
        decided = [*step.decided.acceptance, step.decided.drawn]
    flat = _Step(*step[:-1], *decided)
    assert all(one.is_contiguous() for one in (*slots, *flat, lines))
    _advance[(slots.anchors.shape[0],)](
        slots,
        flat,
        lines,
        lines if history is None else history,  # unread without
        0 if history is None else history.stride(0),
        0 if history is None else history.shape[1] - 1,
        slots.facts.shape[-1],
        WIDTH=width,
        COLUMNS=num_columns(width),
        SPOKEN=triton.next_power_of_2(1 + width),
        NUM_STOPS=num_stops,
        STOPS=triton.next_power_of_2(num_stops),
        HAS_HISTORY=history is not None,
        IS_GIVEN=is_given,
        IS_DECIDED=step.decided is not None,
        num_warps=1,
    )


@triton.jit
def _advance(
    slots: SlotStates,
    step: _Step,
    lines: tl.tensor,
    history: tl.tensor,
    history_stride: tl.tensor,
    history_end: tl.tensor,
    vocab_size: tl.tensor,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPOKEN: tl.constexpr,
    NUM_STOPS: tl.constexpr,
    STOPS: tl.constexpr,
    HAS_HISTORY: tl.constexpr,
    IS_GIVEN: tl.constexpr,
    IS_DECIDED: tl.constexpr,
) -> None:
    slot = tl.program_id(0)
    start = tl.load(step.query_start + slot).to(tl.int64)
    num_rows = tl.load(step.query_start + slot + 1).to(tl.int64) - start
    verified = tl.maximum(num_rows - 1, 0)
    place = tl.arange(0, SPOKEN)
    drafted = place < WIDTH
    spoken = tl.load(step.samples + start + place, mask=place <= WIDTH, other=-1)
    if IS_DECIDED:
        accepted = tl.maximum(tl.load(step.accepted + slot), 0)
        bonus = tl.load(step.bonus + slot)
    else:
        behind = place < verified
        tokens = tl.load(step.tokens + start + 1 + place, mask=behind, other=-2)
        # the first place where the target says something else, or nothing was drafted
        accepted = tl.min(tl.where(behind & (spoken == tokens), SPOKEN, place), 0).to(tl.int64)
        bonus = tl.load(step.samples + start + accepted)
    confidence = tl.load(step.confidence + slot * WIDTH + place, mask=drafted, other=0.0)
    if WIDTH > 0 and not IS_GIVEN:
        # rows that belong to nobody are somebody's: they count for nothing
        most = tl.min(tl.where(confidence > 0, WIDTH, tl.minimum(place, WIDTH)), 0).to(tl.int64)
        limit = tl.load(slots.limits + slot)
        most = tl.where(limit < 0, most, tl.minimum(most, limit))
        verified = tl.minimum(verified, most)
        is_cut = accepted > verified
        accepted = tl.minimum(accepted, verified)
        agreed, own = (
            tl.load(step.samples + start + accepted),
            tl.load(step.drawn + start + accepted),
        )
        bonus = tl.where(is_cut, own, agreed)
    spoken = tl.where(place == accepted, bonus, spoken)
    line = lines + slot * COLUMNS
    tl.store(line, accepted)
    tl.store(line + 1, verified)
    tl.store(line + 2, num_rows)
    tl.store(line + 3, tl.load(step.sources + slot))
    tl.store(line + 4 + place, spoken, mask=place <= WIDTH)
    drafts = tl.load(step.drafts + slot * WIDTH + place, mask=drafted, other=0)
    tl.store(line + 5 + WIDTH + place, drafts, mask=drafted)
    words = confidence.to(tl.int32, bitcast=True).to(tl.int64)
    tl.store(line + 5 + 2 * WIDTH + place, words, mask=drafted)
    is_alive = tl.load(slots.alive + slot) > 0
    num_kept = tl.where(is_alive, accepted + 1, 0)
    counts = (tl.load(slots.flags + slot) & PENALISED) != 0
    is_counted = (place < tl.where(counts, num_kept, 0)) & (spoken >= 0) & (spoken < vocab_size)
    cells = slots.facts + slot.to(tl.int64) * vocab_size + spoken
    tl.atomic_add(cells, 1, mask=is_counted)  # of integers: in any order
    length = tl.load(slots.lengths + slot)
    if HAS_HISTORY:
        there = length + place
        told = history + slot.to(tl.int64) * history_stride + there
        tl.store(told, spoken.to(tl.int32), mask=(place < num_kept) & (there < history_end))
    # where there is no token the host ends the request
    tl.store(slots.anchors + slot, tl.maximum(bonus, 0), mask=is_alive)
    length = length + num_kept.to(tl.int32)
    tl.store(slots.lengths + slot, length)
    if not IS_GIVEN:
        number = tl.arange(0, STOPS)
        stops = tl.load(slots.stops + slot * NUM_STOPS + number, mask=number < NUM_STOPS, other=-2)
        position = length - accepted + place
        may_stop = (place <= accepted) & (position >= tl.load(slots.stops_from + slot))
        hits = (spoken[:, None] == stops[None, :]) & may_stop[:, None]
        is_over = (tl.max(tl.max(hits.to(tl.int32), 1), 0) > 0) | (
            length + 1 >= tl.load(slots.ends + slot)
        )
        tl.store(slots.alive + slot, (is_alive & (is_over == 0)).to(tl.int32))
