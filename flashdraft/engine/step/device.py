"""A whole step on the device: draft, share, verify, accept, and the inputs of the next step.

The state of every running sequence (anchor, length, page table) lives in fixed buffers, one slot
each, and a step reads and writes only these: so steps follow one another without the host, and on a
GPU each shape of step is captured once as a CUDA graph and replayed. The first step of a shape runs
as it is, which compiles what it needs; it counts like any other. Chunks of prompts ride in the same
pass of the target; a step that has some is not captured. Where a chunk ends with the anchor the
slot wakes: it decodes from the next step on. This file knows no requests: pipeline.py feeds it.
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
    is_awake: bool = True  # it decodes; else its prompt comes first


class PromptChunk(NamedTuple):
    """Tokens that a step computes for a slot that sleeps."""

    slot: int
    start: int  # position of the first of them
    tokens: Sequence[int]
    emits: bool  # they end with the anchor: a token comes out, and the slot wakes


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


class StepResult(NamedTuple):
    """What a step did."""

    slots: list[SlotResult]
    first_tokens: list[int]  # of the chunks that emit, in order; -1 where none can be chosen


class PendingStep:
    """A step on its way; `read` waits for it."""

    def __init__(self, shape: StepShape, record: Tensor, clock: Clock) -> None:
        self.shape = shape
        self._record = record
        self._clock = clock

    def read(self) -> StepResult:
        """Wait for the step, and read what it did."""
        self._clock.wait()
        record, num_columns = self._record.numpy(), _num_columns(self.shape.width)
        size = self.shape.batch * num_columns
        rows = record[:size].reshape(self.shape.batch, num_columns)
        return StepResult([_read(row, self.shape.width) for row in rows], record[size:].tolist())

    @property
    def seconds(self) -> float | None:
        """What the step took on the device; None where that says nothing (it was a first one)."""
        return self._clock.seconds


class _PromptRows(NamedTuple):
    """The rows of all chunks of a step."""

    tokens: Tensor  # [num_rows]
    positions: Tensor  # [num_rows]
    owner: Tensor  # [num_rows]: every row's slot
    chunk_slots: Tensor  # [num_chunks]
    starts: Tensor  # [num_chunks] int32
    query_start: Tensor  # [num_chunks + 1] int32
    last_rows: Tensor  # of the chunks that emit
    woken: Tensor  # and their slots
    lengths: Tensor  # and how many tokens the cache then holds, int32
    longest: int
    end: int  # the furthest position

    @property
    def num_rows(self) -> int:
        return len(self.tokens)


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
        # where rows of nobody are written to
        self._nowhere = torch.tensor(cache.scratch_pages, device=self._device).unsqueeze(1)
        self.max_width = proposer.max_drafts if proposer is not None else 0
        self.max_batch = max_batch
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
        size = max_batch * (_num_columns(self.max_width) + 1)
        self._record = torch.zeros(size, dtype=torch.int64, device=self._device)
        self.graphs: Graphs[StepShape] = Graphs(self._device)
        self._seen_chunks: set[int] = set()  # sizes of chunk steps that ran before
        self._uploads = Staging(self._device, UPLOADS_IN_FLIGHT)
        self._downloads = Staging(self._device, RECORDS_IN_FLIGHT)
        # tables of angles grow by moving: they must have their final place before a capture
        target.prepare_positions(max_length)
        if proposer is not None:
            proposer.drafter.rope.table(max_length)

    # -- what the host writes ------------------------------------------------------------------

    def load(self, slots: Sequence[int], states: Sequence[SlotState]) -> None:
        """Put sequences into slots."""
        numbers = [slots, [s.anchor for s in states], [s.length * s.is_awake for s in states]]
        numbers.append([int(s.is_awake) for s in states])
        vocab_size = self._target.config.vocab_size
        draws = [RowSettings.columns(state.params, vocab_size) for state in states]
        numbers += [[one[1] for one in draws], [noise_start(state.seed) for state in states]]
        floats = np.asarray([[one[0], one[2], one[3]] for one in draws], dtype=np.float64)
        values = np.concatenate([np.asarray(numbers, np.int64), floats.T.copy().view(np.int64)])
        self._set_state(self._uploads.send(values))

    def clear(self, slots: Sequence[int]) -> None:
        """Empty slots: they draft nothing, and write to the page of nobody."""
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
    def launch(self, shape: StepShape, chunks: Sequence[PromptChunk] = ()) -> PendingStep:
        """Start a step behind whatever was started before; it reads the slots as they are then."""
        assert shape.width <= self.max_width and shape.num_slots <= shape.batch * shape.width
        begin = Mark(self._device)
        if chunks:
            prompts = self._lay_out_prompts(chunks)
            kind = (prompts.num_rows + shape.num_rows).bit_length()
            is_typical = kind in self._seen_chunks
            self._seen_chunks.add(kind)
            self._advance(shape, prompts)
        else:
            is_typical = self.is_ready(shape)
            self.graphs.call(shape, lambda: self._advance(shape, None))
        size = shape.batch * _num_columns(shape.width) + sum(chunk.emits for chunk in chunks)
        record = self._downloads.receive(self._record[:size])
        return PendingStep(shape, record, Clock(begin, Mark(self._device), is_typical))

    def _advance(self, shape: StepShape, prompts: _PromptRows | None) -> None:
        batch, width = shape.batch, shape.width
        tables = self._tables[:, :batch]
        anchors, lengths, alive = (
            state[:batch] for state in (self._anchors, self._lengths, self._alive)
        )
        blocks, counts = anchors.unsqueeze(1), None
        confidence = torch.zeros(batch, 0, device=self._device)
        if width:
            drafts, confidence = self._draft(anchors, lengths, alive, tables, shape)
            blocks = torch.cat([blocks, drafts], dim=1)
            if shape.num_slots < batch * width:
                survival = self._survival(confidence) * alive.unsqueeze(1)
                counts = share_slots(survival, shape.num_slots)
        rows = self._lay_out(blocks, lengths, alive, counts, tables, shape.num_rows)
        samples = self._verify(rows, lengths, tables, 1 + width, shape.drawing, prompts)
        spoken, first_tokens = samples[: shape.num_rows], samples[shape.num_rows :]
        accepted, bonus = torch.zeros_like(anchors), spoken
        if width:
            accepted, bonus = self._accept(spoken, rows.tokens, rows.query_start, 1 + width)
        widths = (rows.query_start[1:] - rows.query_start[:-1] - 1).to(torch.int64)
        padded = pad_rows(spoken, rows.query_start, 1 + width)
        bits = confidence.view(torch.int32).to(torch.int64)
        columns = [accepted.unsqueeze(1), widths.unsqueeze(1), padded, blocks[:, 1:], bits]
        torch.cat(columns, dim=1, out=self._record_of(shape))
        anchors.copy_(bonus.clamp(min=0))  # where there is no token the host ends the request
        lengths.add_((accepted + 1).to(torch.int32) * alive)
        if prompts is not None:
            self._wake(prompts, first_tokens, shape)

    def _verify(
        self,
        rows: RowLayout,
        lengths: Tensor,
        tables: Tensor,
        width: int,
        drawing: Drawing,
        prompts: _PromptRows | None,
    ) -> Tensor:
        """The target's tokens: of every decoding row, then of every chunk that emits."""
        tokens, placed = rows.tokens, self._place(rows, lengths, tables, width)
        owner, positions = rows.owner, rows.positions
        if prompts is not None:
            tokens = torch.cat([tokens, prompts.tokens])
            placed = self._place_beside(placed, prompts)
            owner = torch.cat([owner, prompts.woken])
            positions = torch.cat([positions, prompts.positions[prompts.last_rows]])
        layers = self._cache.layers(placed.views, 0, self._num_layers)
        output = self._target.forward(
            tokens, ForwardBatch(placed.positions, self._max_length, layers)
        )
        if self._proposer is not None:
            assert output.taps is not None
            self._proposer.write_context(output.taps, placed)
        hidden = output.hidden
        if prompts is not None:
            num_rows = len(rows.tokens)
            hidden = torch.cat([hidden[:num_rows], hidden[num_rows:][prompts.last_rows]])
        if not len(hidden):
            return tokens[:0]
        if drawing is Drawing.GREEDY:
            return self._target.greedy(hidden).index
        return self._draw(self._target.logits(hidden), owner, positions + 1, drawing)

    def _lay_out_prompts(self, chunks: Sequence[PromptChunk]) -> _PromptRows:
        counts = np.asarray([len(chunk.tokens) for chunk in chunks])
        starts = np.asarray([chunk.start for chunk in chunks])
        slots = np.asarray([chunk.slot for chunk in chunks])
        ends = np.cumsum(counts)
        emits = np.asarray([chunk.emits for chunk in chunks])
        ranges = [np.arange(c.start, c.start + len(c.tokens)) for c in chunks]
        parts: list[NDArray[np.int64]] = [
            np.concatenate([np.asarray(chunk.tokens, np.int64) for chunk in chunks]),
            np.concatenate(ranges),
            np.repeat(slots, counts),
            slots,
            starts,
            np.concatenate([[0], ends]),
            (ends - 1)[emits],
            slots[emits],
            (starts + counts)[emits],
        ]
        sent = self._uploads.send(np.concatenate(parts).astype(np.int64))
        pieces = sent.split([len(part) for part in parts])
        tokens, positions, owner, chunk_slots, first, query_start, last_rows, woken, held = pieces
        return _PromptRows(
            tokens,
            positions,
            owner,
            chunk_slots,
            first.to(torch.int32),
            query_start.to(torch.int32),
            last_rows,
            woken,
            held.to(torch.int32),
            int(counts.max()),
            int((starts + counts).max()),
        )

    def _place_beside(self, placed: Rows, prompts: _PromptRows) -> Rows:
        """The decoding rows, and the prompts' behind them, with a launch of attention of its own."""
        size, tables = self._cache.page_size, self._tables[:, prompts.chunk_slots]
        pages = self._tables[:, prompts.owner, prompts.positions // size].to(torch.int64)
        slots = pages * size + (prompts.positions % size).unsqueeze(0)
        beside = self._cache.views(
            prompts.query_start, prompts.starts, tables, slots, prompts.longest, prompts.end
        )
        views = [first.followed_by(then) for first, then in zip(placed.views, beside, strict=True)]
        positions = torch.cat([placed.positions, prompts.positions])
        return Rows(positions, self._max_length, views, [])

    def _wake(self, prompts: _PromptRows, tokens: Tensor, shape: StepShape) -> None:
        """Slots whose prompt is done decode from the next step on."""
        size = shape.batch * _num_columns(shape.width)
        self._record[size : size + len(tokens)] = tokens
        self._anchors.index_copy_(0, prompts.woken, tokens.clamp(min=0))
        self._lengths.index_copy_(0, prompts.woken, prompts.lengths)
        self._alive.index_fill_(0, prompts.woken, 1)

    def _record_of(self, shape: StepShape) -> Tensor:
        num_columns = _num_columns(shape.width)
        return self._record[: shape.batch * num_columns].view(shape.batch, num_columns)

    def _draft(
        self, anchors: Tensor, lengths: Tensor, alive: Tensor, tables: Tensor, shape: StepShape
    ) -> tuple[Tensor, Tensor]:
        """Draft tokens [batch, width] and the drafter's confidence in each."""
        assert self._proposer is not None
        width, batch, drafter = shape.width, len(anchors), self._proposer.drafter
        # a drafter that was not trained on cut blocks drafts worse in them
        masked = width if drafter.config.any_width else self.max_width
        mask = anchors.new_full((batch, masked), drafter.config.mask_token_id)
        blocks = torch.cat([anchors.unsqueeze(1), mask], dim=1)
        rows = self._lay_out(blocks, lengths, alive, None, tables, batch * (1 + masked))
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

    def _lay_out(
        self,
        blocks: Tensor,
        lengths: Tensor,
        alive: Tensor,
        counts: Tensor | None,
        tables: Tensor,
        num_rows: int,
    ) -> RowLayout:
        return lay_out_rows(
            blocks, lengths, alive, counts, tables, self._nowhere, self._cache.page_size, num_rows
        )

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
