"""Random slots behind random steps, for `Kernels.advance`."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from flashdraft.core import SamplingParams
from flashdraft.kernels.accept import accept_ragged
from flashdraft.kernels.advance import Decided, SlotStates, Verified, num_columns
from flashdraft.kernels.draw.rule import SlotRequest, SlotSettings

VOCABULARY = 40
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
    width: int,
    is_given: bool,
    looks_up: bool,
    is_decided: bool = False,
) -> Step:
    """Rows that were drawn and agree with drafts here and there; some slots sleep or have none."""
    random = np.random.default_rng(seed)

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.from_numpy(random.integers(low, high, shape))

    settings = SlotSettings.allocate(num_slots, VOCABULARY, torch.device("cpu"))
    penalised = SamplingParams(presence_penalty=1.0)
    settings.set({slot: SlotRequest(penalised, 1, [1, 2]) for slot in range(0, num_slots, 2)})
    counts = integers(0, 2 + width, num_slots)
    counts[integers(0, 4, num_slots) == 0] = 0
    ends = counts.cumsum(0)
    query_start = torch.cat([ends.new_zeros(1), ends]).to(torch.int32)
    num_rows = int(ends[-1])
    samples = torch.full((num_rows + 1 + width,), -1, dtype=torch.int64)
    tokens = torch.full_like(samples, -2)
    samples[:num_rows] = integers(-1, VOCABULARY, num_rows)
    tokens[:num_rows] = integers(0, VOCABULARY, num_rows)
    agree = integers(0, 5, num_rows) > 0
    tokens[1 : num_rows + 1][agree] = samples[:num_rows][agree]
    drafts = integers(0, VOCABULARY, num_slots, width)
    confidence = torch.from_numpy(random.random((num_slots, width))).to(torch.float32)
    confidence[integers(0, 12, num_slots, width) == 0] = 0.0
    decided = None
    if is_decided:  # otherwise than what was drawn
        drawn = samples.clone()
        drawn[:num_rows] = integers(0, VOCABULARY, num_rows)
        decided = Decided(accept_ragged(samples, tokens, query_start, 1 + width), drawn)
    stops = integers(0, VOCABULARY, num_slots, NUM_STOPS)
    stops[:, 2:] = -1
    lengths = integers(1, POSITIONS, num_slots).to(torch.int32)
    history = integers(0, VOCABULARY, num_slots, POSITIONS + 1).to(torch.int32)
    slots = SlotStates(
        integers(0, VOCABULARY, num_slots),
        lengths,
        integers(0, 3, num_slots).clamp(max=1).to(torch.int32),
        integers(-1, width + 1, num_slots),
        lengths + integers(2, 30, num_slots),
        lengths + integers(-2, 6, num_slots),
        stops,
        settings.flags,
        settings.facts,
    )
    sources = integers(0, 2, num_slots)
    verified = Verified(samples, tokens, query_start, drafts, confidence, sources, decided)
    lines = torch.zeros(num_slots, num_columns(width), dtype=torch.int64)
    return Step(slots, verified, lines, history if looks_up else None, is_given)
