"""The slots: the state of every running sequence, on the device.

The host writes between two launches, in the order of the device's work: who was in a slot when a
step was launched is who that step works for. This file knows no steps and no requests' ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flashdraft.engine.draft.lookup import TokenHistory
from flashdraft.engine.streams import Staging
from flashdraft.kernels.advance import SlotStates
from flashdraft.kernels.draw.rule import SlotRequest, SlotSettings

UPLOADS_IN_FLIGHT = 64
NUM_STOPS = 8  # stop tokens that the device knows; the host knows all
NEVER = 2**31 - 1


class SlotState(NamedTuple):
    """A sequence as a slot takes it in."""

    anchor: int
    length: int  # tokens that the cache holds
    request: SlotRequest
    is_awake: bool = True  # it decodes; else its prompt comes first
    tokens: Sequence[int] = ()  # all of them, where they are looked up
    limit: int = -1  # draft tokens that it verifies at most; -1 = its share
    end: int = NEVER  # tokens, prompt included, at which it ends
    branches: bool = False  # its drafts may be trees


class Slots:
    """Anchors, lengths, page tables and settings, a row or a column for each slot."""

    def __init__(
        self,
        count: int,
        num_pools: int,
        max_pages: int,
        vocab_size: int,
        device: torch.device,
        history: TokenHistory | None = None,
    ) -> None:
        self.history = history  # where what came before is looked up
        self.count, self.num_pools, self.max_pages = count, num_pools, max_pages
        self.tables = torch.zeros(num_pools, count, max_pages, dtype=torch.int32, device=device)
        self.anchors = torch.zeros(count, dtype=torch.int64, device=device)
        self.lengths = torch.zeros(count, dtype=torch.int32, device=device)
        self.alive = torch.zeros(count, dtype=torch.int32, device=device)  # 1 = it decodes
        self.limits = torch.full((count,), -1, dtype=torch.int64, device=device)
        # where a slot ends: tokens of its own, and from where on these stop it
        self.ends = torch.full((count,), NEVER, dtype=torch.int64, device=device)
        self.branches = torch.zeros(count, dtype=torch.int32, device=device)
        self._stops = torch.full((count, NUM_STOPS), -1, dtype=torch.int64, device=device)
        self._stops_from = torch.zeros(count, dtype=torch.int64, device=device)
        self.settings = SlotSettings.allocate(count, vocab_size, device)
        self.states = SlotStates(
            self.anchors,
            self.lengths,
            self.alive,
            self.limits,
            self.ends,
            self._stops_from,
            self._stops,
            self.settings.flags,
            self.settings.facts,
        )
        self._uploads = Staging(device, UPLOADS_IN_FLIGHT)

    def load(self, slot: int, state: SlotState) -> None:
        """Put a sequence into a slot."""
        request = state.request
        length = state.length if state.is_awake else 0
        stops = sorted(request.stop_ids)[:NUM_STOPS]
        free_from = len(request.prompt_ids) + request.params.min_tokens
        numbers = [slot, state.anchor, length, int(state.is_awake), state.limit, state.end]
        numbers += [int(state.branches), 0 if request.is_constrained else free_from]
        if self.history is not None:
            self.history.load(slot, 0, self.send(np.asarray(state.tokens, dtype=np.int64)))
        self._write([numbers + stops + [-1] * (NUM_STOPS - len(stops))])
        self.settings.set({slot: request}, self.send)

    def clear(self, slots: Sequence[int]) -> None:
        """Empty slots: they draft nothing, and write to the page of nobody."""
        self._write([[slot, 0, 0, 0, -1, NEVER, 0, 0] + [-1] * NUM_STOPS for slot in slots])
        self.settings.set(dict.fromkeys(slots), self.send)

    def wake(self, slots: Tensor, anchors: Tensor, lengths: Tensor) -> None:
        """From now on these slots decode, unless their first tokens are their last."""
        self.anchors.index_copy_(0, slots, anchors.clamp(min=0))
        self.lengths.index_copy_(0, slots, lengths.to(torch.int32))
        if self.history is not None:
            self.history.put(slots, lengths, anchors)
        is_last = self._stops[slots].eq(anchors.unsqueeze(1)).any(1)
        is_last &= lengths >= self._stops_from[slots]
        is_last |= lengths + 1 >= self.ends[slots]
        self.alive.index_copy_(0, slots, (~is_last).to(torch.int32))

    def move(self, order: Sequence[int]) -> None:
        """Lay the slots out anew: slot i becomes what slot order[i] was."""
        index = self.send(np.asarray(order, dtype=np.int64))
        for state in self._states:
            state[: len(order)] = state[index]
        self.tables[:, : len(order)] = self.tables[:, index]
        if self.history is not None:
            self.history.move(index)
        moved = [slot for slot, source in enumerate(order) if slot != source]
        self.settings.move([order[slot] for slot in moved], moved, self.send)

    def write_pages(self, places: NDArray[np.int64], pages: NDArray[np.int64]) -> None:
        """Enter pages at flat places: (pool * count + slot) * max_pages + index."""
        if self.tables.device.type == "cpu":
            self.tables.numpy().reshape(-1)[places] = pages
        elif len(places):
            index, values = self.send(np.stack([places, pages]))
            self.tables.view(-1).index_copy_(0, index, values.to(torch.int32))

    def place_of(self, pool: int, slot: int) -> int:
        """Where a slot's table in a pool begins, for `write_pages`."""
        return (pool * self.count + slot) * self.max_pages

    def send(self, values: NDArray[np.int64]) -> Tensor:
        """Values on the device, without waiting for it."""
        return self._uploads.send(values)

    @property
    def _states(self) -> list[Tensor]:
        """In the order of `_write`."""
        numbers = [self.anchors, self.lengths, self.alive, self.limits, self.ends]
        return [*numbers, self.branches, self._stops_from, self._stops]

    def _write(self, rows: list[list[int]]) -> None:
        """Rows of a slot and the numbers of its state."""
        sent = self.send(np.asarray(rows, dtype=np.int64))
        slots, place = sent[:, 0], 1
        for state in self._states:
            values = sent[:, place] if state.ndim == 1 else sent[:, place:]
            state.index_copy_(0, slots, values.to(state.dtype))
            place += 1
