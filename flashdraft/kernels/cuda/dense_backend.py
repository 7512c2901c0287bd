"""What the CUDA backend does with weights in floats (few rows, best columns), and with logits."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from flashdraft.kernels.cuda.dense.best import best_columns, best_of_logits
from flashdraft.kernels.cuda.dense.linear import multiply_rows
from flashdraft.kernels.cuda.dense.logits import finish_logits
from flashdraft.kernels.cuda.draw import rows as drawing
from flashdraft.kernels.cuda.plan import (
    DeviceLimits,
    plan_best,
    plan_exact_best,
    plan_exact_linear,
    plan_linear,
)
from flashdraft.kernels.interface import Best, Draw, DrawnRows, SlotSettings

EXACT_ROWS = 1024
FUSED_HEAD_ROWS = 128  # more of them are multiplied faster by torch, which writes the logits
MAX_LOGITS_BYTES = 300 << 20


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


def fits_one_launch(num_rows: int, logits_row_bytes: int, exact: bool) -> bool:
    """Whether a head in floats is best read and compared in one launch."""
    piece = _rows_of_a_piece(logits_row_bytes)
    return exact or num_rows <= FUSED_HEAD_ROWS or piece <= FUSED_HEAD_ROWS


def best_in_one_launch(
    x: Tensor,
    weight: Tensor,
    limits: DeviceLimits,
    exact: bool,
    multiplier: float,
    softcap: float | None,
    forbidden: Tensor | None,
) -> Best:
    """`Kernels.best_columns` without writing the logits."""
    if exact:
        plan = plan_exact_best(weight.itemsize, limits)
    else:
        plan = plan_best(x.shape[0], weight.itemsize, limits)
    return best_columns(x, weight, plan, multiplier, softcap, forbidden)


def best_of_products(
    x: Tensor,
    logits_row_bytes: int,
    multiply: Callable[[Tensor], Tensor],
    multiplier: float,
    softcap: float | None,
    forbidden: Tensor | None,
) -> Best:
    """`Kernels.best_columns` of logits that `multiply` writes, some rows at a time."""
    piece = _rows_of_a_piece(logits_row_bytes)
    bests = [
        best_of_logits(multiply(x[i : i + piece]), multiplier, softcap, forbidden)
        for i in range(0, max(1, x.shape[0]), piece)
    ]
    if len(bests) == 1:
        return bests[0]
    return Best(
        torch.cat([best.index for best in bests]),
        torch.cat([best.logit for best in bests]),
        torch.cat([best.log_total for best in bests]),
    )


def _rows_of_a_piece(logits_row_bytes: int) -> int:
    return max(1, MAX_LOGITS_BYTES // logits_row_bytes)


def finish(
    products: Tensor, multiplier: float, softcap: float | None, forbidden: Tensor | None
) -> Tensor:
    """`Kernels.finish_logits`."""
    return finish_logits(products, multiplier, softcap, forbidden)


def draw(logits: Tensor, settings: SlotSettings, rows: DrawnRows) -> Draw:
    """`Kernels.draw`."""
    return drawing.draw(logits, settings, rows)
