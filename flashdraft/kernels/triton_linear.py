# Triton's decorators carry no types that mypy can see.
# mypy: disallow-untyped-decorators=False
"""Linears over few rows in Triton: read every weight once, at the speed of memory. CUDA only.

`multiply_rows` is x @ weight.T. Deep and narrow weights are cut along their depth, so that the
whole card reads them, and whichever program of a tile comes last adds the parts in their order:
there is no atomic sum, the same call always gives the same bits, and under one plan a row's result
does not depend on its neighbours. `best_columns` is the greedy head: the likeliest column of every
row, its logit and the logarithm of the whole sum, without ever writing the logits.

It knows nothing of models and never waits for the device, so a graph may capture it. Programs that
run one after the other share a weight tile and differ in their rows: a weight comes from memory
once, however many rows there are.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashdraft.kernels.interface import Best
from flashdraft.kernels.triton_launch import (
    overlap,
    prefetch,
    prefetch_lines,
    signal,
    signal_and_wait,
    wait,
)
from flashdraft.kernels.triton_plan import LinearPlan


def multiply_rows(x: Tensor, weight: Tensor, plan: LinearPlan, arrivals: Tensor) -> Tensor:
    """x [num_rows, depth] @ weight [num_columns, depth].T.

    `arrivals` is int32, zero before and after. Where the plan cuts the depth it needs one for each
    tile, and no two calls that overlap in time may share it: one buffer for one stream.
    """
    num_rows, depth = x.shape
    num_columns = weight.shape[0]
    output = torch.empty(num_rows, num_columns, device=x.device, dtype=x.dtype)
    if output.numel() == 0:
        return output
    assert weight.is_contiguous() and x.stride(1) == 1 and weight.shape[1] == depth
    tiles = (triton.cdiv(num_rows, plan.block_m), triton.cdiv(num_columns, plan.block_n))
    parts = None
    if plan.num_splits > 1:
        assert arrivals.numel() >= tiles[0] * tiles[1]
        shape = (plan.num_splits, num_rows, num_columns)
        parts = torch.empty(shape, device=x.device, dtype=torch.float32)
    split_steps = triton.cdiv(triton.cdiv(depth, plan.block_k), plan.num_splits)
    split_bytes = min(depth, split_steps * plan.block_k) * weight.itemsize
    num_programs = tiles[1] * plan.num_splits
    _multiply[(*tiles, plan.num_splits)](
        x,
        weight,
        output,
        parts,
        arrivals,
        num_rows,
        num_columns,
        depth,
        x.stride(0),
        split_steps,
        BLOCK_M=plan.block_m,
        BLOCK_N=plan.block_n,
        BLOCK_K=plan.block_k,
        EVEN=depth % plan.block_k == 0,
        SWAP=plan.swap,
        PREFETCH=prefetch_lines(x.device, split_bytes, plan.block_n, num_programs),
        **overlap(x.device),
        num_warps=plan.num_warps,
        num_stages=plan.num_stages,
    )
    return output


def best_columns(
    x: Tensor, weight: Tensor, plan: LinearPlan, multiplier: float, softcap: float | None
) -> Best:
    """The likeliest column of every row of x @ weight.T; the plan must not cut the depth."""
    num_rows, depth = x.shape
    num_columns, device = weight.shape[0], x.device
    index = torch.empty(num_rows, device=device, dtype=torch.int64)
    logit, log_total = torch.empty(2, num_rows, device=device, dtype=torch.float32)
    if num_rows == 0:
        return Best(index, logit, log_total)
    assert weight.is_contiguous() and x.stride(1) == 1 and weight.shape[1] == depth
    assert plan.num_splits == 1
    num_tiles = triton.cdiv(num_columns, plan.block_n)
    peaks, totals = torch.empty(2, num_rows, num_tiles, device=device, dtype=torch.float32)
    places = torch.empty(num_rows, num_tiles, device=device, dtype=torch.int32)
    _best_of_tile[(triton.cdiv(num_rows, plan.block_m), num_tiles)](
        x,
        weight,
        peaks,
        totals,
        places,
        num_rows,
        num_columns,
        depth,
        x.stride(0),
        float(multiplier),
        1.0 if softcap is None else float(softcap),
        BLOCK_M=plan.block_m,
        BLOCK_N=plan.block_n,
        BLOCK_K=plan.block_k,
        EVEN=depth % plan.block_k == 0,
        SWAP=plan.swap,
        CAPPED=softcap is not None,
        PREFETCH=prefetch_lines(device, depth * weight.itemsize, plan.block_n, num_tiles),
        **overlap(device),
        num_warps=plan.num_warps,
        num_stages=plan.num_stages,
    )
    _best_of_tiles[(num_rows,)](
        peaks,
        totals,
        places,
        index,
        logit,
        log_total,
        num_tiles,
        BLOCK=triton.next_power_of_2(num_tiles),
        **overlap(device),
        num_warps=4,
    )
    return Best(index, logit, log_total)


@triton.jit
def _tile_product(
    x: tl.tensor,
    weight: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    num_rows: tl.tensor,
    num_columns: tl.tensor,
    depth: tl.tensor,
    row_stride: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
    SWAP: tl.constexpr,
) -> tl.tensor:
    """[BLOCK_M, BLOCK_N] of the product over depths first .. end - 1, in float32."""
    lanes = tl.arange(0, BLOCK_K)
    left = x + rows[:, None].to(tl.int64) * row_stride + lanes[None, :]
    right = weight + columns[:, None].to(tl.int64) * depth + lanes[None, :]
    real_row = (rows < num_rows)[:, None]
    real_column = (columns < num_columns)[:, None]
    if SWAP:
        total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    else:
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in range(first, end, BLOCK_K):
        if EVEN:
            a = tl.load(left + k, mask=real_row, other=0.0)
            b = tl.load(right + k, mask=real_column, other=0.0)
        else:
            real = (k + lanes < depth)[None, :]
            a = tl.load(left + k, mask=real_row & real, other=0.0)
            b = tl.load(right + k, mask=real_column & real, other=0.0)
        if SWAP:
            total = tl.dot(b, tl.trans(a), total, input_precision="ieee")
        else:
            total = tl.dot(a, tl.trans(b), total, input_precision="ieee")
    if SWAP:
        total = tl.trans(total)
    return total


@triton.jit(do_not_specialize=["num_rows", "split_steps"])
def _multiply(
    x: tl.tensor,
    weight: tl.tensor,
    output: tl.tensor,
    parts: tl.tensor,  # None where the depth is not cut
    arrivals: tl.tensor,
    num_rows: tl.tensor,
    num_columns: tl.tensor,
    depth: tl.tensor,
    row_stride: tl.tensor,
    split_steps: tl.tensor,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
    SWAP: tl.constexpr,
    PREFETCH: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One tile of the product, or one part of its depth."""
    signal(PDL)
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    split, num_splits = tl.program_id(2), tl.num_programs(2)
    # In steps, so that the compiler sees every load's alignment: only then are copies asynchronous.
    first = split * split_steps * BLOCK_K
    end = tl.minimum(first + split_steps * BLOCK_K, depth)
    program = split * tl.num_programs(1) + tl.program_id(1)
    if tl.program_id(0) == 0:  # all rows share the weight
        prefetch(weight, tl.minimum(columns, num_columns - 1), first, depth, program, PREFETCH)
    wait(PDL)
    total = _tile_product(
        x,
        weight,
        rows,
        columns,
        num_rows,
        num_columns,
        depth,
        row_stride,
        first,
        end,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
        EVEN,
        SWAP,
    )
    real = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
    place = rows[:, None].to(tl.int64) * num_columns + columns[None, :]
    if parts is None:
        tl.store(output + place, total.to(output.dtype.element_ty), mask=real)
    else:
        size = num_rows.to(tl.int64) * num_columns
        tl.store(parts + split * size + place, total, mask=real, cache_modifier=".cg")
        tl.debug_barrier()  # all of this program's part is written before it is counted
        counter = arrivals + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
        if tl.atomic_add(counter, 1, sem="acq_rel") == num_splits - 1:
            total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            for other in range(0, num_splits, 4):
                for i in tl.static_range(4):  # in order, four loads at a time
                    part = parts + (other + i) * size + place
                    there = real & (columns < (other + i < num_splits) * num_columns)[None, :]
                    total += tl.load(part, mask=there, other=0.0, cache_modifier=".cg")
            tl.store(output + place, total.to(output.dtype.element_ty), mask=real)
            tl.atomic_xchg(counter, 0)  # ready for the next call


@triton.jit(do_not_specialize=["num_rows"])
def _best_of_tile(
    x: tl.tensor,
    weight: tl.tensor,
    peaks: tl.tensor,
    totals: tl.tensor,
    places: tl.tensor,
    num_rows: tl.tensor,
    num_columns: tl.tensor,
    depth: tl.tensor,
    row_stride: tl.tensor,
    multiplier: tl.tensor,
    softcap: tl.tensor,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
    SWAP: tl.constexpr,
    CAPPED: tl.constexpr,
    PREFETCH: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Of every row in a tile of logits: the largest, its place, and the sum of all powers."""
    signal(PDL)
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    if tl.program_id(0) == 0:  # all rows share the weight
        real = tl.minimum(columns, num_columns - 1)
        prefetch(weight, real, 0, depth, tl.program_id(1), PREFETCH)
    wait(PDL)
    logits = _tile_product(
        x,
        weight,
        rows,
        columns,
        num_rows,
        num_columns,
        depth,
        row_stride,
        0,
        depth,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
        EVEN,
        SWAP,
    )
    # rounded as a linear's result is: the same token wins as over the logits themselves
    logits = logits.to(x.dtype.element_ty).to(tl.float32) * multiplier
    if CAPPED:  # tanh(x) = 2 sigmoid(2 x) - 1
        logits = (2.0 * tl.sigmoid(2.0 * logits / softcap) - 1.0) * softcap
    # NaN wins, so that a broken row is noticed.
    logits = tl.where(logits != logits, float("inf"), logits)
    logits = tl.where((columns < num_columns)[None, :], logits, float("-inf"))
    peak, lane = tl.max(logits, 1, return_indices=True, return_indices_tie_break_left=True)
    reference = tl.where(tl.abs(peak) == float("inf"), 0.0, peak)
    total = tl.sum(tl.exp(logits - reference[:, None]), 1)
    place = rows.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    real = rows < num_rows
    tl.store(peaks + place, peak, mask=real)
    tl.store(totals + place, total, mask=real)
    tl.store(places + place, tl.program_id(1) * BLOCK_N + lane, mask=real)


@triton.jit
def _best_of_tiles(
    peaks: tl.tensor,
    totals: tl.tensor,
    places: tl.tensor,
    index: tl.tensor,
    logit: tl.tensor,
    log_total: tl.tensor,
    num_tiles: tl.tensor,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One row: the first of the best tiles, and the sum of all of them."""
    signal_and_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    tiles = tl.arange(0, BLOCK)
    real = tiles < num_tiles
    bests = tl.load(peaks + row * num_tiles + tiles, mask=real, other=float("-inf"))
    sums = tl.load(totals + row * num_tiles + tiles, mask=real, other=0.0)
    peak, tile = tl.max(bests, 0, return_indices=True, return_indices_tie_break_left=True)
    sound = tl.abs(peak) != float("inf")
    reference = tl.where(sound, peak, 0.0)
    scales = tl.where(bests == float("-inf"), 0.0, tl.exp(bests - reference))
    column = tl.load(places + row * num_tiles + tile).to(tl.int64)
    tl.store(index + row, tl.where(sound, column, -1))
    tl.store(logit + row, peak)
    tl.store(log_total + row, peak + tl.log(tl.sum(sums * scales, 0)))
