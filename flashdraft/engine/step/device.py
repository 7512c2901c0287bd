"""A step on the device, in three pieces: draft, verify, draw and accept.

The state of every slot (slots.py) and what one piece hands to the next live in fixed buffers, and a
piece reads and writes nothing else. So steps follow one another without the host, and on a GPU the
pieces of every shape are captured once as CUDA graphs and replayed. The first run of a piece runs
as it is, which compiles what it needs; it counts like any other. Chunks of prompts ride in the
target's pass; then only the draft is captured. Where a chunk ends with the anchor its slot wakes:
it decodes from the next step on. This file knows no requests: pipeline.py feeds it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flashdraft.engine.cache.storage import KVCache, Rows
from flashdraft.engine.draft.block import BlockProposer
from flashdraft.engine.drafts import Draft
from flashdraft.engine.policy.verify import BUCKET_EDGES
from flashdraft.engine.sampling.accept import Acceptance
from flashdraft.engine.step.guide import StepGuide
from flashdraft.engine.step.layout import count_up, lay_out_rows, pad_rows, share_slots
from flashdraft.engine.step.result import (
    SCORE_COLUMNS,
    StepRecord,
    StepResult,
    num_columns,
    pack_lines,
    pack_scores,
)
from flashdraft.engine.step.slots import Slots
from flashdraft.engine.streams import Clock, Graphs, Mark, Staging
from flashdraft.kernels.draw.rule import DrawnRows
from flashdraft.models.layers import ForwardBatch, Target

AcceptFunction = Callable[[Tensor, Tensor, Tensor, int], Acceptance]
"""(samples [rows], tokens [rows], query_start [seqs + 1], most rows of one sequence).

Behind the last sequence's rows are as many of nobody as one sequence may have: who has no rows
begins there. What the function writes into `samples` is what is committed.
"""

RECORDS_IN_FLIGHT = 12
MAX_CHUNKS = 8  # of prompts in a step
MIXED_ROWS = (64, 128, 192, 256, 320, 384, 512, 640, 768, 1024, 1536)
"""Rows of the captured passes that have some of prompts; what is left is filled up."""
MANY_ROWS, MOST_FILLED = 768, 1.1
FEW_SLOTS = 8  # up to so many that decode beside prompts, attention is planned for few


class PromptChunk(NamedTuple):
    """Tokens that a step computes for a slot that sleeps."""

    slot: int
    start: int  # position of the first of them
    tokens: Sequence[int]
    emits: bool  # they end with the anchor: a token comes out, and the slot wakes


class StepShape(NamedTuple):
    """What the captured pieces of a step are fixed to."""

    batch: int  # slots that take part
    num_slots: int  # draft tokens verified, of all sequences together
    width: int  # draft tokens that the drafter fills in for each sequence; 0 = it does not run
    is_greedy: bool = True  # everybody takes the likeliest: the logits need not be written
    is_guided: bool = False  # a grammar has its say on some rows

    @property
    def num_rows(self) -> int:
        return self.batch + self.num_slots

    @property
    def draft_key(self) -> tuple[int, int, bool]:
        """What the draft is fixed to."""
        return self.batch, self.width, self.is_greedy


class StepSeconds(NamedTuple):
    """What a step took on the device."""

    total: float
    draft: float


class PendingStep:
    """A step on its way; `read` waits for it."""

    def __init__(self, shape: StepShape, record: StepRecord, drafting: Clock, clock: Clock) -> None:
        self.shape = shape
        self._record = record
        self._drafting, self._clock = drafting, clock  # of the draft, and of all the rest

    def read(self) -> StepResult:
        """Wait for the step, and read what it did."""
        self._clock.wait()
        return self._record.read()

    @property
    def seconds(self) -> StepSeconds | None:
        """What the step took on the device; None where that says nothing (it was a first one)."""
        is_typical = self._clock.is_typical and self._drafting.is_typical
        return self.device_seconds if is_typical else None

    @property
    def device_seconds(self) -> StepSeconds:
        """What the step took on the device, whatever that was."""
        draft = self._drafting.elapsed
        return StepSeconds(draft + self._clock.elapsed, draft)


class _Woken(NamedTuple):
    """The slots whose prompts end in a step."""

    slots: Tensor
    rows: Tensor  # of the pass: their last ones
    lengths: Tensor  # tokens that the cache then holds


class DeviceSteps:
    """Runs steps over a batch of slots."""

    def __init__(
        self,
        target: Target,
        proposer: BlockProposer | None,
        cache: KVCache,
        max_batch: int,
        max_length: int,
        max_prompt_rows: int,
        accept: AcceptFunction,
        may_be_guided: bool = False,
    ) -> None:
        self._target, self._proposer, self._cache = target, proposer, cache
        self._device, self._accept_rows = target.kernels.device, accept
        self._num_layers = len(target.config.layers)
        self._max_length, self.may_be_guided = max_length, may_be_guided
        self.max_width = proposer.max_drafts if proposer is not None else 0
        self.slots = Slots(
            max_batch,
            len(cache.windows),
            -(-max(max_length, MANY_ROWS) // cache.page_size),  # rows of nobody have a table too
            target.config.vocab_size,
            self._device,
        )
        # where rows of nobody are written to
        self.scratch_pages = cache.scratch_pages
        self._nowhere = torch.tensor(cache.scratch_pages, device=self._device).unsqueeze(1)
        # by confidence: how likely the target agrees with a draft token, once its turn comes
        self._chances = torch.full((len(BUCKET_EDGES) + 1,), 0.5, device=self._device)
        self._edges = torch.tensor(BUCKET_EDGES, device=self._device)
        self.graphs: Graphs[tuple[object, ...]] = Graphs(self._device)
        self._make_buffers(max_batch, max_batch * (1 + self.max_width), max_prompt_rows)
        self._launched: set[StepShape] = set()
        self._early: tuple[StepShape, int, Clock] | None = None  # drafts that nobody took yet
        self._seen_chunks: set[int] = set()  # orders of magnitude of passes that are not captured
        self._seen_wakes: set[tuple[bool, bool]] = set()  # greedy or not, guided or not
        self._downloads = Staging(self._device, RECORDS_IN_FLIGHT)
        # tables of angles grow by moving: they must have their final place before a capture
        target.prepare_positions(max_length)
        if proposer is not None:
            proposer.drafter.rope.table(max_length)

    def _make_buffers(self, max_batch: int, num_decoded: int, num_prompt_rows: int) -> None:
        """What one piece hands to the next, and the last one to the host."""

        def integers(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=self._device)

        width, nobody = self.max_width, 1 + self.max_width
        max_rows = max(num_decoded + num_prompt_rows, MIXED_ROWS[-1])
        self._drafts = integers(max_batch, width)
        self._confidence = torch.zeros(max_batch, width, device=self._device)
        self._tokens = integers(max_rows + nobody)
        self._owner, self._positions = integers(num_decoded), integers(max_rows)
        self._query_start = integers(max_batch + 1, dtype=torch.int32)
        # of prompts: who writes where, and one more sequence, whose rows fill up what is left
        slots = self.slots
        self._places = integers(slots.num_pools, max_rows)
        self._chunk_start = integers(MAX_CHUNKS + 2, dtype=torch.int32)
        self._chunk_lengths = integers(MAX_CHUNKS + 1, dtype=torch.int32)
        shape = slots.num_pools, MAX_CHUNKS + 1, slots.max_pages
        self._chunk_tables = integers(*shape, dtype=torch.int32)
        self._chunk_tables[:] = self._nowhere.to(torch.int32).unsqueeze(1)
        config, kernels = self._target.config, self._target.kernels
        self._hidden = torch.zeros(
            max_rows, config.hidden_size, dtype=kernels.dtype, device=self._device
        )
        # of grammars: masks, the first of which allows nothing and the second everything
        num_words = -(-config.vocab_size // 32)
        num_masks = 2 + num_decoded if self.may_be_guided else 0
        self._masks = integers(num_masks, num_words, dtype=torch.int32)
        self._masks[1:2] = -1
        self._mask_index = integers(max_batch, 1 + width)
        self._samples = integers(num_decoded + nobody)
        self._lines = integers(max_batch * num_columns(width))
        self._scores = integers(num_decoded + max_batch, SCORE_COLUMNS)

    def set_chances(self, chances: Sequence[float]) -> None:
        """How likely the target agrees, for each bucket of confidence."""
        bits = np.asarray(chances, dtype=np.float64).view(np.int64)
        self._chances.copy_(self.slots.send(bits).view(torch.float64))

    # -- the step ------------------------------------------------------------------------------

    def is_ready(
        self, shape: StepShape, chunks: Sequence[PromptChunk] = (), longest: int | None = None
    ) -> bool:
        """Whether a step of this shape takes no longer than any later one."""
        keys = [key for key, _ in self._pieces(shape)]
        if not chunks:
            return all(map(self.graphs.is_ready, keys))
        rows = shape.num_rows + sum(len(chunk.tokens) for chunk in chunks)
        is_ready = all(self.graphs.is_ready(key) for key in keys if key[0] != "verify")
        wakes = any(chunk.emits for chunk in chunks)
        is_ready &= not wakes or (shape.is_greedy, shape.is_guided) in self._seen_wakes
        if (size := self.fill_up(rows)) not in MIXED_ROWS:
            return is_ready and size.bit_length() in self._seen_chunks
        return is_ready and self._is_mixed_ready(size, shape.batch, longest or self._max_length)

    @property
    def ready_shapes(self) -> list[StepShape]:
        """Shapes that ran before and take no longer than any later one."""
        return [shape for shape in self._launched if self.is_ready(shape)]

    def is_failed(self, shape: StepShape) -> bool:
        """Whether a piece of this shape cannot be captured."""
        return any(key in self.graphs.failed for key, _ in self._pieces(shape))

    @torch.no_grad()
    def launch(
        self,
        shape: StepShape,
        chunks: Sequence[PromptChunk] = (),
        wants_scores: bool = False,
        guide: StepGuide | None = None,
        longest: int | None = None,
    ) -> PendingStep:
        """Start a step behind whatever was started before; it reads the slots as they are then.

        Scores are there only of steps that are not greedy. With a guide, which belongs to a shape
        that is guided, the host waits for the drafts, and has the target's pass for the masks. No
        key that is looked at lies behind `longest`.
        """
        assert (guide is not None) == shape.is_guided and not (guide and shape.is_greedy)
        assert shape.width <= self.max_width and shape.num_slots <= shape.batch * shape.width
        is_typical = self.is_ready(shape, chunks, longest)
        self._launched.add(shape)
        first_tokens = self._samples[:0]
        drafting = self._take_drafts(shape)
        drafts = self._fit_drafts(shape, guide) if guide is not None else {}
        begin = Mark(self._device)
        # verify and draw, or nothing where nobody decodes
        rest = [piece for piece in self._pieces(shape) if piece[0][0] != "draft"]
        if chunks:
            self._verify_beside(shape, chunks, longest or self._max_length)
        elif rest:
            self.graphs.call(*rest[0])
        if guide is not None:
            self._set_masks(guide.slots, *guide.masks(drafts))
        if rest:
            self.graphs.call(*rest[1])
        if chunks:
            first_tokens = self._wake(shape, self._woken_by(shape, chunks))
        record = self._receive(shape, first_tokens, wants_scores and not shape.is_greedy)
        return PendingStep(shape, record, drafting, Clock(begin, Mark(self._device), is_typical))

    @torch.no_grad()
    def draft_early(self, shape: StepShape) -> None:
        """Draft for a step that is likely to be next, while the host has yet to read the last.

        Slots may be emptied before it comes. Whoever sits down awake later, or moves, has no draft:
        the drafts are then made again.
        """
        self._early = None
        if shape.width:
            self._early = shape, self.slots.version, self._take_drafts(shape)

    def _take_drafts(self, shape: StepShape) -> Clock:
        """Have the drafts that a step needs; when they were made."""
        if self._early is not None:
            (early, version, clock), self._early = self._early, None
            if early.draft_key == shape.draft_key and version == self.slots.version:
                return clock
        begin, is_typical = Mark(self._device), True
        if shape.width:
            key, piece = next(self._pieces(shape))
            is_typical = self.graphs.is_ready(key)
            self.graphs.call(key, piece)
        return Clock(begin, Mark(self._device), is_typical)

    def _pieces(self, shape: StepShape) -> Iterator[tuple[tuple[object, ...], Callable[[], None]]]:
        """The functions that a step of this shape calls, and what each of them is fixed to."""
        batch, num_slots, width, is_greedy, is_guided = shape
        if batch == 0:
            return
        if width:
            yield ("draft", *shape.draft_key), lambda: self._draft(shape)
        yield ("verify", batch, num_slots, width), lambda: self._verify(shape)
        yield ("draw", shape.num_rows, width, is_greedy, is_guided), lambda: self._draw(shape)

    def _receive(self, shape: StepShape, first_tokens: Tensor, has_scores: bool) -> StepRecord:
        receive, columns = self._downloads.receive, num_columns(shape.width)
        lines = self._lines[: shape.batch * columns].view(shape.batch, columns)
        num_scores = shape.num_rows + len(first_tokens)
        scores = receive(self._scores[:num_scores]) if has_scores else None
        return StepRecord(receive(lines), receive(first_tokens), scores, shape.width)

    # -- draft ---------------------------------------------------------------------------------

    def _draft(self, shape: StepShape) -> None:
        """Draft tokens for every slot, and the drafter's confidence in each."""
        drafts, confidence = self._drafts_of(shape)
        self._drafts[: shape.batch, : shape.width] = drafts
        self._confidence[: shape.batch, : shape.width] = confidence

    def _drafts_of(self, shape: StepShape) -> tuple[Tensor, Tensor]:
        assert self._proposer is not None
        batch, width, drafter = shape.batch, shape.width, self._proposer.drafter
        anchors, lengths = self.slots.anchors[:batch], self.slots.lengths[:batch]
        # a drafter that was not trained on cut blocks drafts worse in them
        masked = width if drafter.config.any_width else self.max_width
        mask = anchors.new_full((batch, masked), drafter.config.mask_token_id)
        blocks = torch.cat([anchors.unsqueeze(1), mask], dim=1)
        layout = lay_out_rows(blocks, lengths, None, batch * (1 + masked))
        placed = self._place(layout.owner, layout.positions, layout.query_start, batch, 1 + masked)
        hidden = self._proposer.run_blocks(layout.tokens, placed)
        wanted = hidden.view(batch, 1 + masked, -1)[:, 1 : 1 + width].reshape(batch * width, -1)
        if shape.is_greedy:
            best = drafter.greedy(self._target, wanted)
            tokens, chance = best.index, (best.logit - best.log_total).exp()
        else:
            place = count_up(1 + width, self._device)[1:]
            positions = (lengths.unsqueeze(1) + place).flatten()
            owner = count_up(batch, self._device).repeat_interleave(width)
            logits = self._proposer.widen(drafter.logits(self._target, wanted).float())
            # penalties are those of what is committed; kernels are compiled for all rows alike
            rows = DrawnRows(owner, positions, self._drafts, torch.zeros_like(owner))
            drawn = self._target.kernels.draw(logits, self.slots.settings, rows)
            tokens, chance = drawn.tokens, (drawn.logit - drawn.log_total).exp()
        confidence = chance.nan_to_num(0.0).view(batch, width)
        return tokens.clamp(min=0).view(batch, width), confidence

    # -- verify --------------------------------------------------------------------------------

    def _verify(self, shape: StepShape) -> None:
        """The target's pass over anchors and draft tokens."""
        self._lay_out(shape)
        num_rows = shape.num_rows
        placed = self._place(
            self._owner[:num_rows],
            self._positions[:num_rows],
            self._query_start[: shape.batch + 1],
            shape.batch,
            1 + shape.width,
        )
        self._hidden[:num_rows] = self._forward(self._tokens[:num_rows], placed)

    def _verify_beside(self, shape: StepShape, chunks: Sequence[PromptChunk], longest: int) -> None:
        """The same with chunks of prompts behind."""
        num_rows = shape.num_rows
        num_all = num_rows + sum(len(chunk.tokens) for chunk in chunks)
        size = self.fill_up(num_all)
        self._query_start.zero_()
        if shape.batch:
            self._lay_out(shape)
            owner, positions = self._owner[:num_rows], self._positions[:num_rows]
            self._places[:, :num_rows] = self._places_of(owner, positions)
        self._lay_out_chunks(num_rows, size, chunks)
        num_slots = self._slots_beside(shape.batch)
        if size not in MIXED_ROWS:
            self._seen_chunks.add(size.bit_length())
            self._verify_mixed(size, num_slots, longest)
            return
        end = self._last_key(longest)
        self.graphs.call(
            ("mixed", size, num_slots, end), lambda: self._verify_mixed(size, num_slots, end)
        )

    def _last_key(self, longest: int) -> int:
        """Up to where a captured pass with prompts may look, of which `longest` is needed."""
        if not self._target.kernels.exact:
            return self._max_length
        # its plans have as many splits as there may be keys
        return min(max(MANY_ROWS, 1 << (longest - 1).bit_length()), self._max_length)

    def _slots_beside(self, batch: int) -> int:
        """Slots that a pass with prompts looks at, of which the first `batch` decode."""
        if batch == 0:
            return 0
        return min(FEW_SLOTS, self.slots.count) if batch <= FEW_SLOTS else self.slots.count

    def fit_prompts(self, num_others: int, budget: int) -> int:
        """As many prompt rows, or somewhat fewer, as fill a pass beside so many others."""
        sizes = [size - num_others for size in MIXED_ROWS if self.graphs.captures]
        fitting = [rows for rows in sizes if budget // 2 <= rows <= budget]
        return max(fitting, default=budget)

    def _is_mixed_ready(self, num_rows: int, batch: int, longest: int) -> bool:
        """Whether a pass that has prompts beside so many who decode is captured."""
        key = "mixed", num_rows, self._slots_beside(batch), self._last_key(longest)
        return self.graphs.is_ready(key)

    def fill_up(self, num_rows: int) -> int:
        """Rows of the pass that so many take: where passes are captured, one of a few sizes.

        Many rows take the device longer than the host: rather than to fill up much, they run as
        they are.
        """
        size = next((size for size in MIXED_ROWS if size >= num_rows), num_rows)
        is_wasteful = num_rows > MANY_ROWS and size > MOST_FILLED * num_rows
        return num_rows if is_wasteful or not self.graphs.captures else size

    def _verify_mixed(self, num_rows: int, num_slots: int, end: int) -> None:
        """The target's pass over whatever is laid out; only the first slots may decode."""
        slots, places = self.slots, self._places[:, :num_rows]
        views = self._cache.views(
            self._chunk_start,
            self._chunk_lengths,
            self._chunk_tables,
            places,
            num_rows,
            end,
        )
        if num_slots:
            few = self._cache.views(
                self._query_start[: num_slots + 1],
                slots.lengths[:num_slots],
                slots.tables[:, :num_slots],
                places,
                1 + self.max_width,
                end,
            )
            views = [one.followed_by(other) for one, other in zip(few, views, strict=True)]
        placed = Rows(self._positions[:num_rows], self._max_length, views, [])
        self._hidden[:num_rows] = self._forward(self._tokens[:num_rows], placed)

    def _lay_out_chunks(self, first: int, size: int, chunks: Sequence[PromptChunk]) -> None:
        """The rows of prompts, from `first` on, and those of nobody up to `size`."""
        assert len(chunks) <= MAX_CHUNKS
        counts = np.asarray([len(chunk.tokens) for chunk in chunks])
        starts = np.asarray([chunk.start for chunk in chunks])
        unused = MAX_CHUNKS - len(chunks)
        ends = first + np.cumsum(counts)
        num_left = size - int(ends[-1])
        ranges = [np.arange(a, a + n) for a, n in zip(starts, counts, strict=True)]
        slots = np.asarray([chunk.slot for chunk in chunks])
        parts = [
            np.concatenate([np.asarray(chunk.tokens) for chunk in chunks]),
            np.concatenate([*ranges, np.arange(num_left)]),
            np.repeat(slots, counts),
            np.concatenate([slots, np.zeros(unused)]),
            np.concatenate([starts, np.zeros(unused)]),
            np.concatenate([[first], ends, np.full(unused, ends[-1]), [size]]),
        ]
        sent = self.slots.send(np.concatenate(parts).astype(np.int64))
        cuts = np.cumsum([len(part) for part in parts])[:-1].tolist()
        tokens, positions, owner, own, lengths, query_start = sent.tensor_split(cuts)
        end = int(ends[-1])
        self._tokens[first:end] = tokens
        self._tokens[end:size] = 0
        self._positions[first:size] = positions
        page_size, tables = self._cache.page_size, self.slots.tables
        pages = tables[:, owner, positions[: end - first] // page_size].to(torch.int64)
        self._places[:, first:end] = pages * page_size + positions[: end - first] % page_size
        self._places[:, end:size] = self._nowhere * page_size
        self._chunk_start.copy_(query_start)
        self._chunk_lengths[:MAX_CHUNKS] = lengths
        self._chunk_tables[:, :MAX_CHUNKS] = tables[:, own]

    def _woken_by(self, shape: StepShape, chunks: Sequence[PromptChunk]) -> _Woken | None:
        """Who wakes."""
        ends = shape.num_rows + np.cumsum([len(chunk.tokens) for chunk in chunks])
        woken = [
            (chunk.slot, end - 1, chunk.start + len(chunk.tokens))
            for chunk, end in zip(chunks, ends, strict=True)
            if chunk.emits
        ]
        if not woken:
            return None
        return _Woken(*self.slots.send(np.asarray(woken, dtype=np.int64).T.copy()))

    def _wake(self, shape: StepShape, woken: _Woken | None) -> Tensor:
        """The first tokens of the answers to prompts that end."""
        if woken is None:
            return self._samples[:0]
        none = torch.zeros_like(woken.slots)
        masks = self._masks_of(woken.slots, none) if shape.is_guided else None
        rows = DrawnRows(woken.slots, woken.lengths, self._drafts, none, masks)
        place = slice(shape.num_rows, shape.num_rows + len(woken.slots))
        self._seen_wakes.add((shape.is_greedy, shape.is_guided))
        first_tokens = self._choose(self._hidden[woken.rows], rows, shape.is_greedy, place)
        self.slots.wake(woken.slots, first_tokens.clamp(min=0), woken.lengths)
        if not shape.is_greedy:
            one_each = torch.ones_like(woken.slots)
            self.slots.settings.count(woken.slots, first_tokens.unsqueeze(1), one_each)
        return first_tokens

    def _lay_out(self, shape: StepShape) -> None:
        """The rows of the target's pass: which tokens, where, for whom."""
        batch, width = shape.batch, shape.width
        anchors, lengths = self.slots.anchors[:batch], self.slots.lengths[:batch]
        blocks, counts = anchors.unsqueeze(1), None
        if width:
            blocks = torch.cat([blocks, self._drafts[:batch, :width]], dim=1)
            if shape.num_slots < batch * width:
                survival = self._survival(self._confidence[:batch, :width])
                survival = survival * self.slots.alive[:batch].unsqueeze(1)
                counts = share_slots(survival, shape.num_slots)
        rows = lay_out_rows(blocks, lengths, counts, shape.num_rows)
        self._tokens[: shape.num_rows] = rows.tokens
        self._owner[: shape.num_rows] = rows.owner
        self._positions[: shape.num_rows] = rows.positions
        self._query_start.fill_(shape.num_rows)  # slots that take no part have no rows
        self._query_start[: batch + 1] = rows.query_start

    def _forward(self, tokens: Tensor, placed: Rows) -> Tensor:
        """The target's hidden rows; the drafter's context of the same rows is written too."""
        layers = self._cache.layers(placed.views, 0, self._num_layers)
        batch = ForwardBatch(placed.positions, self._max_length, layers)
        output = self._target.forward(tokens, batch)
        if self._proposer is not None:
            assert output.taps is not None
            self._proposer.write_context(output.taps, placed)
        return output.hidden

    def _survival(self, confidence: Tensor) -> Tensor:
        """The chance that every draft token up to each one is accepted."""
        buckets = torch.bucketize(confidence.contiguous(), self._edges, right=True)
        return self._chances[buckets].cumprod(1)

    # -- draw and accept -----------------------------------------------------------------------

    def _draw(self, shape: StepShape) -> None:
        """A token from every row, the accepted prefix of every slot, and where it goes on."""
        num_rows, width, is_greedy = shape.num_rows, shape.width, shape.is_greedy
        slots, nobody = self.slots, 1 + width
        owner, positions = self._owner[:num_rows], self._positions[:num_rows]
        samples = self._samples[: num_rows + nobody]
        behind = positions - slots.lengths[owner]  # draft tokens that a row follows
        masks = self._masks_of(owner, behind) if shape.is_guided else None
        rows = DrawnRows(owner, positions + 1, self._drafts, behind, masks)
        hidden = self._hidden[:num_rows]
        samples[:num_rows] = self._choose(hidden, rows, is_greedy, slice(0, num_rows))
        samples[num_rows:] = -1
        tokens, query_start = self._tokens[: num_rows + nobody], self._query_start
        tokens[num_rows:] = -2
        accepted, bonus = torch.zeros_like(slots.anchors), samples[query_start[:-1].to(torch.int64)]
        if width:
            accepted, bonus = self._accept_rows(samples, tokens, query_start, 1 + width)
        widths = (query_start[1:] - query_start[:-1] - 1).to(torch.int64)
        spoken = pad_rows(samples, query_start, 1 + width)
        lines = pack_lines(
            accepted, widths, spoken, self._drafts[:, :width], self._confidence[:, :width]
        )
        self._lines[: lines.numel()] = lines.flatten()
        alive = slots.alive
        if not is_greedy:
            every = count_up(slots.count, self._device)
            slots.settings.count(every, spoken, (accepted + 1) * alive)
        # where there is no token the host ends the request
        slots.anchors.copy_(torch.where(alive > 0, bonus.clamp(min=0), slots.anchors))
        slots.lengths.add_((accepted + 1).to(torch.int32) * alive)

    def _choose(self, hidden: Tensor, rows: DrawnRows, is_greedy: bool, place: slice) -> Tensor:
        """The target's token for every row, -1 where there is none; its scores go to `place`."""
        if is_greedy:
            return self._target.greedy(hidden).index
        logits, settings = self._target.logits(hidden), self.slots.settings
        drawn = self._target.kernels.draw(logits, settings, rows)
        self._scores[place] = pack_scores(drawn)
        return drawn.tokens

    # -- grammars ------------------------------------------------------------------------------

    def _fit_drafts(self, shape: StepShape, guide: StepGuide) -> dict[int, Draft]:
        """Wait for the drafts of those who have a grammar, and put in what it forces."""
        slots = list(guide.decoding)
        if not slots or not shape.width:
            return {}
        chosen, width = self.slots.send(np.asarray(slots, dtype=np.int64)), shape.width
        both = [self._drafts[chosen, :width].double(), self._confidence[chosen, :width].double()]
        tokens, confidence = torch.stack(both).cpu()
        pairs = zip(slots, tokens.long().tolist(), confidence.tolist(), strict=True)
        fitted = guide.fit({slot: Draft(ids, chances) for slot, ids, chances in pairs})
        ids = np.asarray([fitted[slot].tokens for slot in slots], dtype=np.int64)
        chances = np.asarray([fitted[slot].confidence for slot in slots], dtype=np.float64)
        self._drafts[chosen, :width] = self.slots.send(ids)
        words = self.slots.send(chances.view(np.int64))
        self._confidence[chosen, :width] = words.view(torch.float64).float()
        return fitted

    def _set_masks(
        self, slots: Sequence[int], places: NDArray[np.int64], masks: NDArray[np.int32]
    ) -> None:
        """Masks of rows, by slot and draft tokens before; no way leads to the slots' other rows."""
        count = len(places)
        self._mask_index.fill_(1)
        sent = torch.from_numpy(masks)
        if self._device.type == "cuda":
            sent = sent.pin_memory().to(self._device, non_blocking=True)
        self._masks[2 : 2 + count] = sent
        self._mask_index.index_fill_(0, self.slots.send(np.asarray(slots, dtype=np.int64)), 0)
        where = self.slots.send(places.T.copy())
        self._mask_index[where[0], where[1]] = 2 + count_up(count, self._device)

    def _masks_of(self, owner: Tensor, place: Tensor) -> Tensor:
        return self._masks[self._mask_index[owner, place.clamp(0, self.max_width)]]

    # -- where rows go -------------------------------------------------------------------------

    def _place(
        self, owner: Tensor, positions: Tensor, query_start: Tensor, batch: int, width: int
    ) -> Rows:
        """Rows of the first slots."""
        tables, lengths = self.slots.tables[:, :batch], self.slots.lengths[:batch]
        places = self._places_of(owner, positions)
        views = self._cache.views(query_start, lengths, tables, places, width, self._max_length)
        return Rows(positions, self._max_length, views, [])

    def _places_of(self, owner: Tensor, positions: Tensor) -> Tensor:
        """Where keys and values go; those of slots that do not decode to the page of nobody."""
        size = self._cache.page_size
        pages = self.slots.tables[:, owner, positions // size].to(torch.int64)
        pages = torch.where(self.slots.alive[owner] > 0, pages, self._nowhere)
        return pages * size + (positions % size).unsqueeze(0)
