"""Random slots behind random steps, for `Kernels.advance`."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from flashdraft.core import SamplingParams
from flashdraft.kernels.advance import SlotStates, Verified, num_columns
from flashdraft.kernels.draw.rule import SlotRequest, SlotSettings
from flashdraft.kernels.nodes import make_chain
from tests.laid_out import NUM_TOKENS, make_nodes

VOCABULARY = NUM_TOKENS
NUM_STOPS = 8
POSITIONS = 64  # that histories have room for


class Step(NamedTuple):
    """What is given to `advance`."""

    slots: SlotStates
    verified: Verified
    lines: Tensor
    history: Tensor | None
    is_given: bool

    def copied(self, device: torch.device | None = None) -> Step:
        """The same, of which nothing is shared."""

        def copy(value: Any) -> Any:
            if isinstance(value, Tensor):
                return value.to(device or value.device, copy=True)
            return value if value is None else type(value)(*map(copy, value))

        history = self.history
        if history is not None:  # as it lies: behind columns of something else
            wide = torch.full((history.shape[0], history.shape[1] + 3), -7, dtype=torch.int32)
            wide[:, 3:] = history.cpu()
            history = wide.to(device or history.device)[:, 3:]
        lines = self.lines.to(device or self.lines.device, copy=True)
        return Step(copy(self.slots), copy(self.verified), lines, history, self.is_given)

    @property
    def written(self) -> list[Tensor]:
        """What `advance` writes."""
        history = [] if self.history is None else [self.history[:, :-1]]
        return [*self.slots[:3], self.slots.facts, self.lines, *history]


def make_step(
    seed: int,
    num_slots: int,
    num_nodes: int,
    is_given: bool,
    looks_up: bool,
    is_decided: bool = False,
    max_depth: int | None = None,
) -> Step:
    """Rows that were drawn and agree with trees here and there; some slots sleep or have none.

    Without a depth they are chains.
    """
    random = np.random.default_rng(seed)

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.from_numpy(random.integers(low, high, shape))

    settings = SlotSettings.allocate(num_slots, VOCABULARY, torch.device("cpu"))
    penalised = SamplingParams(presence_penalty=1.0)
    settings.set({slot: SlotRequest(penalised, 1, [1, 2]) for slot in range(0, num_slots, 2)})
    nodes = make_nodes(seed, num_slots, num_nodes, max_depth or 1)
    if max_depth is None:
        tokens = integers(0, VOCABULARY, num_slots, num_nodes)
        nodes = make_chain(tokens, nodes.confidence, nodes.survival)
    counts = integers(0, 2 + num_nodes, num_slots)
    counts[integers(0, 4, num_slots) == 0] = 0
    if is_given and max_depth is not None:  # the host gives rows to nodes that there are
        counts = torch.minimum(counts, 1 + (nodes.confidence > 0).sum(1))
    ends = counts.cumsum(0)
    query_start = torch.cat([ends.new_zeros(1), ends]).to(torch.int32)
    num_rows = int(ends[-1])
    samples = torch.full((num_rows + 1 + num_nodes,), -1, dtype=torch.int64)
    samples[:num_rows] = integers(-1, VOCABULARY, num_rows)
    for slot, start in enumerate(query_start[:-1].tolist()):  # mostly what some node says
        for node in range(int(counts[slot]) - 1):
            if random.random() < 0.8:
                samples[start + nodes.parents[slot, node]] = nodes.tokens[slot, node]
    decided = None
    if is_decided:  # otherwise than what was drawn: up to any node, verified or not
        ends = integers(0, 1 + num_nodes, num_slots, 1)
        roots = torch.ones(num_slots, 1, dtype=torch.int64)
        decided = torch.cat([roots, nodes.ancestors], dim=1).gather(1, ends).squeeze(1)
    stops = integers(0, VOCABULARY, num_slots, NUM_STOPS)
    stops[:, 2:] = -1
    if num_nodes:  # some that come up
        stops[::2, 1] = nodes.tokens[::2, num_nodes // 3]
    lengths = integers(1, POSITIONS, num_slots).to(torch.int32)
    history = integers(0, VOCABULARY, num_slots, POSITIONS + 1).to(torch.int32)
    slots = SlotStates(
        integers(0, VOCABULARY, num_slots),
        lengths,
        integers(0, 3, num_slots).clamp(max=1).to(torch.int32),
        integers(-1, num_nodes + 1, num_slots),
        lengths + integers(2, 30, num_slots),
        lengths + integers(-2, 6, num_slots),
        stops,
        settings.flags,
        settings.facts,
    )
    sources = integers(0, 2, num_slots)
    verified = Verified(samples, query_start, nodes, sources, decided)
    columns = num_columns(num_nodes if max_depth is None else max_depth, num_nodes)
    lines = torch.full((num_slots, columns), 7)
    return Step(slots, verified, lines, history if looks_up else None, is_given)
