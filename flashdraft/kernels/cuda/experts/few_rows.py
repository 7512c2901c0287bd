# Triton's decorators carry no types that mypy can see.
# mypy: disallow-untyped-decorators=False
"""A mixture of experts over few rows in Triton: every chosen expert is read once, in two launches.

CUDA only. A tile holds all rows, whether they chose its expert or not: tensor cores multiply 16
rows at a time anyway, and memory is what costs. A row's weight for an expert, zero where it did not
choose it, goes into what lies between the two products, so the second one sums over experts as over
one long depth. That depth is cut, so that the whole card reads it, and whichever program of a tile
comes last adds the parts in their order: there is no atomic sum.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashdraft.kernels.cuda.dense.rows import gate
from flashdraft.kernels.cuda.experts.grouped import multiply_tile
from flashdraft.kernels.cuda.experts.one_row import load_tile
from flashdraft.kernels.cuda.experts.plan import ExpertsPlan
from flashdraft.kernels.cuda.overlap import overlap, wait
from flashdraft.kernels.kinds import Activation


def mix_few_rows(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    chosen: Tensor,
    weights: Tensor,
    activation: Activation,
    plan: ExpertsPlan,
    num_processors: int,
) -> Tensor:
    """`Kernels.experts` for at most plan.block_m rows, with all experts in one tensor each.

    gate_up [num_experts, 2 * inner, hidden], down [num_experts, hidden, inner].
    """
    num_rows, hidden = x.shape
    output = torch.empty_like(x)
    if num_rows == 0:
        return output
    assert num_rows <= plan.block_m
    (num_experts, _, inner), num_chosen = down.shape, chosen.shape[1]
    most = min(num_rows * num_chosen, num_experts)  # experts that can be chosen
    between = torch.empty(most, plan.block_m, inner, device=x.device, dtype=x.dtype)
    shape = (plan.splits, plan.block_m, hidden)
    parts = torch.empty(shape, device=x.device, dtype=torch.float32)
    num_tiles = triton.cdiv(hidden, plan.down.block_n)
    # The chosen experts and their number, then how many parts of every tile are ready.
    notes = torch.empty(num_experts + 1 + num_tiles, device=x.device, dtype=torch.int32)
    work = most * triton.cdiv(inner, plan.up.block_n)
    sizes = {
        "INNER": inner,
        "HIDDEN": hidden,
        "NUM_EXPERTS": num_experts,
        "NUM_CHOSEN": num_chosen,
        "BLOCK_M": plan.block_m,
        "BLOCK_E": triton.next_power_of_2(num_experts),
        "BLOCK_C": triton.next_power_of_2(num_chosen),
    }
    _up_few[(min(work, num_processors * plan.up.resident),)](
        x,
        gate_up,
        chosen,
        weights,
        between,
        notes,
        num_rows,
        **sizes,
        NUM_TILES=num_tiles,
        BLOCK_T=triton.next_power_of_2(num_tiles),
        GELU=activation is Activation.GELU_TANH,
        BLOCK_N=plan.up.block_n,
        BLOCK_K=plan.up.block_k,
        **overlap(x),
        num_warps=plan.up.num_warps,
        num_stages=plan.up.num_stages,
    )
    _down_few[(num_tiles, plan.splits)](
        between,
        down,
        chosen,
        notes,
        parts,
        output,
        num_rows,
        **sizes,
        SPLITS=plan.splits,
        BLOCK_N=plan.down.block_n,
        BLOCK_K=plan.down.block_k,
        **overlap(x),
        num_warps=plan.down.num_warps,
        num_stages=plan.down.num_stages,
    )
    return output


@triton.jit
def _load_choice(
    chosen: tl.tensor,
    num_rows: tl.tensor,
    NUM_CHOSEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Every row's experts, or -1; where they lie; whether they are real."""
    rows = tl.arange(0, BLOCK_M)
    choices = tl.arange(0, BLOCK_C)
    pairs = rows[:, None] * NUM_CHOSEN + choices[None, :]
    real = (rows < num_rows)[:, None] & (choices < NUM_CHOSEN)[None, :]
    # From L2, not L1: that one may be older than this program.
    theirs = tl.load(chosen + pairs, mask=real, other=-1, cache_modifier=".cg").to(tl.int32)
    return theirs, pairs, real


@triton.jit
def _list_experts(
    theirs: tl.tensor, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_E: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Which experts anybody chose, their places in the list of these, and how many there are."""
    every = tl.reshape(theirs, [BLOCK_M * BLOCK_C])
    listed = tl.histogram(tl.maximum(every, 0), BLOCK_E, mask=every >= 0) > 0
    rank = tl.cumsum(listed.to(tl.int32), 0) - 1
    return listed, rank, tl.sum(listed.to(tl.int32), 0)


@triton.jit(do_not_specialize=["num_rows"])
def _up_few(
    x: tl.tensor,
    gate_up: tl.tensor,
    chosen: tl.tensor,
    weights: tl.tensor,
    between: tl.tensor,
    notes: tl.tensor,
    num_rows: tl.tensor,
    INNER: tl.constexpr,
    HIDDEN: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_C: tl.constexpr,
    NUM_TILES: tl.constexpr,
    BLOCK_T: tl.constexpr,
    GELU: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """List the chosen experts, then take their columns in turns with the other programs."""
    wait(PDL)
    rows = tl.arange(0, BLOCK_M)
    experts = tl.arange(0, BLOCK_E)
    lanes = tl.arange(0, BLOCK_K)
    theirs, pairs, real = _load_choice(chosen, num_rows, NUM_CHOSEN, BLOCK_M, BLOCK_C)
    shares = tl.load(weights + pairs, mask=real, other=0.0)
    listed, rank, num_listed = _list_experts(theirs, BLOCK_M, BLOCK_C, BLOCK_E)
    if tl.program_id(0) == 0:
        tl.store(notes + rank, experts, mask=listed)
        tl.store(notes + NUM_EXPERTS, num_listed)
        tiles = tl.arange(0, BLOCK_T)
        zeros = tl.zeros([BLOCK_T], tl.int32)
        tl.store(notes + NUM_EXPERTS + 1 + tiles, zeros, mask=tiles < NUM_TILES)
    num_blocks: tl.constexpr = (INNER + BLOCK_N - 1) // BLOCK_N
    whole: tl.constexpr = INNER % BLOCK_N == 0 and HIDDEN % BLOCK_K == 0
    dtype: tl.constexpr = between.dtype.element_ty
    left = x + tl.minimum(rows, num_rows - 1)[:, None] * HIDDEN + lanes[None, :]
    # Gate and up rows take turns, so that a thread holds both results of a column.
    sides = tl.arange(0, 2 * BLOCK_N)
    for work in range(tl.program_id(0), num_listed * num_blocks, tl.num_programs(0)):
        unit = work // num_blocks
        start = work % num_blocks * BLOCK_N
        expert = tl.sum(tl.where(listed & (rank == unit), experts, 0), 0)
        weight = gate_up + expert.to(tl.int64) * (2 * INNER * HIDDEN)
        sources = start + sides // 2
        right = weight + (sources + sides % 2 * INNER)[:, None] * HIDDEN + lanes[None, :]
        both = multiply_tile(
            left, right, sources < INNER, HIDDEN, BLOCK_M, 2 * BLOCK_N, BLOCK_K, whole
        )
        gates, ups = tl.split(tl.reshape(both, [BLOCK_M, BLOCK_N, 2]))
        mine = theirs == expert
        share = tl.sum(tl.where(mine, shares, 0.0), 1)[:, None]
        asked = tl.sum(mine.to(tl.int32), 1)[:, None] > 0
        # Not zero times what may be infinite: rows that did not ask must not be harmed.
        gated = tl.where(asked, gate(gates, ups, dtype, GELU) * share, 0.0)
        columns = start + tl.arange(0, BLOCK_N)
        target = between + (unit * BLOCK_M + rows)[:, None] * INNER + columns[None, :]
        tl.store(target, gated.to(dtype), mask=(columns < INNER)[None, :])


@triton.jit(do_not_specialize=["num_rows"])
def _down_few(
    between: tl.tensor,
    down: tl.tensor,
    chosen: tl.tensor,
    notes: tl.tensor,
    parts: tl.tensor,
    output: tl.tensor,
    num_rows: tl.tensor,
    INNER: tl.constexpr,
    HIDDEN: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_C: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Some columns of a share of the listed experts; the last program of a tile adds all shares."""
    split = tl.program_id(1)
    rows = tl.arange(0, BLOCK_M)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    lanes = tl.arange(0, BLOCK_K)
    wait(PDL)
    num_steps: tl.constexpr = (INNER + BLOCK_K - 1) // BLOCK_K
    whole: tl.constexpr = HIDDEN % BLOCK_N == 0 and INNER % BLOCK_K == 0
    num_listed = tl.load(notes + NUM_EXPERTS)
    first = num_listed * split // SPLITS * num_steps
    last = num_listed * (split + 1) // SPLITS * num_steps
    left = between + rows[:, None] * INNER + lanes[None, :]
    right = down + columns[:, None] * INNER + lanes[None, :]
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for step in range(first, last):
        unit = step // num_steps
        k = step % num_steps * BLOCK_K
        real_lane = k + lanes < INNER
        expert = tl.load(notes + unit).to(tl.int64)
        a = load_tile(left + unit * (BLOCK_M * INNER) + k, rows >= 0, real_lane, whole)
        b = load_tile(right + expert * (HIDDEN * INNER) + k, columns < HIDDEN, real_lane, whole)
        total = tl.dot(a, tl.trans(b), total, input_precision="ieee")
    real = (rows < num_rows)[:, None] & (columns < HIDDEN)[None, :]
    place = rows[:, None] * HIDDEN + columns[None, :]
    size: tl.constexpr = BLOCK_M * HIDDEN
    tl.store(parts + split * size + place, total, mask=real, cache_modifier=".cg")
    tl.debug_barrier()  # all of this program's part is written before it is counted
    ready = notes + NUM_EXPERTS + 1 + tl.program_id(0)
    if tl.atomic_add(ready, 1, sem="acq_rel") == SPLITS - 1:
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for other in range(SPLITS):
            part = parts + other * size + place
            total += tl.load(part, mask=real, other=0.0, cache_modifier=".cg")
        tl.store(output + place, total.to(output.dtype.element_ty), mask=real)
