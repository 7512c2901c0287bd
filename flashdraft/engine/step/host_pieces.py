"""The pieces where the device is the host: the same buffers, and small arrays in numpy.

A torch operation on a handful of numbers takes longer than the numbers: there are dozens around
every pass. The host makes the drafts there, and reads each step before the next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flashdraft.engine.cache.storage import Rows
from flashdraft.engine.step.pieces import StepPieces
from flashdraft.engine.step.result import SlotResult, StepRecord
from flashdraft.engine.step.shape import StepShape
from flashdraft.kernels.interface import DrawnRows, PassRows


@dataclass(frozen=True)
class HostRecord(StepRecord):
    """A step of which the host knows already what it did for those who decode."""

    slots: Sequence[SlotResult] = ()

    def read_slots(self) -> list[SlotResult]:
        return list(self.slots)


class HostPieces(StepPieces):
    """Lays rows out, and keeps what was accepted, without torch."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        # the buffers as numpy sees them
        slots, exchange = self.slots, self.exchange
        self._np_anchors, self._np_lengths = slots.anchors.numpy(), slots.lengths.numpy()
        self._np_alive, self._np_tables = slots.alive.numpy(), slots.tables.numpy()
        self._np_counts, self._np_drafts = exchange.counts.numpy(), exchange.drafts.numpy()
        self._np_samples = self._samples.numpy()
        self._np_tokens, self._np_owner, self._np_positions = (
            one.numpy() for one in self._rows[:3]
        )
        self._np_places = self._rows.places.numpy()
        self._np_start = self._rows.query_start.numpy()
        self._np_nowhere = self._tables.nowhere.unsqueeze(1).numpy()
        # of the first slots, by how many, by pool
        self._first_tables: dict[int, list[Tensor]] = {}
        self._results: list[SlotResult] = []

    def _lay_out(self, shape: StepShape) -> None:
        assert shape.is_given
        batch, num_rows = shape.batch, shape.num_rows
        counts = np.ones(batch, dtype=np.int64)
        if shape.width:
            counts += self._np_counts[:batch]
        ends = counts.cumsum()
        owner = np.arange(batch).repeat(counts)
        place = np.arange(num_rows) - (ends - counts)[owner]
        tokens = self._np_anchors[owner]
        if shape.width:
            drafts = self._np_drafts[owner, np.maximum(place - 1, 0)]
            tokens = np.where(place > 0, drafts, tokens)
        positions = self._np_lengths[owner] + place
        self._np_tokens[:num_rows], self._np_owner[:num_rows] = tokens, owner
        self._np_positions[:num_rows] = positions
        page, offset = np.divmod(positions, self._cache.page_size)
        pages = np.where(
            self._np_alive[owner] > 0, self._np_tables[:, owner, page], self._np_nowhere
        )
        self._np_places[:, :num_rows] = pages * self._cache.page_size + offset
        self._np_start[:] = num_rows
        self._np_start[0], self._np_start[1 : batch + 1] = 0, ends

    def _place(self, rows: PassRows, num_rows: int, batch: int, width: int) -> Rows:
        if batch not in self._first_tables:
            self._first_tables[batch] = list(self.slots.tables[:, :batch])
        places = [torch.from_numpy(one[:num_rows]) for one in self._np_places]
        lengths, start = self.slots.lengths[:batch], rows.query_start[: batch + 1]
        tables = self._first_tables[batch]
        views = self._cache.views(start, lengths, tables, places, width, self.end)
        return Rows(rows.positions[:num_rows], self.end, views, [])

    def draw(self, shape: StepShape) -> None:
        num_rows = shape.num_rows
        owner, positions = self._rows.owner[:num_rows], self._np_positions[:num_rows]
        rows = DrawnRows(owner, torch.from_numpy(positions + 1), totals=self._has_totals)
        is_masked = self.exchange.is_masked
        if is_masked or self.slots.settings.any_penalised:  # what a row follows matters
            behind = torch.from_numpy(positions - self._np_lengths[self._np_owner[:num_rows]])
            rows = replace(rows, followed=self.exchange.drafts, ancestors=(2 << behind) - 1)
            if is_masked:
                mask_of = self.exchange.mask_of(owner, behind)
                rows = replace(rows, masks=self.exchange.masks, mask_of=mask_of)
        chosen = self._choose(self.hidden[:num_rows], rows, slice(0, num_rows))
        self._np_samples[:num_rows] = chosen.numpy()
        self._advance(shape)

    def _advance(self, shape: StepShape) -> None:
        starts = self._np_start[: shape.batch + 1].tolist()
        samples = self._np_samples[: shape.num_rows].tolist()
        tokens = self._np_tokens[: shape.num_rows].tolist()
        counts_tokens, self._results = self.slots.settings.any_penalised, []
        for slot, (begin, end) in enumerate(zip(starts[:-1], starts[1:], strict=True)):
            drawn, drafted = samples[begin:end], tokens[begin + 1 : end]
            pairs = zip(drawn, drafted, strict=False)
            accepted = next((i for i, (a, b) in enumerate(pairs) if a != b), len(drafted))
            said = drawn[: accepted + 1]
            self._results.append(SlotResult(accepted, drafted, said, [], num_rows=end - begin))
            if self._np_alive[slot]:
                self._np_anchors[slot] = max(drawn[accepted], 0)
                self._np_lengths[slot] += accepted + 1
                if counts_tokens:
                    self._count(slot, drawn[: accepted + 1])

    def _count(self, slot: int, tokens: list[int]) -> None:
        where, count = torch.tensor([slot]), torch.tensor([len(tokens)])
        self.slots.settings.count(where, torch.tensor([tokens]), count)

    def record(
        self,
        shape: StepShape,
        first_tokens: Tensor,
        scores: Tensor | None,
        prompt_scores: Sequence[Tensor | None],
        receive: Callable[[Tensor], Tensor],
    ) -> StepRecord:
        results = self._results if shape.batch else []
        lines = self.lines[:0]
        return HostRecord(lines, first_tokens, scores, shape.width, prompt_scores, slots=results)
