"""What the CUDA backend does with weights in floats, with logits, and with what is drawn."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flashdraft.kernels.cuda import advance as going_on
from flashdraft.kernels.cuda import layout, paths, tree
from flashdraft.kernels.cuda import settle as settling
from flashdraft.kernels.cuda.dense import convolution as mixing
from flashdraft.kernels.cuda.dense.linear import multiply_rows
from flashdraft.kernels.cuda.dense.logits import finish_logits
from flashdraft.kernels.cuda.draw import rows as drawing
from flashdraft.kernels.cuda.plan import DeviceLimits, plan_exact_linear, plan_linear
from flashdraft.kernels.interface import (
    Convolution,
    DraftedSlots,
    Draw,
    DrawnRows,
    HeadProducts,
    Offered,
    Offers,
    PagedTensor,
    PassRows,
    PathOffers,
    PathScores,
    Settled,
    SlotCandidates,
    SlotSettings,
    SlotStates,
    SlotTables,
    TreeNodes,
    Verified,
)

EXACT_ROWS = 1024


def multiply_floats(
    x: Tensor, weight: Tensor, arrivals: Tensor, limits: DeviceLimits, exact: bool
) -> Tensor | None:
    """x @ weight.T; None where torch is the faster way."""
    num_rows, sizes = x.shape[0], (*weight.shape, weight.itemsize, limits)
    plan = plan_exact_linear(*sizes) if exact else plan_linear(num_rows, *sizes)
    if plan is None:
        return None
    if num_rows <= EXACT_ROWS:
        return multiply_rows(x, weight, plan, arrivals)
    # in pieces: the parts of a cut depth take memory for every row
    pieces = (x[i : i + EXACT_ROWS] for i in range(0, num_rows, EXACT_ROWS))
    return torch.cat([multiply_rows(piece, weight, plan, arrivals) for piece in pieces])


def finish(
    products: Tensor, multiplier: float, softcap: float | None, forbidden: Tensor | None
) -> Tensor:
    """`Kernels.finish_logits`."""
    return finish_logits(products, multiplier, softcap, forbidden)


def draw(logits: Tensor | HeadProducts, settings: SlotSettings, rows: DrawnRows) -> Draw:
    """`Kernels.draw`."""
    head = logits if isinstance(logits, HeadProducts) else HeadProducts(logits)
    return drawing.draw(head, settings, rows)


def offer(drawn: Draw, settings: SlotSettings, rows: DrawnRows, count: int) -> Offers:
    """`Kernels.offer`."""
    return tree.offer(drawn, settings, rows, count)


def grow(offered: Offered, nodes: TreeNodes) -> None:
    """`Kernels.grow`."""
    tree.grow(offered, nodes)


def offer_paths(
    candidates: SlotCandidates,
    scores: PathScores,
    settings: SlotSettings,
    rows: DrawnRows,
    count: int,
) -> PathOffers:
    """`Kernels.offer_paths`."""
    return paths.offer_paths(candidates, scores, settings, rows, count)


def follow(offers: PathOffers, width: int) -> tuple[Tensor, Tensor]:
    """`Kernels.follow`."""
    return paths.follow(offers, width)


def convolve(x: Tensor, convolution: Convolution) -> Tensor:
    """`Kernels.convolve`."""
    return mixing.convolve(x, convolution)


def share_rows(drafted: DraftedSlots, num_rows: int) -> Tensor:
    """`Kernels.share_rows`."""
    return layout.share_rows(drafted, num_rows)


def lay_out(
    slots: SlotTables, nodes: TreeNodes, counts: Tensor | None, num_rows: int, rows: PassRows
) -> None:
    """`Kernels.lay_out`."""
    layout.lay_out(slots, nodes, counts, num_rows, rows)


def advance(
    slots: SlotStates, step: Verified, lines: Tensor, history: Tensor | None, is_given: bool
) -> None:
    """`Kernels.advance`."""
    going_on.advance(slots, step, lines, history, is_given)


def make_table(stored: Sequence[PagedTensor]) -> settling.Table:
    """What `settle` must know of caches."""
    return settling.make_table(stored)


def settle(table: settling.Table, moves: Settled) -> None:
    """What `Kernels.settler` returns."""
    settling.settle(table, moves)
