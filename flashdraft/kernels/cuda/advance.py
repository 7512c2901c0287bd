# Triton's decorators carry no types that mypy can see.
# mypy: disallow-untyped-decorators=False
"""How slots go on behind a step (kernels/advance.py), as one launch: a program for each slot.

In torch it is some sixty launches of a few numbers each, which a small model's step feels.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from flashdraft.kernels.advance import SlotStates, Verified, depth_of
from flashdraft.kernels.draw import rule
from flashdraft.kernels.nodes import TreeNodes
from flashdraft.kernels.tree import TAKEN as TAKEN_BEHIND

PENALISED = tl.constexpr(rule.PENALISED)
TAKEN = tl.constexpr(TAKEN_BEHIND)


def advance(
    slots: SlotStates, step: Verified, lines: Tensor, history: Tensor | None, is_given: bool
) -> None:
    """`Kernels.advance`."""
    num_nodes, num_stops = step.num_nodes, slots.stops.shape[1]
    max_depth = depth_of(lines, num_nodes)
    decided = step.samples if step.decided is None else step.decided  # unread where nobody did
    tensors = (*slots, *step.nodes, step.samples, step.query_start, step.sources, decided, lines)
    assert all(one.is_contiguous() for one in tensors)
    _advance[(slots.anchors.shape[0],)](
        slots,
        step.nodes,
        decided,
        step.samples,
        step.query_start,
        step.sources,
        lines,
        lines if history is None else history,  # unread without
        0 if history is None else history.stride(0),
        0 if history is None else history.shape[1] - 1,
        slots.facts.shape[-1],
        NODES=num_nodes,
        ROWS=triton.next_power_of_2(1 + num_nodes),
        DEPTH=max_depth,
        SPOKEN=triton.next_power_of_2(1 + max_depth),
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
    nodes: TreeNodes,
    decided: tl.tensor,
    samples: tl.tensor,
    query_start: tl.tensor,
    sources: tl.tensor,
    lines: tl.tensor,
    history: tl.tensor,
    history_stride: tl.tensor,
    history_end: tl.tensor,
    vocab_size: tl.tensor,
    NODES: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    SPOKEN: tl.constexpr,
    NUM_STOPS: tl.constexpr,
    STOPS: tl.constexpr,
    HAS_HISTORY: tl.constexpr,
    IS_GIVEN: tl.constexpr,
    IS_DECIDED: tl.constexpr,
) -> None:
    slot = tl.program_id(0)
    start = tl.load(query_start + slot).to(tl.int64)
    num_rows = tl.load(query_start + slot + 1).to(tl.int64) - start
    row = tl.arange(0, ROWS)
    node, there = slot * NODES + row - 1, (row > 0) & (row <= NODES)
    depth = tl.load(nodes.depths + node, mask=there, other=0)
    parent = tl.load(nodes.parents + node, mask=there, other=0)
    token = tl.load(nodes.tokens + node, mask=there, other=0)
    ancestors = tl.load(nodes.ancestors + node, mask=there, other=1)
    confidence = tl.load(nodes.confidence + node, mask=there, other=0.0)
    length = tl.load(slots.lengths + slot)

    # which nodes count: rows that belong to nobody are somebody's
    verified = tl.maximum(num_rows - 1, 0)
    if not IS_GIVEN:
        room = tl.load(slots.ends + slot) - length
        goes_on = ((confidence > 0) & (depth <= room - TAKEN)) | (row == 0)
        drafted = tl.min(tl.where(goes_on, ROWS, row), 0).to(tl.int64) - 1
        limit = tl.load(slots.limits + slot)
        verified = tl.minimum(tl.minimum(verified, drafted), tl.maximum(room - 1, 0))
        verified = tl.where(limit < 0, verified, tl.minimum(verified, limit))
    is_node = there & (row <= verified)
    # a row beyond the last one reads nobody's, which stand behind
    spoken = tl.load(samples + start + row, mask=row <= NODES, other=-1)
    if IS_DECIDED:
        word = tl.load(decided + slot)
    else:
        wanted = tl.load(samples + start + parent, mask=is_node, other=-1)
        agreed = is_node & (wanted == token)
        one = tl.full((ROWS,), 1, tl.int64)
        word = 1 + tl.sum(tl.where(agreed, one << row.to(tl.int64), 0), 0)
    is_kept = is_node & ((ancestors & ~word) == 0)
    accepted = tl.sum(is_kept.to(tl.int64), 0)
    on_path = is_kept | (row == 0)
    bonus = tl.sum(tl.where(on_path & (depth == accepted), spoken, 0), 0)

    line = lines + slot * (4 + 2 * (1 + DEPTH) + 3 * NODES)
    tl.store(line, accepted)
    tl.store(line + 1, verified)
    tl.store(line + 2, num_rows)
    tl.store(line + 3, tl.load(sources + slot))
    path, place = line + 5 + DEPTH, tl.arange(0, SPOKEN)
    is_behind = (place > accepted) & (place <= DEPTH)
    tl.store(line + 4 + place, tl.full((SPOKEN,), -1, tl.int64), mask=is_behind)
    tl.store(path + place, tl.zeros((SPOKEN,), tl.int64), mask=is_behind)
    tl.store(line + 4 + depth, spoken, mask=on_path)
    tl.store(path + depth, row.to(tl.int64), mask=on_path)
    told = path + 1 + DEPTH + row - 1
    tl.store(told, token, mask=there)
    tl.store(told + NODES, parent, mask=there)
    source = tl.load(nodes.sources + node, mask=there, other=0).to(tl.int64)
    words = confidence.to(tl.int32, bitcast=True).to(tl.int64) + (source << 32)
    tl.store(told + 2 * NODES, words, mask=there)

    is_alive = tl.load(slots.alive + slot) > 0
    num_kept = tl.where(is_alive, accepted + 1, 0)
    counts = (tl.load(slots.flags + slot) & PENALISED) != 0
    is_counted = (depth < tl.where(counts, num_kept, 0)) & on_path
    is_counted &= (spoken >= 0) & (spoken < vocab_size)
    cells = slots.facts + slot.to(tl.int64) * vocab_size + spoken
    tl.atomic_add(cells, 1, mask=is_counted)  # of integers: in any order
    if HAS_HISTORY:
        where = length + depth
        said = history + slot.to(tl.int64) * history_stride + where
        tl.store(
            said, spoken.to(tl.int32), mask=on_path & (depth < num_kept) & (where < history_end)
        )
    # where there is no token the host ends the request
    tl.store(slots.anchors + slot, tl.maximum(bonus, 0), mask=is_alive)
    length = length + num_kept.to(tl.int32)
    tl.store(slots.lengths + slot, length)
    if not IS_GIVEN:
        number = tl.arange(0, STOPS)
        stops = tl.load(slots.stops + slot * NUM_STOPS + number, mask=number < NUM_STOPS, other=-2)
        position = length - accepted + depth
        may_stop = on_path & (position >= tl.load(slots.stops_from + slot))
        hits = (spoken[:, None] == stops[None, :]) & may_stop[:, None]
        is_over = (tl.max(tl.max(hits.to(tl.int32), 1), 0) > 0) | (
            length + 1 >= tl.load(slots.ends + slot)
        )
        tl.store(slots.alive + slot, (is_alive & (is_over == 0)).to(tl.int32))
