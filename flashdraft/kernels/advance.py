"""How slots go on behind a step: what is kept of drafts, written down and counted, and who ends.

One rule, told here in tensors; a device may have it as a kernel of its own (`Kernels.advance`).
Nothing here waits for the device, and shapes depend on nothing but the arguments' own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flashdraft.kernels.accept import Acceptance, accept_ragged
from flashdraft.kernels.draw.rule import count_tokens


class SlotStates(NamedTuple):
    """Where sequences stand, [slots] each; a step writes the first three, and counts."""

    anchors: Tensor  # int64: the last token, which the cache does not hold yet
    lengths: Tensor  # int32: tokens that the cache holds
    alive: Tensor  # int32: 1 = it decodes
    limits: Tensor  # int64: draft tokens that it verifies at most; -1 = its share
    ends: Tensor  # int64: tokens, prompt included, at which it ends
    stops_from: Tensor  # int64: the position from which on its stop tokens stop it
    stops: Tensor  # [slots, n] int64, -1 where there are fewer
    flags: Tensor  # those of SlotSettings,
    facts: Tensor  # and its table, in which committed tokens are counted


class Decided(NamedTuple):
    """What somebody decided about acceptance."""

    acceptance: Acceptance
    drawn: Tensor  # the samples before that


class Verified(NamedTuple):
    """What a step found out. Rows of nobody stand behind the others: one sequence's, all -1."""

    samples: Tensor  # [rows + 1 + width] int64: the target's tokens, -1 where there is none
    tokens: Tensor  # the same of what the target ran over; those of nobody are anything
    query_start: Tensor  # [slots + 1] int32: who has no rows begins behind all others
    drafts: Tensor  # [slots, width] int64
    confidence: Tensor  # [slots, width] float32, 0 where nothing was drafted
    sources: Tensor  # [slots] int64
    decided: Decided | None = None  # without, the target agrees where its token is the drafted one

    @property
    def width(self) -> int:
        """The most draft tokens of a sequence."""
        return self.drafts.shape[1]


def num_columns(width: int) -> int:
    """Of a slot's line: four numbers, its samples, its draft tokens, their confidences."""
    return 4 + (1 + width) + 2 * width


def pack_lines(
    numbers: Sequence[Tensor], samples: Tensor, drafts: Tensor, confidence: Tensor
) -> Tensor:
    """A line for each slot: [slots, num_columns(width)] int64.

    The numbers are of draft tokens accepted, of those verified, of rows, and of the source.
    """
    words = confidence.view(torch.int32).to(torch.int64)
    return torch.cat([torch.stack(list(numbers), 1), samples, drafts, words], dim=1)


def advance(
    slots: SlotStates, step: Verified, lines: Tensor, history: Tensor | None, is_given: bool
) -> None:
    """Let every slot go on; what the step did for it goes to lines [slots, num_columns].

    history [slots, positions] int32 gets every token behind the first, its last column is for what
    is not to be kept. `is_given`: the drafts are the host's, who sees the end before it launches
    another step.
    """
    width, samples = step.width, step.samples
    starts = step.query_start[:-1].to(torch.int64)
    rows_of = step.query_start[1:].to(torch.int64) - starts
    verified = (rows_of - 1).clamp(min=0)
    if step.decided is not None:
        accepted, bonus = step.decided.acceptance
        drawn = step.decided.drawn
    else:
        accepted, bonus = accept_ragged(samples, step.tokens, step.query_start, 1 + width)
        drawn = samples
    accepted = accepted.clamp(min=0)  # who has no rows accepts none
    if width and not is_given:
        # rows that belong to nobody are somebody's: they count for nothing
        most = (step.confidence > 0).cumprod(1).sum(1)
        most = torch.where(slots.limits < 0, most, torch.minimum(most, slots.limits))
        verified = torch.minimum(verified, most)
        is_cut = accepted > verified
        accepted = torch.minimum(accepted, verified)
        bonus = torch.where(is_cut, drawn[starts + accepted], samples[starts + accepted])
    place = torch.arange(1 + width, device=samples.device)
    spoken = samples[(starts.unsqueeze(1) + place).clamp(max=samples.shape[0] - 1)]
    spoken = spoken.scatter(1, accepted.unsqueeze(1), bonus.unsqueeze(1))
    numbers = [accepted, verified, rows_of, step.sources]
    lines.copy_(pack_lines(numbers, spoken, step.drafts, step.confidence))
    counts = (accepted + 1) * slots.alive
    owner = torch.arange(len(starts), device=starts.device)
    count_tokens(slots.flags, slots.facts, owner, spoken, counts)
    if history is not None:
        append_tokens(history, slots.lengths, spoken, counts)
    # where there is no token the host ends the request
    slots.anchors.copy_(torch.where(slots.alive > 0, bonus.clamp(min=0), slots.anchors))
    slots.lengths.add_(counts)
    if not is_given:
        slots.alive.mul_(~is_over(slots, spoken, accepted + 1))


def append_tokens(history: Tensor, lengths: Tensor, tokens: Tensor, counts: Tensor) -> None:
    """Write the first `counts` tokens of every slot behind its anchor, which is at `lengths`."""
    nowhere = history.shape[1] - 1  # what comes after the last position there is is dropped
    place = torch.arange(tokens.shape[1], device=tokens.device)
    columns = lengths.unsqueeze(1) + place
    columns = columns.masked_fill(place >= counts.unsqueeze(1), nowhere).clamp(max=nowhere)
    history.scatter_(1, columns.to(torch.int64), tokens.to(torch.int32))


def is_over(slots: SlotStates, tokens: Tensor, counts: Tensor) -> Tensor:
    """Whose answer has ended with the first counts [slots] of its new tokens [slots, width]."""
    place = torch.arange(tokens.shape[1], device=tokens.device)
    position = (slots.lengths - counts + 1).unsqueeze(1) + place
    stops = tokens.unsqueeze(2).eq(slots.stops.unsqueeze(1)).any(2)
    stops &= (place < counts.unsqueeze(1)) & (position >= slots.stops_from.unsqueeze(1))
    return stops.any(1) | (slots.lengths + 1 >= slots.ends)
