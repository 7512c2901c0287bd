# Triton's decorators carry no types that mypy can see.
# mypy: disallow-untyped-decorators=False
"""The greedy head in Triton: the likeliest column of every row. CUDA only.

Of every row the column, its logit and the logarithm of the whole sum. `best_columns` never writes
the logits: it multiplies and looks in one kernel. `best_of_logits` looks at logits that another
linear made: with many rows arithmetic is what costs, and torch's own linear is better at that.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashdraft.kernels.cuda.dense.linear import tile_product
from flashdraft.kernels.cuda.dense.logits import as_bytes, finish, forbid
from flashdraft.kernels.cuda.overlap import overlap, wait
from flashdraft.kernels.cuda.plan import LinearPlan
from flashdraft.kernels.interface import Best

LOOK_BLOCK = 2048  # logits that a program looks at


def best_columns(
    x: Tensor,
    weight: Tensor,
    plan: LinearPlan,
    multiplier: float,
    softcap: float | None,
    forbidden: Tensor | None = None,
) -> Best:
    """The likeliest column of every row of x @ weight.T; the plan must not cut the depth."""
    num_rows, depth = x.shape
    num_columns, device = weight.shape[0], x.device
    assert weight.is_contiguous() and x.stride(1) == 1 and weight.shape[1] == depth
    assert plan.num_splits == 1
    num_tiles = triton.cdiv(num_columns, plan.block_n)
    peaks, totals, places = found = _make_notes(num_rows, num_tiles, device)
    if num_rows == 0:
        return _best_of_all(*found)
    _best_of_tile[(triton.cdiv(num_rows, plan.block_m), num_tiles)](
        x,
        weight,
        as_bytes(forbidden, places),
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
        FORBIDS=forbidden is not None,
        **overlap(x),
        num_warps=plan.num_warps,
        num_stages=plan.num_stages,
    )
    return _best_of_all(*found)


def best_of_logits(
    logits: Tensor, multiplier: float, softcap: float | None, forbidden: Tensor | None = None
) -> Best:
    """The same over logits [num_rows, num_columns] that are there already."""
    num_rows, num_columns = logits.shape
    num_tiles = triton.cdiv(num_columns, LOOK_BLOCK)
    found = _make_notes(num_rows, num_tiles, logits.device)
    assert logits.is_contiguous()
    if num_rows:
        _best_of_piece[(num_rows, num_tiles)](
            logits,
            as_bytes(forbidden, logits),
            *found,
            num_columns,
            float(multiplier),
            1.0 if softcap is None else float(softcap),
            BLOCK=LOOK_BLOCK,
            CAPPED=softcap is not None,
            FORBIDS=forbidden is not None,
            **overlap(logits),
            num_warps=4,
        )
    return _best_of_all(*found)


def _make_notes(
    num_rows: int, num_tiles: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Of every tile of every row: the largest logit, the sum of powers, the largest one's place."""
    peaks, totals = torch.empty(2, num_rows, num_tiles, device=device, dtype=torch.float32)
    return peaks, totals, torch.empty(num_rows, num_tiles, device=device, dtype=torch.int32)


def _best_of_all(peaks: Tensor, totals: Tensor, places: Tensor) -> Best:
    (num_rows, num_tiles), device = peaks.shape, peaks.device
    index = torch.empty(num_rows, device=device, dtype=torch.int64)
    logit, log_total = torch.empty(2, num_rows, device=device, dtype=torch.float32)
    if num_rows:
        _best_of_tiles[(num_rows,)](
            peaks,
            totals,
            places,
            index,
            logit,
            log_total,
            num_tiles,
            BLOCK=triton.next_power_of_2(num_tiles),
            **overlap(peaks),
            num_warps=4,
        )
    return Best(index, logit, log_total)


@triton.jit
def _compared(
    products: tl.tensor, multiplier: tl.tensor, softcap: tl.tensor, CAPPED: tl.constexpr
) -> tl.tensor:
    """The logits as they are compared: NaN wins, so that a broken row is noticed."""
    logits = finish(products, multiplier, softcap, CAPPED)
    return tl.where(logits != logits, float("inf"), logits)


@triton.jit
def _best_of_piece(
    source: tl.tensor,
    forbidden: tl.tensor,
    peaks: tl.tensor,
    totals: tl.tensor,
    places: tl.tensor,
    num_columns: tl.tensor,
    multiplier: tl.tensor,
    softcap: tl.tensor,
    BLOCK: tl.constexpr,
    CAPPED: tl.constexpr,
    FORBIDS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Of one piece of one row: the largest logit, its place, and the sum of all powers."""
    wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = columns < num_columns
    logits = tl.load(source + row * num_columns + columns, mask=real, other=0.0)
    logits = tl.where(real, _compared(logits, multiplier, softcap, CAPPED), float("-inf"))
    if FORBIDS:
        logits = forbid(logits, forbidden, columns, real)
    peak, lane = tl.max(logits, 0, return_indices=True, return_indices_tie_break_left=True)
    reference = tl.where(tl.abs(peak) == float("inf"), 0.0, peak)
    place = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(peaks + place, peak)
    tl.store(totals + place, tl.sum(tl.exp(logits - reference), 0))
    tl.store(places + place, tl.program_id(1) * BLOCK + lane)


@triton.jit(do_not_specialize=["num_rows"])
def _best_of_tile(
    x: tl.tensor,
    weight: tl.tensor,
    forbidden: tl.tensor,
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
    FORBIDS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Of every row in a tile of logits: the largest, its place, and the sum of all powers."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    wait(PDL)
    logits = tile_product(
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
    logits = _compared(logits.to(x.dtype.element_ty), multiplier, softcap, CAPPED)
    inside = (columns < num_columns)[None, :]
    logits = tl.where(inside, logits, float("-inf"))
    if FORBIDS:
        logits = forbid(logits, forbidden, columns[None, :], inside)
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
    wait(PDL)
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
