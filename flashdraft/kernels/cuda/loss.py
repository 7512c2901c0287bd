# Triton's decorators carry no types that mypy can see.
# mypy: disallow-untyped-decorators=False
"""The training loss's work on rows of logits, in Triton: losses out, gradients in place. CUDA only.

One program per row. The first pass over the row takes the sums, the last one writes the gradient
over the logits: rows in flight fit the second-level cache, so memory sees one read and one write.
What the losses mean is train/fit/loss.py's business, whose `loss_rows` is the reference.
"""

from __future__ import annotations

import contextlib

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashdraft.kernels.cuda.dense.logits import finish

MAX_BLOCK = 8192  # columns at a time: two programs to a processor, no registers spilled


def loss_rows(
    logits: Tensor,
    labels: Tensor,
    multiplier: float,
    softcap: float | None,
    loss: Tensor,
    chance: Tensor,
    best: Tensor,
) -> None:
    """Fill loss, chance and best [num_rows] from raw logits [num_rows, vocab_size].

    The gradient of the cross-entropy replaces the logits. Labels below 0 mark rows that count for
    nothing.
    """
    num_rows, vocab_size = logits.shape
    if num_rows == 0:
        return
    assert logits.is_contiguous()
    block = min(MAX_BLOCK, triton.next_power_of_2(vocab_size))
    on_device = contextlib.nullcontext()
    with torch.cuda.device(logits.device) if logits.is_cuda else on_device:
        _loss_row[(num_rows,)](
            logits,
            labels,
            loss,
            chance,
            best,
            multiplier,
            1.0 if softcap is None else softcap,
            VOCAB=vocab_size,
            BLOCK=block,
            CAPPED=softcap is not None,
            num_warps=min(32, max(1, block // 512)),
        )


@triton.jit
def _add_powers(
    x: tl.tensor, peak: tl.tensor, best: tl.tensor, total: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """One more tile in a running maximum and sum of exponentials."""
    new = tl.maximum(best, peak)
    return new, total * tl.exp(best - new) + tl.sum(tl.exp(x - new), 0)


@triton.jit
def _loss_row(
    logits: tl.tensor,
    labels: tl.tensor,
    losses: tl.tensor,
    chances: tl.tensor,
    bests: tl.tensor,
    multiplier: tl.tensor,
    softcap: tl.tensor,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    CAPPED: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    logits += row * VOCAB
    lanes = tl.arange(0, BLOCK)
    label = tl.load(labels + row)
    if label < 0:
        for start in range(0, VOCAB, BLOCK):
            zeros = tl.zeros([BLOCK], tl.float32).to(logits.dtype.element_ty)
            tl.store(logits + start + lanes, zeros, mask=start + lanes < VOCAB)
        tl.store(losses + row, 0.0)
        tl.store(chances + row, 0.0)
        tl.store(bests + row, 0)
        return
    own = finish(tl.load(logits + label), multiplier, softcap, CAPPED)
    best = own * 0.0 - float("inf")
    total = own * 0.0
    place = tl.program_id(0) * 0
    for start in range(0, VOCAB, BLOCK):
        real = start + lanes < VOCAB
        raw = tl.load(logits + start + lanes, mask=real, other=0.0)
        x = tl.where(real, finish(raw, multiplier, softcap, CAPPED), float("-inf"))
        peak, lane = tl.max(x, 0, return_indices=True)
        place = tl.where(peak > best, start + lane, place)
        best, total = _add_powers(x, peak, best, total)
    log_total = best + tl.log(total)
    for start in range(0, VOCAB, BLOCK):
        real = start + lanes < VOCAB
        raw = tl.load(logits + start + lanes, mask=real, other=0.0)
        x = finish(raw, multiplier, softcap, CAPPED)
        p = tl.exp(x - log_total)
        slope = p - tl.where(start + lanes == label, 1.0, 0.0)
        if CAPPED:
            slope *= 1.0 - (x / softcap) * (x / softcap)
        gradient = (slope * multiplier).to(logits.dtype.element_ty)
        tl.store(logits + start + lanes, gradient, mask=real)
    tl.store(losses + row, log_total - own)
    tl.store(chances + row, tl.exp(own - log_total))
    tl.store(bests + row, place.to(tl.int64))
