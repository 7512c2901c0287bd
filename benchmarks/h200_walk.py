# Triton's decorators carry no types that mypy can see.
# mypy: disallow-untyped-decorators=False
"""The walk that `PrescribedWalks` prescribes (h200_inject.py), as one launch: a program for a slot.

In torch it is some forty launches of a few numbers each, which real acceptance does not have.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashdraft.kernels.nodes import MAX_NODES, TreeNodes

ROWS = MAX_NODES + 1  # of any tree
FAR = tl.constexpr(256)  # more than any tree is deep


def accept(
    samples: Tensor, starts: Tensor, nodes: TreeNodes, is_node: Tensor, table: Tensor, count: Tensor
) -> Tensor:
    """The paths of all slots, of the draw of this number; `samples` get their tokens."""
    words = torch.empty_like(starts)
    assert all(one.is_contiguous() for one in (samples, starts, *nodes, is_node, table))
    num_draws, _, batch, num_sizes = table.shape
    _accept[(starts.shape[0],)](
        samples,
        starts,
        nodes,
        is_node,
        table,
        count,
        words,
        num_draws,
        batch,
        num_sizes,
        nodes.tokens.shape[1],
        ROWS=ROWS,
        SIZES=triton.next_power_of_2(num_sizes),
        num_warps=4,
    )
    return words


@triton.jit
def _accept(
    samples: tl.tensor,
    starts: tl.tensor,
    nodes: TreeNodes,
    is_node: tl.tensor,
    table: tl.tensor,
    count: tl.tensor,
    words: tl.tensor,
    num_draws: tl.tensor,
    batch: tl.tensor,
    num_sizes: tl.tensor,
    num_nodes: tl.tensor,
    ROWS: tl.constexpr,
    SIZES: tl.constexpr,
) -> None:
    slot, row = tl.program_id(0).to(tl.int64), tl.arange(0, ROWS)
    node, there = slot * num_nodes + row - 1, (row > 0) & (row <= num_nodes)
    parents = tl.load(nodes.parents + node, mask=there, other=-1)
    ancestors = tl.load(nodes.ancestors + node, mask=there, other=1)
    depths = tl.load(nodes.depths + node, mask=there, other=0).to(tl.int64)
    verified = tl.load(is_node + node, mask=there, other=0).to(tl.int32) > 0

    draw = tl.load(count) % num_draws
    told, size = table + (draw * 3 * batch + slot) * num_sizes, tl.arange(0, SIZES)
    least = tl.load(told + 2 * batch * num_sizes + size, mask=size < num_sizes, other=ROWS)
    num_verified = tl.sum(verified.to(tl.int64), 0)
    told += tl.sum((least <= num_verified).to(tl.int64), 0) - 1
    leaves, length = tl.load(told), tl.load(told + batch * num_sizes)

    # the first child of a row on the chain is on it
    bits = tl.full((ROWS,), 1, tl.int64) << row.to(tl.int64)
    is_alike = (parents[:, None] == parents[None, :]) & (row[None, :] < row[:, None])
    is_first = there & (tl.max(is_alike.to(tl.int32), 1) == 0)
    firsts = 1 + tl.sum(tl.where(is_first, bits, 0), 0)
    is_chain = there & ((ancestors & ~firsts) == 0)
    passed = ((ancestors[:, None] & bits[None, :]) != 0) & is_chain[None, :]
    on_chain = tl.sum(passed.to(tl.int64), 1)

    missed = (length - depths) * FAR + tl.abs(on_chain - leaves)
    is_short = (verified | (row == 0)) & (depths <= length)
    end = tl.min(tl.where(is_short, missed, FAR * FAR) * ROWS + row, 0) % ROWS
    word = tl.sum(tl.where(row == end, ancestors, 0), 0)
    tl.store(words + slot, word)
    is_kept = there & ((word & bits) != 0)
    tokens = tl.load(nodes.tokens + node, mask=there, other=0)
    tl.store(samples + tl.load(starts + slot) + parents, tokens, mask=is_kept)
