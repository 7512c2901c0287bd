"""How slots go on behind a step: what is kept of drafts, written down and counted, and who ends.

One rule, told here in tensors; a device may have it as a kernel of its own (`Kernels.advance`).
Nothing here waits for the device, and shapes depend on nothing but the arguments' own.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flashdraft.kernels.accept import find_agreed, walk
from flashdraft.kernels.draw.rule import count_tokens
from flashdraft.kernels.nodes import TreeNodes
from flashdraft.kernels.tree import TAKEN


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


class Verified(NamedTuple):
    """What a step found out. Rows of nobody stand behind the others: one sequence's, all -1."""

    samples: Tensor  # [rows + 1 + nodes] int64: the target's tokens, -1 where there is none
    query_start: Tensor  # [slots + 1] int32: who has no rows begins behind all others
    nodes: TreeNodes  # of every slot, of which the first were verified
    sources: Tensor  # [slots] int64: of the chains
    # [slots] int64: the rows of the path that somebody decided on, a bit each; without, the target
    # agrees where its token is the drafted one
    decided: Tensor | None = None

    @property
    def num_nodes(self) -> int:
        """The most of a slot."""
        return self.nodes.tokens.shape[1]


def num_columns(max_depth: int, num_nodes: int) -> int:
    """Of a slot's line: four numbers, samples and rows of its path, and three of every node."""
    return 4 + 2 * (1 + max_depth) + 3 * num_nodes


def depth_of(lines: Tensor, num_nodes: int) -> int:
    """How deep the trees may be for which there are such lines."""
    return (lines.shape[1] - 4 - 3 * num_nodes) // 2 - 1


def advance(
    slots: SlotStates, step: Verified, lines: Tensor, history: Tensor | None, is_given: bool
) -> None:
    """Let every slot go on; what the step did for it goes to lines [slots, num_columns].

    A line: nodes accepted, nodes verified, rows, the source; the samples along the path, -1 behind
    its end; the rows of the path; of the nodes the tokens, the parents, and the confidences' bits
    with the sources above them.
    history [slots, positions] int32 gets every token behind the first, its last column is for what
    is not to be kept. `is_given`: the drafts are the host's, who sees the end before it launches
    another step.
    """
    nodes, samples, max_depth = step.nodes, step.samples, depth_of(lines, step.num_nodes)
    starts = step.query_start[:-1].to(torch.int64)
    rows_of = step.query_start[1:].to(torch.int64) - starts
    is_node = find_verified(slots, nodes, rows_of, is_given)
    verified = is_node.sum(1)
    place = torch.arange(1 + max_depth, device=samples.device)
    agreed = find_agreed(samples, starts, nodes) if step.decided is None else step.decided
    accepted, path = walk(agreed, nodes, is_node, max_depth)
    spoken = samples[(starts.unsqueeze(1) + path).clamp(max=samples.shape[0] - 1)]
    bonus = spoken.gather(1, accepted.unsqueeze(1)).squeeze(1)
    spoken = spoken.masked_fill(place > accepted.unsqueeze(1), -1)
    words = nodes.confidence.view(torch.int32).to(torch.int64)
    words = words + (nodes.sources.to(torch.int64) << 32)
    numbers = torch.stack([accepted, verified, rows_of, step.sources], 1)
    lines.copy_(torch.cat([numbers, spoken, path, nodes.tokens, nodes.parents, words], dim=1))
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


def find_verified(slots: SlotStates, nodes: TreeNodes, rows_of: Tensor, is_given: bool) -> Tensor:
    """Which nodes count [slots, nodes], of the rows that slots have: the first ones of each.

    Rows that belong to nobody are somebody's, and those behind a sequence's end are kept nowhere.
    None counts from the first one on that is so deep that nothing is left for the target's own
    token behind it.
    """
    place = torch.arange(1, 1 + nodes.tokens.shape[1], device=rows_of.device)
    counts = place < rows_of.unsqueeze(1)
    if is_given:
        return counts
    limits, room = slots.limits.unsqueeze(1), (slots.ends - slots.lengths).unsqueeze(1)
    counts &= (limits < 0) | (place <= limits)
    is_node = (nodes.confidence > 0) & (nodes.depths <= room - TAKEN)
    return counts & (place < room) & is_node.cumprod(1).to(torch.bool)


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
