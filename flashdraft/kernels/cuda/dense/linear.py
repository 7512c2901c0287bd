# Triton's decorators carry no types that mypy can see.
# mypy: disallow-untyped-decorators=False
"""Linears over few rows in Triton: read every weight once, at the speed of memory. CUDA only.

`multiply_rows` is x @ weight.T. Deep and narrow weights are cut along their depth, so that the
whole card reads them, and whichever program of a tile comes last adds the parts in their order:
there is no atomic sum, the same call always gives the same bits, and under one plan a row's result
does not depend on its neighbours.

It knows nothing of models and never waits for the device, so a graph may capture it. Programs that
run one after the other share a weight tile and differ in their rows: a weight comes from memory
once, however many rows there are.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashdraft.kernels.cuda.overlap import overlap, wait
from flashdraft.kernels.cuda.plan import LinearPlan


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
        **overlap(x),
        num_warps=plan.num_warps,
        num_stages=plan.num_stages,
    )
    return output


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
    PDL: tl.constexpr,
) -> None:
    """One tile of the product, or one part of its depth."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    split, num_splits = tl.program_id(2), tl.num_programs(2)
    # In steps, so that the compiler sees every load's alignment: only then are copies asynchronous.
    first = split * split_steps * BLOCK_K
    end = tl.minimum(first + split_steps * BLOCK_K, depth)
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
