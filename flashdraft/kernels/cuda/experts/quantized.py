# Triton's decorators carry no types that mypy can see.
# mypy: disallow-untyped-decorators=False
"""A mixture of experts whose weights stay in few bits, over few rows, in Triton: two launches.

CUDA only. Rows that chose the same expert are gathered into tiles inside the kernels; such a tile
is a *unit*, and every unit reads its expert's weights once. A *pair* is a row and one of its
choices: every pair has a place of its own for what comes out of the second product, and whichever
program of a tile of columns comes last adds a row's pairs in their order. So nothing of a row
depends on the rows beside it, and there is no atomic sum.

What a unit is in a kernel is quantized/units.py's; how a tile of it is multiplied,
quantized/tiles.py's.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashdraft.kernels.cuda.dense.rows import gate
from flashdraft.kernels.cuda.overlap import overlap, wait
from flashdraft.kernels.cuda.quantized.layout import PackedWeight
from flashdraft.kernels.cuda.quantized.tiles import BLOCK_N, describe, multiply_blocks
from flashdraft.kernels.cuda.quantized.units import gather_unit, pick_expert, single_unit
from flashdraft.kernels.kinds import Activation

MAX_ROWS = 64  # in one call
MAX_SPLITS = 8
MIN_STEPS = 4  # of a part of the depth: shorter ones only wait for their first loads
SUM_ROWS = 8  # added at a time by the last program of a tile
UP_REGISTERS = {8: 104, 16: 160, 32: 232}  # of a thread, by rows of a unit: see quantized/linear.py


class QuantizedExpertsPlan(NamedTuple):
    """Launch settings of one mixture."""

    block_m: int  # rows of a unit
    up_splits: int  # parts of the depth of the gate and up product
    up_programs: int
    down_programs: int  # that share the units of a tile of columns
    up_stages: int = 4
    down_stages: int = 4


def plan_quantized_experts(
    num_rows: int,
    num_chosen: int,
    gate_up: PackedWeight,
    down: PackedWeight,
    num_processors: int,
    exact: bool = False,
) -> QuantizedExpertsPlan:
    """Programs that fill the card; the depth is cut only where there are too few of them.

    exact: it is cut alike for any number of rows, which is all that a row's bits could depend on.
    """
    block_m = min(32, max(8, triton.next_power_of_2(num_rows)))
    together = {8: 10, 16: 8, 32: 4}[block_m] * num_processors
    num_blocks = triton.cdiv(down.shape[2], BLOCK_N.value)
    units = _max_units(num_rows, num_chosen, down.shape[0], block_m)
    wanted = 10 * num_processors // (num_blocks * (num_chosen if exact else units))
    num_steps = gate_up.codes.shape[1]
    splits = max(1, min(wanted, num_steps // MIN_STEPS, MAX_SPLITS))
    splits = triton.cdiv(num_steps, triton.cdiv(num_steps, splits))  # none is empty
    num_tiles = down.codes.shape[2] // (2 * BLOCK_N.value)
    return QuantizedExpertsPlan(
        block_m=block_m,
        up_splits=splits,
        up_programs=min(units * num_blocks * splits, together),
        down_programs=min(units, triton.cdiv(together, num_tiles)),
        # One row has few programs: each must ask for more at a time.
        up_stages=6 if num_rows == 1 else 4,
        down_stages=8 if num_rows == 1 else 4,
    )


def mix_quantized(
    x: Tensor,
    gate_up: PackedWeight,
    down: PackedWeight,
    chosen: Tensor,
    weights: Tensor,
    activation: Activation,
    num_processors: int,
    arrivals: Tensor,
    exact: bool = False,
) -> Tensor:
    """`Kernels.experts` for at most MAX_ROWS rows; `arrivals` as in dense.linear.multiply_rows.

    gate_up.shape [num_experts, 2 * inner, hidden], down.shape [num_experts, hidden, inner].
    """
    (num_rows, hidden), num_chosen = x.shape, chosen.shape[1]
    output = torch.empty(num_rows, hidden, device=x.device, dtype=x.dtype)
    if num_rows == 0:
        return output
    num_experts, _, inner = down.shape
    assert num_rows <= MAX_ROWS and x.stride(1) == 1 and chosen.is_contiguous()
    assert gate_up.shape == (num_experts, 2 * inner, hidden) and weights.is_contiguous()
    plan = plan_quantized_experts(num_rows, num_chosen, gate_up, down, num_processors, exact)
    max_units = _max_units(num_rows, num_chosen, num_experts, plan.block_m)
    num_pairs, num_blocks = num_rows * num_chosen, triton.cdiv(inner, BLOCK_N.value)
    tiles = (down.codes.shape[2] // (2 * BLOCK_N.value), plan.down_programs)
    assert arrivals.numel() >= max(tiles[0], max_units * num_blocks)
    between = torch.empty(num_pairs, inner, device=x.device, dtype=x.dtype)
    # The number of units, the expert of each, and its pairs.
    units = torch.empty(1 + max_units * (1 + plan.block_m), device=x.device, dtype=torch.int32)
    up_parts = None
    if plan.up_splits > 1:
        shape = (plan.up_splits, 2, num_pairs, inner)
        up_parts = torch.empty(shape, device=x.device, dtype=torch.float32)
    parts = torch.empty(num_pairs, hidden, device=x.device, dtype=torch.float32)
    sizes = {
        "INNER": inner,
        "HIDDEN": hidden,
        "NUM_CHOSEN": num_chosen,
        "MAX_UNITS": max_units,
        "SINGLE": num_rows == 1,
        "BLOCK_M": plan.block_m,
    }
    _up[(plan.up_programs,)](
        x,
        *gate_up.tensors,
        chosen,
        between,
        up_parts,
        units,
        arrivals,
        num_rows,
        x.stride(0),
        *gate_up.strides,
        gate_up.packed_rows,
        gate_up.num_steps,
        triton.cdiv(gate_up.codes.shape[1], plan.up_splits),
        **sizes,
        NUM_BLOCKS=num_blocks,
        SPLITS=plan.up_splits,
        BLOCK_R=max(8, triton.next_power_of_2(num_rows)),
        BLOCK_C=triton.next_power_of_2(num_chosen),
        BLOCK_E=triton.next_power_of_2(num_experts),
        GELU=activation is Activation.GELU_TANH,
        FORMAT=describe(gate_up),
        **overlap(x),
        num_warps=2,
        num_stages=plan.up_stages,
        maxnreg=UP_REGISTERS[plan.block_m],
    )
    _down[tiles](
        between,
        *down.tensors,
        chosen,
        weights,
        parts,
        units,
        arrivals,
        output,
        num_rows,
        *down.strides,
        down.packed_rows,
        down.num_steps,
        **sizes,
        SUM_ROWS=SUM_ROWS,
        FORMAT=describe(down),
        **overlap(x),
        num_warps=2,
        num_stages=plan.down_stages,
    )
    return output


def _max_units(num_rows: int, num_chosen: int, num_experts: int, block_m: int) -> int:
    """Units that there can be: none is empty, and of every expert only the last is not full."""
    num_pairs = num_rows * num_chosen
    return min(num_pairs, min(num_pairs, num_experts) + num_pairs // block_m)


@triton.jit(do_not_specialize=["num_rows", "split_steps"])
def _up(
    x: tl.tensor,
    codes: tl.tensor,
    high: tl.tensor,
    scale: tl.tensor,
    scale_over: tl.tensor,
    minimum: tl.tensor,
    minimum_over: tl.tensor,
    chosen: tl.tensor,
    between: tl.tensor,
    parts: tl.tensor,
    units: tl.tensor,
    arrivals: tl.tensor,
    num_rows: tl.tensor,
    row_stride: tl.tensor,
    codes_stride: tl.tensor,
    scale_stride: tl.tensor,
    minimum_stride: tl.tensor,
    over_stride: tl.tensor,
    packed_rows: tl.tensor,
    num_steps: tl.tensor,
    split_steps: tl.tensor,
    INNER: tl.constexpr,
    HIDDEN: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
    MAX_UNITS: tl.constexpr,
    SINGLE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_E: tl.constexpr,
    GELU: tl.constexpr,
    FORMAT: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """List the units, then take BLOCK_N columns of them, gate and up, in turns with the others."""
    wait(PDL)
    if SINGLE:
        num_units = NUM_CHOSEN
    else:
        places = tl.arange(0, BLOCK_R)[:, None] * NUM_CHOSEN + tl.arange(0, BLOCK_C)[None, :]
        real = (places < num_rows * NUM_CHOSEN) & (tl.arange(0, BLOCK_C) < NUM_CHOSEN)[None, :]
        # From L2, not L1: that one may be older than this program.
        theirs = tl.load(chosen + places, mask=real, other=-1, cache_modifier=".cg").to(tl.int32)
        every = tl.reshape(theirs, [BLOCK_R * BLOCK_C])
        counts = tl.histogram(tl.maximum(every, 0), BLOCK_E, mask=every >= 0)
        tiles = (counts + BLOCK_M - 1) // BLOCK_M
        ends = tl.cumsum(tiles, 0)
        num_units = tl.sum(tiles, 0)
        if tl.program_id(0) == 0:
            tl.store(units, num_units)
    size = num_rows * NUM_CHOSEN * INNER
    weight = (codes, high, scale, scale_over, minimum, minimum_over)
    strides = (codes_stride, scale_stride, minimum_stride, over_stride)
    for work in range(tl.program_id(0), num_units * (NUM_BLOCKS * SPLITS), tl.num_programs(0)):
        unit = work // (NUM_BLOCKS * SPLITS)
        block = work // SPLITS % NUM_BLOCKS
        split = work % SPLITS
        if SINGLE:
            expert, pairs = single_unit(chosen, unit, BLOCK_M)
        else:
            expert, pairs = gather_unit(
                theirs, tiles, ends, unit, NUM_CHOSEN, BLOCK_M, BLOCK_R, BLOCK_C, BLOCK_E
            )
            if work % (NUM_BLOCKS * SPLITS) == 0:
                tl.store(units + 1 + unit, expert.to(tl.int32))
                tl.store(units + 1 + MAX_UNITS + unit * BLOCK_M + tl.arange(0, BLOCK_M), pairs)
        is_pair = pairs >= 0
        columns = block * BLOCK_N + tl.arange(0, BLOCK_N)
        starts = (block * BLOCK_N, block * BLOCK_N + INNER)
        first = split * split_steps
        end = tl.minimum(first + split_steps, num_steps)
        # Rows beyond INNER are there to be read: both halves together are filled up to a tile.
        gates, ups = multiply_blocks(
            x, row_stride, tl.maximum(pairs, 0) // NUM_CHOSEN, is_pair[:, None],
            pick_expert(weight, strides, expert, FORMAT), starts, packed_rows, HIDDEN, first, end,
            BLOCK_M, BLOCK_N, FORMAT,
        )  # fmt: skip
        place = pairs[None, :] * INNER + columns[:, None]
        is_real = is_pair[None, :] & (columns < INNER)[:, None]
        dtype: tl.constexpr = between.dtype.element_ty
        if SPLITS == 1:
            tl.store(between + place, gate(gates, ups, dtype, GELU).to(dtype), mask=is_real)
        else:
            here = parts + 2 * split * size + place
            tl.store(here, gates, mask=is_real, cache_modifier=".cg")
            tl.store(here + size, ups, mask=is_real, cache_modifier=".cg")
            tl.debug_barrier()  # all of this program's part is written before it is counted
            counter = arrivals + unit * NUM_BLOCKS + block
            if tl.atomic_add(counter, 1, sem="acq_rel") == SPLITS - 1:
                all_gates = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
                all_ups = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
                for i in tl.static_range(SPLITS):
                    there = parts + 2 * i * size + place
                    all_gates += tl.load(there, mask=is_real, other=0.0, cache_modifier=".cg")
                    all_ups += tl.load(there + size, mask=is_real, other=0.0, cache_modifier=".cg")
                gated = gate(all_gates, all_ups, dtype, GELU)
                tl.store(between + place, gated.to(dtype), mask=is_real)
                tl.atomic_xchg(counter, 0)  # ready for the next call


@triton.jit(do_not_specialize=["num_rows"])
def _down(
    between: tl.tensor,
    codes: tl.tensor,
    high: tl.tensor,
    scale: tl.tensor,
    scale_over: tl.tensor,
    minimum: tl.tensor,
    minimum_over: tl.tensor,
    chosen: tl.tensor,
    weights: tl.tensor,
    parts: tl.tensor,
    units: tl.tensor,
    arrivals: tl.tensor,
    output: tl.tensor,
    num_rows: tl.tensor,
    codes_stride: tl.tensor,
    scale_stride: tl.tensor,
    minimum_stride: tl.tensor,
    over_stride: tl.tensor,
    packed_rows: tl.tensor,
    num_steps: tl.tensor,
    INNER: tl.constexpr,
    HIDDEN: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
    MAX_UNITS: tl.constexpr,
    SINGLE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SUM_ROWS: tl.constexpr,
    FORMAT: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """A tile of columns of some units; the last program of the tile adds every row's pairs."""
    columns = tl.program_id(0) * (2 * BLOCK_N) + tl.arange(0, BLOCK_N)
    weight = (codes, high, scale, scale_over, minimum, minimum_over)
    strides = (codes_stride, scale_stride, minimum_stride, over_stride)
    start = tl.program_id(0) * (2 * BLOCK_N)
    wait(PDL)
    num_units = NUM_CHOSEN if SINGLE else tl.load(units)
    for unit in range(tl.program_id(1), num_units, tl.num_programs(1)):
        if SINGLE:
            expert, pairs = single_unit(chosen, unit, BLOCK_M)
        else:
            expert = tl.load(units + 1 + unit).to(tl.int64)
            pairs = tl.load(units + 1 + MAX_UNITS + unit * BLOCK_M + tl.arange(0, BLOCK_M))
        is_pair = pairs >= 0
        total, total_other = multiply_blocks(
            between, INNER, tl.maximum(pairs, 0), is_pair[:, None],
            pick_expert(weight, strides, expert, FORMAT), (start, start + BLOCK_N), packed_rows,
            INNER, 0, num_steps, BLOCK_M, BLOCK_N, FORMAT,
        )  # fmt: skip
        part = parts + pairs[None, :] * HIDDEN + columns[:, None]
        real = is_pair[None, :] & (columns < HIDDEN)[:, None]
        tl.store(part, total, mask=real, cache_modifier=".cg")
        real = is_pair[None, :] & (columns + BLOCK_N < HIDDEN)[:, None]
        tl.store(part + BLOCK_N, total_other, mask=real, cache_modifier=".cg")
    tl.debug_barrier()  # all of this program's parts are written before they are counted
    counter = arrivals + tl.program_id(0)
    if tl.atomic_add(counter, 1, sem="acq_rel") == tl.num_programs(1) - 1:
        both = tl.program_id(0) * (2 * BLOCK_N) + tl.arange(0, 2 * BLOCK_N)
        for first_row in range(0, num_rows, SUM_ROWS):
            rows = first_row + tl.arange(0, SUM_ROWS)
            is_row = rows < num_rows
            is_real = is_row[:, None] & (both < HIDDEN)[None, :]
            mixed = tl.zeros([SUM_ROWS, 2 * BLOCK_N], tl.float32)
            for i in tl.static_range(NUM_CHOSEN):
                pair = rows * NUM_CHOSEN + i
                share = tl.load(weights + pair, mask=is_row, other=0.0)
                there = parts + pair[:, None] * HIDDEN + both[None, :]
                found = tl.load(there, mask=is_real, other=0.0, cache_modifier=".cg")
                mixed += share[:, None] * found
            target = output + rows[:, None] * HIDDEN + both[None, :]
            tl.store(target, mixed.to(output.dtype.element_ty), mask=is_real)
        tl.atomic_xchg(counter, 0)  # ready for the next call
