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

from flashdraft.engine.streams import Staging
from flashdraft.kernels.draw.rule import SlotRequest, SlotSettings

UPLOADS_IN_FLIGHT = 64


class SlotState(NamedTuple):
    """A sequence as a slot takes it in."""

    anchor: int
    length: int  # tokens that the cache holds
    request: SlotRequest
    is_awake: bool = True  # it decodes; else its prompt comes first


class Slots:
    """Anchors, lengths, page tables and settings, a row or a column for each slot."""

    def __init__(
        self, count: int, num_pools: int, max_pages: int, vocab_size: int, device: torch.device
    ) -> None:
        self.count, self.num_pools, self.max_pages = count, num_pools, max_pages
        self.tables = torch.zeros(num_pools, count, max_pages, dtype=torch.int32, device=device)
        self.anchors = torch.zeros(count, dtype=torch.int64, device=device)
        self.lengths = torch.zeros(count, dtype=torch.int32, device=device)
        self.alive = torch.zeros(count, dtype=torch.int32, device=device)  # 1 = it decodes
        self.settings = SlotSettings.allocate(count, vocab_size, device)
        self.version = 0  # rises when somebody who decodes comes or changes place
        self._uploads = Staging(device, UPLOADS_IN_FLIGHT)

    def load(self, slot: int, state: SlotState) -> None:
        """Put a sequence into a slot."""
        self.version += state.is_awake
        length = state.length if state.is_awake else 0
        self._write([[slot], [state.anchor], [length], [int(state.is_awake)]])
        self.settings.set({slot: state.request}, self.send)

    def clear(self, slots: Sequence[int]) -> None:
        """Empty slots: they draft nothing, and write to the page of nobody."""
        zeros = [0] * len(slots)
        self._write([list(slots), zeros, zeros, zeros])
        self.settings.set(dict.fromkeys(slots), self.send)

    def wake(self, slots: Tensor, anchors: Tensor, lengths: Tensor) -> None:
        """From now on these slots decode."""
        self.anchors.index_copy_(0, slots, anchors)
        self.lengths.index_copy_(0, slots, lengths.to(torch.int32))
        self.alive.index_fill_(0, slots, 1)

    def move(self, order: Sequence[int]) -> None:
        """Lay the slots out anew: slot i becomes what slot order[i] was."""
        self.version += 1
        index = self.send(np.asarray(order, dtype=np.int64))
        for state in (self.anchors, self.lengths, self.alive):
            state[: len(order)] = state[index]
        self.tables[:, : len(order)] = self.tables[:, index]
        moved = [slot for slot, source in enumerate(order) if slot != source]
        self.settings.move([order[slot] for slot in moved], moved, self.send)

    def write_pages(self, places: NDArray[np.int64], pages: NDArray[np.int64]) -> None:
        """Enter pages at flat places: (pool * count + slot) * max_pages + index."""
        if len(places):
            index, values = self.send(np.stack([places, pages]))
            self.tables.view(-1).index_copy_(0, index, values.to(torch.int32))

    def place_of(self, pool: int, slot: int) -> int:
        """Where a slot's table in a pool begins, for `write_pages`."""
        return (pool * self.count + slot) * self.max_pages

    def send(self, values: NDArray[np.int64]) -> Tensor:
        """Values on the device, without waiting for it."""
        return self._uploads.send(values)

    def _write(self, columns: list[list[int]]) -> None:
        slots, anchors, lengths, alive = self.send(np.asarray(columns, dtype=np.int64))
        self.anchors.index_copy_(0, slots, anchors)
        self.lengths.index_copy_(0, slots, lengths.to(torch.int32))
        self.alive.index_copy_(0, slots, alive.to(torch.int32))
