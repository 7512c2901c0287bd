"""A whole step on the device: draft, share, verify, accept, and the inputs of the next step.

The state of every running sequence (anchor, length, page table) lives in fixed buffers, one slot
each, and a step reads and writes only these: so steps follow one another without the host, and on a
GPU each shape of step is captured once as a CUDA graph and replayed. The first step of a shape runs
as it is, which compiles what it needs; it counts like any other. This file knows no requests:
ahead.py feeds it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flashdraft.core import SamplingParams
from flashdraft.engine.cache.storage import KVCache, Rows
from flashdraft.engine.draft.block import BlockProposer
from flashdraft.engine.policy.verify import BUCKET_EDGES
from flashdraft.engine.sampling.accept import Acceptance
from flashdraft.engine.sampling.draw import MAX_KEPT, Drawing, RowSettings, draw_rows
from flashdraft.engine.sampling.noise import keys_from, noise_start
from flashdraft.engine.step.layout import RowLayout, lay_out_rows, pad_rows, share_slots
from flashdraft.engine.streams import Clock, Graphs, Mark, Staging
from flashdraft.models.layers import ForwardBatch, Target

AcceptFunction = Callable[[Tensor, Tensor, Tensor, int], Acceptance]
"""(samples [rows], tokens [rows], query_start [seqs + 1], most rows of one sequence)."""

UPLOADS_IN_FLIGHT = 64
RECORDS_IN_FLIGHT = 4


class SlotState(NamedTuple):
    """A sequence as a slot takes it in."""

    anchor: int
    length: int  # tokens that the cache holds
    params: SamplingParams
    seed: int


class StepShape(NamedTuple):
    """What a captured step is fixed to."""

    batch: int  # slots that take part
    num_slots: int  # draft tokens verified, of all sequences together
    width: int  # draft tokens that the drafter fills in for each sequence; 0 = it does not run
    drawing: Drawing = Drawing.GREEDY

    @property
    def num_rows(self) -> int:
        return self.batch + self.num_slots


@dataclass
class SlotResult:
    """What a step did for one slot."""

    num_accepted: int
    drafts: list[int]  # those that were verified
    samples: list[int]  # the target's tokens, one per row; -1 where none can be chosen
    confidence: list[float]  # of every draft token that was filled in, verified or not


class Flight:
    """A step on its way: its results are there after `land`."""

    def __init__(self, shape: StepShape, record: Tensor, clock: Clock) -> None:
        self.shape = shape
        self._record = record
        self._clock = clock

    def land(self) -> list[SlotResult]:
        """Wait for the step, and read what it did for every slot."""
        self._clock.wait()
        return [_read(row, self.shape.width) for row in self._record.numpy()]

    @property
    def seconds(self) -> float | None:
        """What the step took on the device; None where that says nothing (it was a first one)."""
        return self._clock.seconds


class DeviceSteps:
    """Runs steps over a batch of slots and keeps their state."""

    def __init__(
        self,
        target: Target,
        proposer: BlockProposer | None,
        cache: KVCache,
        max_batch: int,
        max_length: int,
        accept: AcceptFunction,
    ) -> None:
        self._target, self._proposer, self._cache = target, proposer, cache
        self._device, self._accept = target.kernels.device, accept
        self._num_layers = len(target.config.layers)
        self._max_length = max_length
        self.num_pools, self.max_pages = len(cache.windows), -(-max_length // cache.page_size)
        self.scratch_pages = cache.scratch_pages
        self.max_width = proposer.max_drafts if proposer is not None else 0
        shape = (self.num_pools, max_batch, self.max_pages)
        self._tables = torch.zeros(shape, dtype=torch.int32, device=self._device)
        self._anchors = torch.zeros(max_batch, dtype=torch.int64, device=self._device)
        self._lengths = torch.zeros(max_batch, dtype=torch.int32, device=self._device)
        self._alive = torch.zeros(max_batch, dtype=torch.int32, device=self._device)
        self._draws = torch.zeros(3, max_batch, dtype=torch.float64, device=self._device)
        self._draw_numbers = torch.zeros(2, max_batch, dtype=torch.int64, device=self._device)
        # by confidence: how likely the target agrees with a draft token, once its turn comes
        self._chances = torch.full((len(BUCKET_EDGES) + 1,), 0.5, device=self._device)
        self._edges = torch.tensor(BUCKET_EDGES, device=self._device)
        size = max_batch * _num_columns(self.max_width)
        self._record = torch.zeros(size, dtype=torch.int64, device=self._device)
        self.graphs: Graphs[StepShape] = Graphs(self._device)
        self._uploads = Staging(self._device, UPLOADS_IN_FLIGHT)
        self._downloads = Staging(self._device, RECORDS_IN_FLIGHT)
        # tables of angles grow by moving: they must have their final place before a capture
        target.prepare_positions(max_length)
        if proposer is not None:
            proposer.drafter.rope.table(max_length)

    # -- what the host writes ------------------------------------------------------------------

    def load(self, slots: Sequence[int], states: Sequence[SlotState]) -> None:
        """Put sequences into slots."""
        numbers = [slots, [s.anchor for s in states], [s.length for s in states], [1] * len(slots)]
        vocab_size = self._target.config.vocab_size
        draws = [RowSettings.columns(state.params, vocab_size) for state in states]
        numbers += [[one[1] for one in draws], [noise_start(state.seed) for state in states]]
        floats = np.asarray([[one[0], one[2], one[3]] for one in draws], dtype=np.float64)
        values = np.concatenate([np.asarray(numbers, np.int64), floats.T.copy().view(np.int64)])
        self._set_state(self._uploads.send(values))

    def clear(self, slots: Sequence[int]) -> None:
        """Empty slots: they draft nothing, and write to wherever their table says."""
        values = np.zeros((9, len(slots)), dtype=np.int64)
        values[0] = slots
        self._set_state(self._uploads.send(values))

    def _set_state(self, values: Tensor) -> None:
        slots, anchors, lengths, alive = values[:4]
        self._anchors.index_copy_(0, slots, anchors)
        self._lengths.index_copy_(0, slots, lengths.to(torch.int32))
        self._alive.index_copy_(0, slots, alive.to(torch.int32))
        self._draw_numbers.index_copy_(1, slots, values[4:6])
        self._draws.index_copy_(1, slots, values[6:9].view(torch.float64))

    def move(self, order: Sequence[int]) -> None:
        """Lay the slots out anew: slot i becomes what slot order[i] was."""
        index = self._uploads.send(np.asarray(order, dtype=np.int64))
        for state in (self._anchors, self._lengths, self._alive):
            state[: len(order)] = state[index]
        for table in (self._draw_numbers, self._draws, self._tables):
            table[:, : len(order)] = table[:, index]

    def write_pages(self, places: NDArray[np.int64], pages: NDArray[np.int64]) -> None:
        """Enter pages at flat places: (pool * max_batch + slot) * max_pages + index."""
        if len(places):
            index, values = self._uploads.send(np.stack([places, pages]))
            self._tables.view(-1).index_copy_(0, index, values.to(torch.int32))

    def place_of(self, pool: int, slot: int) -> int:
        """Where a slot's table in a pool begins, for `write_pages`."""
        return (pool * self._tables.shape[1] + slot) * self.max_pages

    def set_chances(self, chances: Sequence[float]) -> None:
        """How likely the target agrees, for each bucket of confidence."""
        bits = np.asarray(chances, dtype=np.float64).view(np.int64)
        self._chances.copy_(self._uploads.send(bits).view(torch.float64))

    # -- the step ------------------------------------------------------------------------------

    @property
    def captured(self) -> Iterable[StepShape]:
        """Shapes that are graphs by now."""
        return self.graphs

    def is_ready(self, shape: StepShape) -> bool:
        """Whether a step of this shape takes no longer than any later one."""
        return self.graphs.is_ready(shape)

    @torch.no_grad()
    def launch(self, shape: StepShape) -> Flight:
        """Start a step behind whatever was started before; it reads the slots as they are then."""
        assert shape.width <= self.max_width and shape.num_slots <= shape.batch * shape.width
        begin = Mark(self._device)
        is_typical = self.is_ready(shape)
        self.graphs.call(shape, lambda: self._advance(shape))
        record = self._downloads.receive(self._record_of(shape))
        return Flight(shape, record, Clock(begin, Mark(self._device), is_typical))

    def _advance(self, shape: StepShape) -> None:
        batch, width = shape.batch, shape.width
        tables = self._tables[:, :batch]
        anchors, lengths, alive = (
            state[:batch] for state in (self._anchors, self._lengths, self._alive)
        )
        blocks, counts = anchors.unsqueeze(1), None
        confidence = torch.zeros(batch, 0, device=self._device)
        if width:
            drafts, confidence = self._draft(anchors, lengths, tables, shape)
            blocks = torch.cat([blocks, drafts], dim=1)
            if shape.num_slots < batch * width:
                survival = self._survival(confidence) * alive.unsqueeze(1)
                counts = share_slots(survival, shape.num_slots)
        rows = lay_out_rows(blocks, lengths, counts, tables, self._cache.page_size, shape.num_rows)
        placed = self._place(rows, lengths, tables, 1 + width)
        batch_rows = ForwardBatch(
            rows.positions,
            self._max_length,
            self._cache.layers(placed.views, 0, self._num_layers),
        )
        output = self._target.forward(rows.tokens, batch_rows)
        if shape.drawing is Drawing.GREEDY:
            samples = self._target.greedy(output.hidden).index
        else:
            logits = self._target.logits(output.hidden)
            samples = self._draw(logits, rows.owner, rows.positions + 1, shape.drawing)
        if self._proposer is not None:
            assert output.taps is not None
            self._proposer.write_context(output.taps, placed)
        accepted, bonus = torch.zeros_like(anchors), samples
        if width:
            accepted, bonus = self._accept(samples, rows.tokens, rows.query_start, 1 + width)
        widths = (rows.query_start[1:] - rows.query_start[:-1] - 1).to(torch.int64)
        spoken = pad_rows(samples, rows.query_start, 1 + width)
        bits = confidence.view(torch.int32).to(torch.int64)
        columns = [accepted.unsqueeze(1), widths.unsqueeze(1), spoken, blocks[:, 1:], bits]
        torch.cat(columns, dim=1, out=self._record_of(shape))
        anchors.copy_(bonus.clamp(min=0))  # where there is no token the host ends the request
        lengths.add_((accepted + 1).to(torch.int32) * alive)

    def _record_of(self, shape: StepShape) -> Tensor:
        num_columns = _num_columns(shape.width)
        return self._record[: shape.batch * num_columns].view(shape.batch, num_columns)

    def _draft(
        self, anchors: Tensor, lengths: Tensor, tables: Tensor, shape: StepShape
    ) -> tuple[Tensor, Tensor]:
        """Draft tokens [batch, width] and the drafter's confidence in each."""
        assert self._proposer is not None
        width, batch, drafter = shape.width, len(anchors), self._proposer.drafter
        # a drafter that was not trained on cut blocks drafts worse in them
        masked = width if drafter.config.any_width else self.max_width
        mask = anchors.new_full((batch, masked), drafter.config.mask_token_id)
        blocks = torch.cat([anchors.unsqueeze(1), mask], dim=1)
        rows = lay_out_rows(
            blocks, lengths, None, tables, self._cache.page_size, batch * (1 + masked)
        )
        placed = self._place(rows, lengths, tables, 1 + masked)
        hidden = self._proposer.run_blocks(rows.tokens, placed)
        wanted = hidden.view(batch, 1 + masked, -1)[:, 1 : 1 + width].reshape(batch * width, -1)
        if shape.drawing is Drawing.GREEDY:
            best = drafter.greedy(self._target, wanted)
            tokens, chance = best.index, (best.logit - best.log_total).exp()
        else:
            place = torch.arange(1, 1 + width, device=self._device)
            positions = (lengths.unsqueeze(1) + place).flatten()
            owner = torch.arange(batch, device=self._device).repeat_interleave(width)
            logits = self._proposer.widen(drafter.logits(self._target, wanted).float())
            tokens = self._draw(logits, owner, positions, shape.drawing)
            chosen = logits.gather(1, tokens.clamp(min=0).unsqueeze(1)).squeeze(1)
            chance = (chosen - logits.logsumexp(1)).exp()
        confidence = chance.nan_to_num(0.0).view(batch, width)
        return tokens.clamp(min=0).view(batch, width), confidence

    def _draw(self, logits: Tensor, owner: Tensor, positions: Tensor, drawing: Drawing) -> Tensor:
        """A token for every row, by its request's settings and the noise of its position."""
        temperature, top_p, least = self._draws[:, owner]
        top_k, start = self._draw_numbers[:, owner]
        settings = RowSettings(
            temperature.float(), top_k, top_p, least.float(), keys_from(start, positions)
        )
        return draw_rows(logits, settings, MAX_KEPT if drawing is Drawing.FILTERED else None)

    def _survival(self, confidence: Tensor) -> Tensor:
        """The chance that every draft token up to each one is accepted."""
        buckets = torch.bucketize(confidence, self._edges, right=True)
        return self._chances[buckets].cumprod(1)

    def _place(self, rows: RowLayout, lengths: Tensor, tables: Tensor, width: int) -> Rows:
        views = self._cache.views(
            rows.query_start, lengths, tables, rows.slots, width, self._max_length
        )
        return Rows(rows.positions, self._max_length, views, [])


def _num_columns(width: int) -> int:
    """Of a slot's record: two counts, samples, draft tokens, confidences."""
    return 2 + (1 + width) + 2 * width


def _read(row: NDArray[np.int64], width: int) -> SlotResult:
    num_accepted, num_verified = int(row[0]), int(row[1])
    samples, drafts = row[2 : 3 + width], row[3 + width : 3 + 2 * width]
    confidence = row[3 + 2 * width :].astype(np.int32).view(np.float32)
    return SlotResult(
        num_accepted,
        drafts[:num_verified].tolist(),
        samples[: 1 + num_verified].tolist(),
        confidence.tolist(),
    )
