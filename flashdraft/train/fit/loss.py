"""The loss of draft rows over the target's frozen head, without ever holding all logits.

`head_loss` goes through the rows in chunks: a chunk's logits are computed, turned into the gradient
with respect to themselves in place, and folded back into one with respect to the hidden rows. Every
row's loss comes out unweighted; how much a slot counts is decided afterwards by `slot_weights`,
since a row's gradient is its weight times its own. It knows no drafter and no batches.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashdraft.train.fit.batches import NO_LABEL

SMOOTHING = 0.5  # of D-PACE: the drafter's chances are drawn towards 1 by this much


@dataclass(frozen=True)
class Head:
    """The frozen head and what is done to its logits: cap * tanh(multiplier * x / cap)."""

    weight: Tensor  # [vocab_size, hidden_size]
    multiplier: float = 1.0
    softcap: float | None = None


class RowLosses(NamedTuple):
    """Per row, without label all zeros: the loss, the label's probability, the likeliest token."""

    loss: Tensor  # [num_rows] float32, differentiable
    chance: Tensor  # [num_rows] float32
    best: Tensor  # [num_rows] int64
    likeliest: Tensor  # [num_rows, num_likeliest] int64, with or without label


def head_loss(
    hidden: Tensor,
    labels: Tensor,
    head: Head,
    chunk_rows: int = 4096,
    num_likeliest: int = 0,
) -> RowLosses:
    """Cross-entropy of rows [num_rows, hidden_size] with labels [num_rows], NO_LABEL for none.

    Differentiable once with respect to `hidden`; the gradient is computed along with the loss.
    """
    apply: Callable[..., Any] = _HeadLoss.apply
    return RowLosses(*apply(hidden, labels, head, chunk_rows, num_likeliest))


@torch.no_grad()
def head_argmax(hidden: Tensor, head: Head, chunk_rows: int = 4096) -> Tensor:
    """The likeliest token of every row, [num_rows] int64."""
    # multiplier and softcap change no order
    inputs = hidden.to(head.weight.dtype)
    return torch.cat([(part @ head.weight.T).argmax(1) for part in torch.split(inputs, chunk_rows)])


@torch.no_grad()
def head_top(hidden: Tensor, head: Head, count: int, chunk_rows: int = 4096) -> Tensor:
    """So many of the likeliest tokens of every row, [num_rows, count] int64."""
    parts = torch.split(hidden.to(head.weight.dtype), chunk_rows)
    return torch.cat([(part @ head.weight.T).topk(count).indices for part in parts])


def candidate_logits(hidden: Tensor, candidates: Tensor, head: Head) -> Tensor:
    """Logits of some tokens of every row, [num_rows, count] float32; differentiable."""
    rows = head.weight[candidates]  # [num_rows, count, hidden_size]
    raw = (rows @ hidden.to(rows.dtype).unsqueeze(2)).squeeze(2).float() * head.multiplier
    return raw if head.softcap is None else torch.tanh(raw / head.softcap) * head.softcap


def path_loss(scores: Tensor, candidates: Tensor, labels: Tensor) -> RowLosses:
    """Cross-entropy among candidates [num_rows, count], of which one is the row's label."""
    is_label = (candidates == labels.unsqueeze(1)) & (labels != NO_LABEL).unsqueeze(1)
    logs = scores.log_softmax(1)
    own = torch.where(is_label, logs, 0.0).sum(1)
    is_labelled = is_label.any(1)
    best = candidates.gather(1, scores.argmax(1, keepdim=True)).squeeze(1) * is_labelled
    return RowLosses(-own, (own.exp() * is_labelled).detach(), best, candidates)


def with_labels(candidates: Tensor, labels: Tensor) -> Tensor:
    """The candidates, of which the last gives way to a label that is not among them."""
    is_missing = (candidates != labels.unsqueeze(1)).all(1) & (labels != NO_LABEL)
    last = torch.where(is_missing, labels, candidates[:, -1])
    return torch.cat([candidates[:, :-1], last.unsqueeze(1)], dim=1)


def slot_weights(chance: Tensor, labels: Tensor) -> Tensor:
    """How much every slot counts, [num_blocks, num_slots] like its arguments; 0 without label.

    D-PACE: slot j counts as much as all prefixes through it survive, with the drafter's own chances
    (no gradient flows here). Slots without a label end the block.
    """
    is_labelled = labels != NO_LABEL
    smoothed = (1 - SMOOTHING) * chance.detach().float() + SMOOTHING
    survival = torch.cumprod(smoothed * is_labelled, dim=1)
    return survival.flip(1).cumsum(1).flip(1)


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        labels: Tensor,
        head: Head,
        chunk_rows: int,
        num_likeliest: int,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        rows_of = _row_function(hidden.device)
        num_rows, wants_gradient = hidden.shape[0], ctx.needs_input_grad[0]
        loss = torch.empty(num_rows, device=hidden.device, dtype=torch.float32)
        chance = torch.empty_like(loss)
        best = torch.empty(num_rows, device=hidden.device, dtype=torch.int64)
        likeliest = best.new_empty(num_rows, num_likeliest)
        inputs = hidden.to(head.weight.dtype)
        gradient = torch.empty_like(inputs) if wants_gradient else None
        size = (min(chunk_rows, num_rows), head.weight.shape[0])
        buffer = torch.empty(size, device=hidden.device, dtype=head.weight.dtype)
        for first in range(0, num_rows, chunk_rows):
            end = min(first + chunk_rows, num_rows)
            logits = buffer[: end - first]
            torch.mm(inputs[first:end], head.weight.T, out=logits)
            if num_likeliest:  # multiplier and softcap change no order
                likeliest[first:end] = logits.topk(num_likeliest).indices
            out = (loss[first:end], chance[first:end], best[first:end])
            rows_of(logits, labels[first:end], head, *out)
            if gradient is not None:
                torch.mm(logits, head.weight, out=gradient[first:end])
        if gradient is not None:
            ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(chance, best, likeliest)
        return loss, chance, best, likeliest

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (own,) = ctx.saved_tensors
        return own * gradients[0].unsqueeze(1).to(own.dtype), None, None, None, None


RowFunction = Callable[[Tensor, Tensor, Head, Tensor, Tensor, Tensor], None]


def _row_function(device: torch.device) -> RowFunction:
    if device.type == "cpu":
        return loss_rows
    try:  # Triton is an optional dependency
        fused = importlib.import_module("flashdraft.kernels.cuda.loss").loss_rows
    except ImportError:  # correct, but with a float32 copy of every chunk
        return loss_rows

    def run(logits: Tensor, labels: Tensor, head: Head, *out: Tensor) -> None:
        fused(logits, labels, head.multiplier, head.softcap, *out)

    return run


def loss_rows(
    logits: Tensor,
    labels: Tensor,
    head: Head,
    loss: Tensor,
    chance: Tensor,
    best: Tensor,
) -> None:
    """Fill loss, chance and best from raw logits, which the loss's gradient then replaces.

    The reference for the Triton kernel, and what runs on a CPU.
    """
    is_labelled = labels != NO_LABEL
    places = labels.clamp(min=0).unsqueeze(1)
    raw = logits.float() * head.multiplier
    capped = raw if head.softcap is None else torch.tanh(raw / head.softcap) * head.softcap
    logs = capped.log_softmax(1)
    own = logs.gather(1, places).squeeze(1)
    slope = logs.exp()
    slope.scatter_add_(1, places, torch.full_like(slope[:, :1], -1.0))
    if head.softcap is not None:
        slope *= 1 - (capped / head.softcap).square()
    logits.copy_(slope * head.multiplier * is_labelled.unsqueeze(1))
    loss.copy_(-own * is_labelled)
    chance.copy_(own.exp() * is_labelled)
    best.copy_(capped.argmax(1) * is_labelled)
