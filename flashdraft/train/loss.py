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

from flashdraft.errors import TrainingError
from flashdraft.train.batches import NO_LABEL

WEIGHTINGS = ("decay", "dpace")

Teacher = Callable[[int, int], Tensor]
"""(first row, end) -> the target's own logits for the tokens that these rows predict."""


@dataclass(frozen=True)
class LossConfig:
    """What is minimised: a mix of losses per row, and how much each slot counts."""

    ce: float = 1.0  # cross-entropy with the token that follows
    kl: float = 0.0  # KL(target || drafter) at temperature 1
    tv: float = 0.0  # total variation between target and drafter
    weighting: str = "dpace"
    gamma: float = 7.0  # decay: slot k counts exp(-(k - 1) / gamma)
    alpha: float = 0.5  # dpace: chances are drawn towards 1 by this much

    def __post_init__(self) -> None:
        if self.weighting not in WEIGHTINGS:
            raise TrainingError(
                f"weighting is {self.weighting!r}; it must be one of {', '.join(WEIGHTINGS)}."
            )
        parts = (self.ce, self.kl, self.tv)
        if min(parts) < 0 or max(parts) <= 0:
            raise TrainingError(
                f"The loss is {self.ce} CE + {self.kl} KL + {self.tv} TV; no part may be negative, "
                "and one must be above 0."
            )
        if self.gamma <= 0 or not 0 <= self.alpha <= 1:
            raise TrainingError(
                f"gamma is {self.gamma} and alpha {self.alpha}; gamma must be above 0 and alpha "
                "between 0 and 1."
            )

    @property
    def needs_teacher(self) -> bool:
        """Whether the target's own logits are part of the loss."""
        return self.kl > 0 or self.tv > 0


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


def head_loss(
    hidden: Tensor,
    labels: Tensor,
    head: Head,
    config: LossConfig,
    teacher: Teacher | None = None,
    chunk_rows: int = 4096,
) -> RowLosses:
    """Losses of rows [num_rows, hidden_size] with labels [num_rows], NO_LABEL where there is none.

    Differentiable once with respect to `hidden`; the gradient is computed along with the loss.
    """
    assert (teacher is not None) or not config.needs_teacher, "these losses need a teacher"
    apply: Callable[..., Any] = _HeadLoss.apply
    return RowLosses(*apply(hidden, labels, head, config, teacher, chunk_rows))


@torch.no_grad()
def head_argmax(hidden: Tensor, head: Head, chunk_rows: int = 4096) -> Tensor:
    """The likeliest token of every row, [num_rows] int64."""
    # multiplier and softcap change no order
    inputs = hidden.to(head.weight.dtype)
    return torch.cat([(part @ head.weight.T).argmax(1) for part in torch.split(inputs, chunk_rows)])


def slot_weights(chance: Tensor, labels: Tensor, config: LossConfig) -> Tensor:
    """How much every slot counts, [num_blocks, num_slots] like its arguments; 0 without label.

    D-PACE: slot j counts as much as all prefixes through it survive, with the drafter's own chances
    (no gradient flows here). Slots without a label end the block.
    """
    is_labelled = labels != NO_LABEL
    if config.weighting == "decay":
        slots = torch.arange(labels.shape[1], device=labels.device, dtype=torch.float32)
        return torch.exp(-slots / config.gamma) * is_labelled
    smoothed = (1 - config.alpha) * chance.detach().float() + config.alpha
    survival = torch.cumprod(smoothed * is_labelled, dim=1)
    return survival.flip(1).cumsum(1).flip(1)


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        labels: Tensor,
        head: Head,
        config: LossConfig,
        teacher: Teacher | None,
        chunk_rows: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows_of = _row_function(hidden.device)
        num_rows, wants_gradient = hidden.shape[0], ctx.needs_input_grad[0]
        loss = torch.empty(num_rows, device=hidden.device, dtype=torch.float32)
        chance = torch.empty_like(loss)
        best = torch.empty(num_rows, device=hidden.device, dtype=torch.int64)
        inputs = hidden.to(head.weight.dtype)
        gradient = torch.empty_like(inputs) if wants_gradient else None
        size = (min(chunk_rows, num_rows), head.weight.shape[0])
        buffer = torch.empty(size, device=hidden.device, dtype=head.weight.dtype)
        for first in range(0, num_rows, chunk_rows):
            end = min(first + chunk_rows, num_rows)
            logits = buffer[: end - first]
            torch.mm(inputs[first:end], head.weight.T, out=logits)
            goal = teacher(first, end) if teacher is not None else None
            out = (loss[first:end], chance[first:end], best[first:end])
            rows_of(logits, labels[first:end], goal, head, config, *out)
            if gradient is not None:
                torch.mm(logits, head.weight, out=gradient[first:end])
        if gradient is not None:
            ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(chance, best)
        return loss, chance, best

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (own,) = ctx.saved_tensors
        return own * gradients[0].unsqueeze(1).to(own.dtype), None, None, None, None, None


RowFunction = Callable[
    [Tensor, Tensor, Tensor | None, Head, LossConfig, Tensor, Tensor, Tensor], None
]


def _row_function(device: torch.device) -> RowFunction:
    if device.type == "cpu":
        return loss_rows
    try:  # Triton is an optional dependency
        fused = importlib.import_module("flashdraft.kernels.triton_loss").loss_rows
    except ImportError:  # correct, but with a float32 copy of every chunk
        return loss_rows

    def run(
        logits: Tensor,
        labels: Tensor,
        teacher: Tensor | None,
        head: Head,
        config: LossConfig,
        *out: Tensor,
    ) -> None:
        mix = (config.ce, config.kl, config.tv)
        fused(logits, labels, teacher, head.multiplier, head.softcap, mix, *out)

    return run


def loss_rows(
    logits: Tensor,
    labels: Tensor,
    teacher: Tensor | None,
    head: Head,
    config: LossConfig,
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
    chances = logs.exp()
    total = -config.ce * own
    slope = config.ce * chances
    slope.scatter_add_(1, places, torch.full_like(chances[:, :1], -config.ce))
    if teacher is not None:
        goals = teacher.float().log_softmax(1)
        goal = goals.exp()
        total = total + config.kl * (goal * (goals - logs)).sum(1)
        slope += config.kl * (chances - goal)
        difference = chances - goal
        total = total + config.tv * 0.5 * difference.abs().sum(1)
        sign = difference.sign()
        pull = (chances * sign).sum(1, keepdim=True)
        slope += config.tv * 0.5 * chances * (sign - pull)
    if head.softcap is not None:
        slope *= 1 - (capped / head.softcap).square()
    logits.copy_(slope * head.multiplier * is_labelled.unsqueeze(1))
    loss.copy_(total * is_labelled)
    chance.copy_(own.exp() * is_labelled)
    best.copy_(capped.argmax(1) * is_labelled)
