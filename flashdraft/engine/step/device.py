"""Steps on the device: the three pieces (pieces.py) launched back to back, and read later.

On a GPU the pieces of every shape are captured once as CUDA graphs and replayed. The first run of a
piece runs as it is, which compiles what it needs; it counts like any other. Where the host makes
the drafts (on a CPU) the first piece is its own, and it says how many of them are verified. This
file knows no requests: pipeline.py feeds it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from flashdraft.engine.cache.storage import KVCache
from flashdraft.engine.draft.block import BlockProposer
from flashdraft.engine.pictures import PictureFeatures
from flashdraft.engine.step.guide import StepGuide
from flashdraft.engine.step.host_pieces import HostPieces
from flashdraft.engine.step.picture_rows import PassPictures
from flashdraft.engine.step.pieces import AcceptFunction, StepLimits, StepPieces
from flashdraft.engine.step.result import StepRecord, StepResult
from flashdraft.engine.step.score import score_prompts
from flashdraft.engine.step.shape import (
    FEW_SLOTS,
    LONE_ROWS,
    MANY_ROWS,
    MIXED_ROWS,
    PromptChunk,
    StepShape,
    StepSizes,
)
from flashdraft.engine.streams import Clock, Graphs, Mark, Staging
from flashdraft.models.layers import Target

MOST_FILLED = 1.1  # of many rows of a pass, with those of nobody
MEAN_VERIFIED = (0, 1, 2, 3, 5, 7, 10, 15, 31, 63)  # a sequence, where nothing is captured


class StepSeconds(NamedTuple):
    """What a step took on the device."""

    total: float
    draft: float


class PendingStep:
    """A step on its way; `read` waits for it."""

    def __init__(
        self,
        shape: StepShape,
        record: StepRecord,
        drafting: Clock,
        clock: Clock,
        taps: Tensor | None = None,
    ) -> None:
        self.shape = shape
        self.taps = taps  # of all rows, where the host is to keep the drafter's context up
        self._record = record
        self._drafting, self._clock = drafting, clock  # of the draft, and of all the rest
        self._result: StepResult | None = None

    def read(self) -> StepResult:
        """Wait for the step, and read what it did; as often as somebody wants to know."""
        if self._result is None:
            self._clock.wait()
            self._result = self._record.read()
        return self._result

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


class DeviceSteps:
    """Runs steps over a batch of slots."""

    def __init__(
        self,
        target: Target,
        proposer: BlockProposer | None,
        cache: KVCache,
        limits: StepLimits,
        accept: AcceptFunction | None,
        pictures: PictureFeatures | None = None,
    ) -> None:
        self._target, self._device = target, target.kernels.device
        self.max_length = limits.max_length
        self.graphs: Graphs[tuple[object, ...]] = Graphs(self._device)
        captures = self.graphs.captures
        is_host = limits.is_at_once and self._device.type == "cpu" and accept is None
        pieces = HostPieces if is_host else StepPieces
        self.pieces = pieces(target, proposer, cache, limits, accept, captures)
        self.slots, self.max_width = self.pieces.slots, self.pieces.max_width
        self._pictures: PassPictures | None = None
        if pictures is not None:
            hidden, send = self.pieces.hidden, self.slots.send
            self._pictures = PassPictures(pictures, hidden, captures, send)
            self.pieces.pictures_of = self._pictures.rows
        self.num_nodes = self.pieces.num_nodes
        self.sizes = StepSizes(self.slots.count, self.max_width, self.num_nodes)
        self.page_size, self.scratch_pages = cache.page_size, cache.scratch_pages
        # without a drafter drafts cost next to nothing: there are some in every step
        self._peeks = proposer is None and limits.looks_up
        self._seen_chunks: set[int] = set()  # orders of magnitude of passes that are not captured
        self._has_woken = False  # somebody, whose first token was drawn
        self._host_s = 0.0  # that the host takes for a pass that is not captured
        self.row_s = 1.0  # that the device takes for a row of a long pass
        # of three steps: what each writes down in three tensors, and one a chunk of a prompt
        self._downloads = Staging(self._device, 3 * (3 + limits.max_chunks))

    def batch_for(self, count: int) -> int:
        """Slots that take part where the first `count` must."""
        return self.sizes.batch_for(count) if self.graphs.captures else count

    def rows_for(self, batch: int, num_awake: int, is_beside: bool = False) -> list[int]:
        """Rows of those who decode in the steps of a batch: fewest first, which is no drafts.

        Beside prompts there may be any number of them.
        """
        if self.graphs.captures and not is_beside:
            return self.sizes.rows_for(batch)
        most = self.sizes.most_rows(batch)
        some = (num_awake * (1 + mean) for mean in MEAN_VERIFIED if 0 < mean <= self.num_nodes)
        return [num_awake, *(rows for rows in some if batch < rows <= most)]

    def widths_for(self, batch: int, num_rows: int, is_solo: bool = False) -> list[int]:
        """How many draft tokens may be filled in for each of a batch, by all its rows."""
        if self._peeks and batch and not is_solo:
            return [self.max_width]
        return self.sizes.widths_for(batch, num_rows)

    def set_chances(self, chances: Sequence[Sequence[float]]) -> None:
        """How likely the target agrees, as `StepPolicy.chances` has it."""
        bits = np.asarray(chances, dtype=np.float64).view(np.int64)
        self.pieces.trees.set_chances(self.slots.send(bits).view(torch.float64))

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
        is_ready &= not wakes or self._has_woken
        if (size := self.fill_up(rows, shape.batch)) not in self._captured_sizes(shape.batch):
            return is_ready and size.bit_length() in self._seen_chunks
        return is_ready and self._is_mixed_ready(size, shape.batch, longest or self.max_length)

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

        With a guide the host waits for the drafts or has made them, and has the target's pass for
        the masks. No key that is looked at lies behind `longest`.
        """
        assert guide is not None or not shape.is_given
        assert shape.width <= self.max_width
        assert shape.num_rows <= self.sizes.most_rows(shape.batch)
        is_typical = self.is_ready(shape, chunks, longest)
        self.pieces.end = self._last_position(longest or self.max_length)
        self.pieces.wants_scores = wants_scores
        first_tokens = self.slots.anchors[:0]
        if chunks and self._pictures is not None:  # what the tower takes is no time of the step's
            self._pictures.lay_out(shape.num_rows, chunks)
        drafting = self._draft(shape)
        num_rows = shape.num_rows + sum(len(chunk.tokens) for chunk in chunks)
        size = self.fill_up(num_rows, shape.batch)
        if chunks:  # before the host may have to wait for drafts
            self.pieces.lay_out_chunks(shape.num_rows, size, chunks)
        drafts = {} if guide is None else self.pieces.trees.before_verify(shape, guide)
        begin = Mark(self._device)
        # verify and draw, or nothing where nobody decodes
        rest = [piece for piece in self._pieces(shape) if piece[0][0] != "draft"]
        if chunks:
            self._verify_beside(shape, size, longest or self.max_length)
        elif rest:
            self.graphs.call(*rest[0])
        if guide is not None and guide.has_grammars:
            self.pieces.exchange.before_draw(guide, drafts)
        else:
            self.pieces.exchange.unmask()
        if rest:
            self.graphs.call(*rest[1])
        prompt_scores: list[Tensor | None] = []
        if chunks:
            hidden, describe = self.pieces.hidden[shape.num_rows :], self.pieces.describe_free
            prompt_scores = score_prompts(self._target, hidden, chunks, self.slots.send, describe)
            first_tokens = self.pieces.wake(shape, chunks)
            self._has_woken |= len(first_tokens) > 0
        scores = None
        if wants_scores:
            scores = self.pieces.scores[: shape.num_rows + len(first_tokens)]
        receive = self._downloads.receive
        record = self.pieces.record(shape, first_tokens, scores, prompt_scores, receive)
        clock = Clock(begin, Mark(self._device), is_typical)
        return PendingStep(shape, record, drafting, clock, self.pieces.taps)

    def _draft(self, shape: StepShape) -> Clock:
        """Have the drafts that a step needs; when they were made."""
        begin, is_typical = Mark(self._device), True
        if not shape.width:
            self.pieces.exchange.forget_drafts()
        elif not shape.is_given:
            key, piece = next(self._pieces(shape))
            is_typical = self.graphs.is_ready(key)
            self.graphs.call(key, piece)
        return Clock(begin, Mark(self._device), is_typical)

    def _pieces(self, shape: StepShape) -> Iterator[tuple[tuple[object, ...], Callable[[], None]]]:
        """The functions that a step of this shape calls, and what each of them is fixed to."""
        batch, num_rows, width, is_given = shape
        if batch == 0:
            return
        if width and not is_given:
            yield ("draft", *shape.draft_key), lambda: self.pieces.draft(shape)
        verify = "verify", batch, num_rows, width > 0, is_given  # however many were filled in
        yield verify, lambda: self.pieces.verify(shape)
        drawn = shape._replace(num_rows=self._fill_up_drawn(num_rows))
        yield ("draw", drawn.num_rows, is_given), lambda: self.pieces.draw(drawn)

    # -- passes with prompts -------------------------------------------------------------------

    def _verify_beside(self, shape: StepShape, size: int, longest: int) -> None:
        """The same with chunks of prompts behind, which are laid out; `size` rows in all."""
        self.pieces.lay_out_before_chunks(shape)
        if size not in self._captured_sizes(shape.batch):
            self._seen_chunks.add(size.bit_length())
            begin = time.perf_counter()
            self.pieces.verify_mixed(size, shape.batch, longest)
            self._host_s = time.perf_counter() - begin
            return
        num_slots = self._slots_beside(shape.batch)
        end = self._last_key(longest)
        self.graphs.call(
            ("mixed", size, num_slots, end), lambda: self.pieces.verify_mixed(size, num_slots, end)
        )

    def fill_up(self, num_rows: int, batch: int) -> int:
        """Rows of the pass that so many take: where passes are captured, one of a few sizes.

        Many rows take the device longer than the host: rather than to fill up much, they run as
        they are.
        """
        size = next((size for size in self._captured_sizes(batch) if size >= num_rows), num_rows)
        as_they_are = max(self._host_s, self.row_s * num_rows)
        is_wasteful = num_rows > MANY_ROWS and self.row_s * size > as_they_are
        return num_rows if is_wasteful and size > MOST_FILLED * num_rows else size

    def _captured_sizes(self, batch: int) -> tuple[int, ...]:
        """Rows of the passes with prompts that are captured, beside so many slots."""
        if not self.graphs.captures:
            return ()
        return MIXED_ROWS if batch else MIXED_ROWS + LONE_ROWS

    def _is_mixed_ready(self, num_rows: int, batch: int, longest: int) -> bool:
        """Whether a pass that has prompts beside so many who decode is captured."""
        key = "mixed", num_rows, self._slots_beside(batch), self._last_key(longest)
        return self.graphs.is_ready(key)

    def _fill_up_drawn(self, num_rows: int) -> int:
        """Rows that are drawn from, with those of nobody."""
        if not self.graphs.captures:
            return num_rows
        return next((rows for rows in self.sizes.drawn if rows >= num_rows), num_rows)

    def _slots_beside(self, batch: int) -> int:
        """Slots that a pass with prompts looks at, of which the first `batch` decode."""
        return min(FEW_SLOTS, self.slots.count) if batch <= FEW_SLOTS else self.slots.count

    def _last_key(self, longest: int) -> int:
        """Up to where a pass with prompts may look, of which `longest` is needed."""
        if not self.graphs.captures:
            return longest
        if not self._target.kernels.exact:
            return self.max_length
        # its plans have as many splits as there may be keys
        return min(max(MANY_ROWS, 1 << (longest - 1).bit_length()), self.max_length)

    def _last_position(self, longest: int) -> int:
        """Where a pass ends, of which `longest` is needed; captured ones are fixed to the same."""
        return self.max_length if self.graphs.captures else min(longest, self.max_length)
