"""The pipeline: who sits in which slot of the device, and the steps that are on their way.

Two steps are kept in flight; the host reads the older one, commits it, and launches another. Slots
are filled and emptied between two launches while steps fly: whoever comes brings a prompt, whose
chunks ride beside those who decode, and wakes in the step that ends it; whoever leaves is simply
not read any more, and its pages are only used again by work that the device does later. Where
pages run out the youngest gives its own back.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from flashdraft.engine.cache.pages import NO_PAGE, PageBook
from flashdraft.engine.policy.prompts import PromptBudget
from flashdraft.engine.policy.width import WidthChooser
from flashdraft.engine.sampling.grammar import Constraint
from flashdraft.engine.scheduler import Scheduler, Work
from flashdraft.engine.sequence import Sequence as RunningSequence
from flashdraft.engine.step.device import (
    MAX_CHUNKS,
    MIXED_ROWS,
    DeviceSteps,
    PendingStep,
    PromptChunk,
    StepSeconds,
    StepShape,
)
from flashdraft.engine.step.guide import GuidedSlot, StepGuide
from flashdraft.engine.step.result import SlotResult
from flashdraft.engine.step.slots import SlotState
from flashdraft.engine.streams import MOST_GRAPHS
from flashdraft.kernels.draw.rule import SlotRequest, has_penalties

log = logging.getLogger(__name__)

BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
MOST_IN_FLIGHT = 2
CHANCES_PERIOD = 8  # steps between two looks at how the drafter's confidences come true
NEW_SHARE, NEW_S = 0.1, 1.0  # of the steps' time, and seconds at first, that new shapes may take
NUM_FIRST = 8  # shapes that are captured before the passes that have prompts
MOST_PREPARED = MOST_GRAPHS - 16  # the others are for what nobody foresaw
AHEAD_MARGIN = 64  # positions beyond a sequence's end that steps in flight may write to


@dataclass(eq=False)
class Seat:
    """A sequence in a slot."""

    sequence: RunningSequence
    is_greedy: bool  # it takes the likeliest token as it is, and nobody asks how likely
    constraint: Constraint | None
    num_computed: int  # tokens that the cache holds once all launched steps are done, of a prompt
    first_computed: int  # those that it held from the start
    is_awake: bool = False  # it decodes in the next step that is launched
    known_pages: list[int] = field(default_factory=list)  # entered so far, by pool

    @property
    def wants_scores(self) -> bool:
        """Log-probabilities, or a word on whose fault a row without a token is."""
        params = self.sequence.request.params
        adjusts = has_penalties(params) or params.logit_bias or params.min_tokens > 0
        return params.logprobs is not None or bool(adjusts) or self.constraint is not None


@dataclass(frozen=True)
class StepPart:
    """What a step that was read did for one sequence."""

    work: Work
    result: SlotResult


@dataclass
class _InFlight:
    step: PendingStep
    decoding: list[Seat | None]  # by slot, as they were at the launch
    prompts: list[tuple[Seat, Work]]
    width: int


class StepPipeline:
    """The running batch on the device, and the steps in flight."""

    def __init__(
        self,
        steps: DeviceSteps,
        book: PageBook,
        scheduler: Scheduler,
        chooser: WidthChooser,
        describe: Callable[[RunningSequence], tuple[SlotRequest, bool, Constraint | None]],
        vocab_size: int,
    ) -> None:
        self._steps, self._book, self._scheduler = steps, book, scheduler
        self._chooser, self._describe = chooser, describe
        self._slots, self._vocab_size = steps.slots, vocab_size
        self._budget = PromptBudget(scheduler.max_step_tokens)
        self._seats: list[Seat | None] = [None] * steps.slots.count
        self._in_flight: deque[_InFlight] = deque()
        self._num_launched, self._last_width = 0, 0
        self._new_s, self._steady_s = 0.0, 0.0  # spent on first steps of a shape, and on the others
        self.last_seconds = StepSeconds(0.0, 0.0)  # of the step that was read last
        self._is_full = False  # somebody gave way: nobody comes in until somebody leaves
        self._is_stale = False  # the slots hold what nobody knows of any more

    @property
    def is_flying(self) -> bool:
        """Whether anything is in flight that the host has not read."""
        return bool(self._in_flight)

    @property
    def unseated(self) -> list[RunningSequence]:
        """Running sequences without a slot: they come from the other loop."""
        seated = {seat.sequence for seat in self._seats if seat is not None}
        return [one for one in self._scheduler.running if one not in seated]

    def launch(self, fixed: int | None, may_admit: Callable[[], bool]) -> None:
        """Have a step in flight behind the one that is read next, if there are pages for it.

        `fixed` is a verify length that these requests asked for.
        """
        if self._is_stale:
            self._slots.clear(range(self._slots.count))
            self._is_stale = False
        for sequence in self.unseated:
            self._sit_down(sequence)
        while len(self._in_flight) < self._most_in_flight:
            self._close_ranks()
            if not self._reserve():
                return
            prompts = self._plan_prompts(may_admit)
            width = self._choose_width(fixed, prompts)
            if not prompts and not self._is_worth_it():
                return
            if self._num_launched % CHANCES_PERIOD == 0 and width:
                self._steps.set_chances(self._chooser.chances())
            self._launch(width, prompts)

    def read(self) -> list[StepPart]:
        """Wait for the oldest step in flight; what it did for those who are still there."""
        first = self._in_flight.popleft()
        result = first.step.read()
        self.last_seconds = first.step.device_seconds
        self._remember_time(first)
        parts = [
            StepPart(
                Work(seat.sequence, seat.sequence.num_cached, 1, is_decode=True, emits=True), one
            )
            for seat, one in zip(first.decoding, result.slots, strict=True)
            if seat is not None and seat in self._seats
        ]
        if first.width:
            self._chooser.remember_drafts([part.result.confidence for part in parts])
        woken = iter(result.woken)
        for seat, work in first.prompts:
            own = next(woken) if work.emits else SlotResult(0, [], [], [])
            if seat in self._seats:
                parts.append(StepPart(work, own))
        return parts

    def leave(self, sequence: RunningSequence) -> None:
        """Take a request out that has ended; what is in flight for it is not read."""
        for slot, seat in enumerate(self._seats):
            if seat is not None and seat.sequence is sequence:
                self._stand_up(slot)
                self._is_full = False

    def abandon(self) -> None:
        """Forget the batch and everything in flight: its requests start over from the host."""
        self._in_flight.clear()
        self._seats = [None] * len(self._seats)
        # the device's slots are emptied before anybody sits down again: now it may be broken
        self._is_full, self._is_stale = False, True

    def settle(self) -> None:
        """Everybody leaves; pages that were reserved for steps ahead go back."""
        assert not self._in_flight
        for seat in self._seats:
            if seat is not None and seat.is_awake:
                self._book.truncate(seat.sequence, seat.sequence.num_cached)
        self.abandon()

    @property
    def _most_in_flight(self) -> int:
        """A grammar must have seen all that came before."""
        guided = [seat for seat in self._seats if seat is not None and seat.constraint is not None]
        return 1 if any(seat.is_awake for seat in guided) else MOST_IN_FLIGHT

    # -- slots ---------------------------------------------------------------------------------

    @property
    def _num_awake(self) -> int:
        return sum(seat is not None and seat.is_awake for seat in self._seats)

    @property
    def _batch(self) -> int:
        """Slots of the next step: all up to the last one that is awake."""
        awake = [
            slot for slot, seat in enumerate(self._seats) if seat is not None and seat.is_awake
        ]
        return self._batch_for(awake[-1] + 1) if awake else 0

    def _sit_down(self, sequence: RunningSequence) -> None:
        slot = self._seats.index(None)
        request, is_greedy, constraint = self._describe(sequence)
        cached = sequence.num_cached
        seat = Seat(sequence, is_greedy, constraint, cached, cached, sequence.is_decoding)
        seat.known_pages = [0] * self._slots.num_pools
        self._seats[slot] = seat
        state = SlotState(sequence.tokens[-1], sequence.num_cached, request, seat.is_awake)
        self._slots.load(slot, state)

    def _stand_up(self, slot: int) -> None:
        self._seats[slot] = None
        self._slots.clear([slot])

    def _close_ranks(self) -> None:
        """Move together where fewer slots would do: who decodes first, then who will."""
        if self._batch_for(self._num_awake) >= self._batch:
            return
        order = sorted(range(len(self._seats)), key=lambda slot: _rank(self._seats[slot]))
        self._slots.move(order)
        self._seats = [self._seats[slot] for slot in order]

    def _give_way(self) -> None:
        """The youngest goes back to the queue without its pages."""
        youngest = self._scheduler.running[-1]
        self.leave(youngest)
        self._scheduler.preempt(youngest)
        self._is_full = True

    # -- prompts -------------------------------------------------------------------------------

    def _plan_prompts(self, may_admit: Callable[[], bool]) -> list[Work]:
        """Chunks for the next step: of those who sit first, oldest first, then of newcomers."""
        asleep = [one for one in self._in_order() if not one.is_awake]
        waiting = self._scheduler.waiting
        lengths = [len(one.sequence.tokens) - one.first_computed for one in asleep]
        lengths += [len(one.tokens) for one in islice(waiting, self._seats.count(None))]
        if not lengths:
            return []
        batch, context = self._batch, asleep[0].num_computed if asleep else 0
        others_s = self._chooser.seconds_of(batch, self._last_width) if batch else 0.0
        num_others = batch * (1 + self._last_width)
        budget = self._budget.rows(others_s, num_others, context, lengths)
        budget = self._steps.fit_prompts(num_others, budget)
        works: list[Work] = []
        for place, seat in enumerate(asleep[:MAX_CHUNKS]):
            if budget > 0 and seat in self._seats:
                is_last = place == len(lengths) - 1  # a long one leaves room for those behind it
                chunk = self._next_chunk(seat, budget if is_last else -(-budget // 2))
                budget -= sum(work.num_tokens for work in chunk)
                works += chunk
        while budget > 0 and len(works) < MAX_CHUNKS and self._has_room and may_admit():
            work = self._scheduler.admit_next(budget)
            if work is None:
                break
            self._sit_down(work.sequence)
            works.append(work)
            budget -= work.num_tokens
        return [work for work in works if work.sequence in self._scheduler.running]

    @property
    def _has_room(self) -> bool:
        return not self._is_full and None in self._seats

    def _next_chunk(self, seat: Seat, budget: int) -> list[Work]:
        sequence, start = seat.sequence, seat.num_computed
        count = min(len(sequence.tokens) - start, budget, self._scheduler.prefill_chunk)
        while not self._book.reserve(sequence, len(sequence.tokens), start + count):
            if any(seat is other for one in self._in_flight for other, _ in one.prompts):
                return []  # what its last chunk leaves behind comes free once that is read
            self._give_way()
            if seat not in self._seats:
                return []
        return [Work(sequence, start, count, emits=start + count == len(sequence.tokens))]

    def _in_order(self) -> list[Seat]:
        """Everybody who sits, by admission."""
        by_sequence = {seat.sequence: seat for seat in self._seats if seat is not None}
        return [by_sequence[one] for one in self._scheduler.running if one in by_sequence]

    # -- pages ---------------------------------------------------------------------------------

    def _reserve(self) -> bool:
        """Pages for everything the next step may write for those who decode; False = for nobody."""
        ahead = sum(1 + _most_verified(one.step.shape) for one in self._in_flight)
        for seat in self._in_order():
            length = seat.sequence.num_cached + ahead + self._reach
            if not seat.sequence.is_decoding:  # it wakes in a step in flight
                length += len(seat.sequence.tokens) - seat.sequence.num_cached
            while (
                seat in self._seats
                and seat.is_awake
                and not self._book.reserve(seat.sequence, length)
            ):
                if len(self._scheduler.running) == 1:
                    return False
                self._give_way()
        return True

    @property
    def _reach(self) -> int:
        """Positions that one step may write: an anchor and a whole block."""
        return 1 + self._steps.max_width

    def _enter_pages(self) -> None:
        """Enter new pages of everybody into the device's tables."""
        places: list[int] = []
        pages: list[int] = []
        for slot, seat in enumerate(self._seats):
            if seat is None:
                continue
            for pool in range(self._slots.num_pools):
                table, begin = (
                    self._book.table(seat.sequence, pool),
                    self._slots.place_of(pool, slot),
                )
                for index in range(seat.known_pages[pool], len(table)):
                    if table[index] != NO_PAGE:
                        places.append(begin + index)
                        pages.append(table[index])
                seat.known_pages[pool] = len(table)
        self._slots.write_pages(np.asarray(places, np.int64), np.asarray(pages, np.int64))

    # -- steps ---------------------------------------------------------------------------------

    def _launch(self, width: int, works: Sequence[Work]) -> None:
        self._enter_pages()
        slot_of = {seat.sequence: slot for slot, seat in enumerate(self._seats) if seat is not None}
        chunks, prompts = [], []
        for work in works:
            slot, end = slot_of[work.sequence], work.start + work.num_tokens
            chunks.append(
                PromptChunk(slot, work.start, work.sequence.tokens[work.start : end], work.emits)
            )
            seat = self._seats[slot]
            assert seat is not None
            prompts.append((seat, work))
        decoding = [seat if seat and seat.is_awake else None for seat in self._seats[: self._batch]]
        drawn = [seat for seat in decoding if seat is not None]
        drawn += [seat for seat, work in prompts if work.emits]
        guide = self._guide(decoding, [seat for seat, work in prompts if work.emits])
        shape = self._shape(len(decoding), width, all(seat.is_greedy for seat in drawn))
        shape = shape._replace(is_guided=guide is not None)
        ends = [seat.sequence.num_cached + AHEAD_MARGIN for seat in decoding if seat is not None]
        ends += [chunk.start + len(chunk.tokens) for chunk in chunks]
        scored = any(seat.wants_scores for seat in drawn)
        step = self._start(shape, chunks, scored, guide, max(ends))
        self._in_flight.append(_InFlight(step, decoding, prompts, width))
        self._num_launched += 1
        self._last_width = width if decoding else self._last_width
        for seat, work in prompts:
            seat.num_computed = work.start + work.num_tokens
            seat.is_awake = work.emits
        if self._most_in_flight == 1 and self._reserve() and self._batch:
            self._enter_pages()
            self._steps.draft_early(self._shape(self._batch, width, is_greedy=False))

    def _guide(self, decoding: Sequence[Seat | None], waking: Sequence[Seat]) -> StepGuide | None:
        """The grammars that have their say in a step; None where there are none."""
        slot_of = {seat: slot for slot, seat in enumerate(self._seats) if seat is not None}
        decoded, woken = (
            {
                slot_of[seat]: GuidedSlot(seat.constraint, seat.sequence.output_ids)
                for seat in seats
                if seat is not None and seat.constraint is not None
            }
            for seats in (decoding, waking)
        )
        return StepGuide(decoded, woken, self._vocab_size) if decoded or woken else None

    def _start(
        self,
        shape: StepShape,
        chunks: Sequence[PromptChunk],
        wants_scores: bool,
        guide: StepGuide | None,
        longest: int,
    ) -> PendingStep:
        """Launch a step, and note what it takes the host if the shape is new."""
        is_ready, begin = self._steps.is_ready(shape, chunks, longest), time.perf_counter()
        step = self._steps.launch(shape, chunks, wants_scores, guide, longest)
        if not is_ready:
            self._new_s += time.perf_counter() - begin
        return step

    def _remember_time(self, first: _InFlight) -> None:
        seconds, shape = first.step.seconds, first.step.shape
        if seconds is None:
            return
        self._steady_s += seconds.total
        self._chooser.remember_draft(shape.batch, first.width, seconds.draft)
        if not first.prompts:
            self._chooser.remember_time(shape.batch, first.width, seconds.total)
            return
        rows = shape.num_rows + sum(work.num_tokens for _, work in first.prompts)
        rows = self._steps.fill_up(rows)
        context = max(work.start for _, work in first.prompts)
        self._budget.remember(rows, context, seconds.total - seconds.draft)

    # -- shapes --------------------------------------------------------------------------------

    def _choose_width(self, fixed: int | None, prompts: Sequence[Work]) -> int:
        batch, max_width = self._batch, self._steps.max_width
        if batch == 0:
            return 0
        among = None if self._affords_new() else self._ready_widths(batch)
        if not prompts:
            return self._chooser.choose(batch, max_width, fixed, among)
        rows, context = sum(work.num_tokens for work in prompts), max(w.start for w in prompts)
        return self._chooser.choose_beside(
            batch,
            max_width,
            lambda num_rows: self._budget.seconds(self._steps.fill_up(num_rows + rows), context),
            fixed,
            among,
        )

    def _affords_new(self) -> bool:
        """Whether a shape may be tried that is not captured: that takes as long as many steps."""
        return self._new_s <= NEW_S + NEW_SHARE * self._steady_s

    def _batch_for(self, count: int) -> int:
        """The smallest batch for so many; where it would be new, a larger one may have to do."""
        if count == 0 or self._affords_new():
            return smallest_batch(count)
        ready = {shape.batch for shape in self._steps.ready_shapes if shape.batch >= count}
        return min(ready, default=smallest_batch(count))

    def _ready_widths(self, batch: int) -> set[int]:
        is_greedy = all(seat.is_greedy for seat in self._seats if seat is not None)
        return {
            shape.num_slots // batch
            for shape in self._steps.ready_shapes
            if shape.batch == batch and shape.is_greedy == is_greedy
        }

    def _shape(self, batch: int, width: int, is_greedy: bool) -> StepShape:
        drafted = width
        if batch > 1 and width:  # some sequences may verify more than the mean
            drafted = min(width + max(2, width // 2), self._steps.max_width)
        return StepShape(batch, batch * width, drafted, is_greedy)

    def _is_worth_it(self) -> bool:
        """Whether somebody is sure to go on after what is in flight; stop tokens aside."""
        most = sum(1 + _most_verified(one.step.shape) for one in self._in_flight)
        return any(s is not None and s.is_awake and s.sequence.num_left > most for s in self._seats)

    # -- before anybody comes ------------------------------------------------------------------

    def prepare(self, at_once: int, seconds: float) -> None:
        """Have shapes of up to so many sequences captured, likeliest first, for about so long.

        Nobody is there: all slots are empty, and what they write goes to the page of nobody.
        """
        self.abandon()  # what may still be in flight is for requests that have ended
        self._slots.clear(range(self._slots.count))
        deadline = time.perf_counter() + seconds
        shapes = [self._shape(*one) for one in self._likeliest(at_once)]
        for place, shape in enumerate(shapes[:MOST_PREPARED]):
            try:
                if place == NUM_FIRST:  # everybody has a prompt
                    self._prepare_prompts(deadline)
                while not self._steps.is_ready(shape) and time.perf_counter() < deadline:
                    self._steps.launch(shape).read()
            except Exception as error:  # a step that is needed will say so itself
                log.warning("steps of %d requests cannot be prepared: %s", shape.batch, error)
                return
            if self._steps.is_failed(shape):  # memory, most likely: leave what there is
                return

    def _prepare_prompts(self, deadline: float) -> None:
        """Have passes with prompts captured; their rows are of nobody."""
        slots, page_size = self._slots, self._book.page_size
        num_pages = min(-(-MIXED_ROWS[-1] // page_size), slots.max_pages)
        for pool, page in enumerate(self._steps.scratch_pages):
            places = slots.place_of(pool, 0) + np.arange(num_pages)
            slots.write_pages(places, np.full(num_pages, page))
        most = min(self._scheduler.max_step_tokens, num_pages * page_size)
        batches = {0, 1, self._slots.count}
        for batch, size in [(batch, size) for size in reversed(MIXED_ROWS) for batch in batches]:
            if batch < size <= most:
                chunk = PromptChunk(0, 0, [0] * (size - batch), emits=False)
                shape = StepShape(batch, 0, 0)
                while not self._steps.is_ready(shape, [chunk], size) and (
                    time.perf_counter() < deadline
                ):
                    self._steps.launch(shape, [chunk], longest=size).read()

    def _likeliest(self, at_once: int) -> list[tuple[int, int, bool]]:
        """Batches, verify lengths and whether all are greedy: every batch's best guess first."""
        batches = [size for size in reversed(BATCHES) if size <= smallest_batch(at_once)]
        ranked = {batch: self._chooser.ranked(batch, self._steps.max_width) for batch in batches}
        most = max((len(widths) for widths in ranked.values()), default=0)
        return [
            (batch, ranked[batch][place], is_greedy)
            for place in range(most)
            for batch in batches
            if place < len(ranked[batch])
            for is_greedy in (True, False)
        ]


def smallest_batch(count: int) -> int:
    """The smallest batch that is captured for so many sequences."""
    if count == 0:
        return 0
    return next((size for size in BATCHES if size >= count), count)


def _rank(seat: Seat | None) -> int:
    if seat is None:
        return 2
    return 0 if seat.is_awake else 1


def _most_verified(shape: StepShape) -> int:
    return min(shape.width, shape.num_slots)
