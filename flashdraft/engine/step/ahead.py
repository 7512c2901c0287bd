"""Runs decoding ahead of the host: the next step is on its way before the last one is read.

Where every running request decodes and is drawn plainly (greedily, or by noise with at most simple
filters), a step needs nothing from the host but pages. So two steps are kept in flight on the
device; the host reads the older one, commits its tokens, and launches another. What a request wrote
after its end is never read: its pages are only used again by work that the device does later.
Everything else (prompts, penalties, grammars, log-probabilities, the fight for pages) is the
engine's own loop, for which `land` brings the host up to date.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from flashdraft.engine.cache.pages import NO_PAGE, PageBook
from flashdraft.engine.policy.width import WidthChooser
from flashdraft.engine.sampling.draw import Drawing
from flashdraft.engine.sequence import Sequence as RunningSequence
from flashdraft.engine.step.device import DeviceSteps, Flight, SlotResult, SlotState, StepShape
from flashdraft.engine.streams import MOST_GRAPHS

log = logging.getLogger(__name__)

BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
MOST_IN_FLIGHT = 2
CHANCES_PERIOD = 8  # steps between two looks at how the drafter's confidences come true
NEW_SHARE, NEW_S = 0.1, 1.0  # of the steps' time, and seconds at first, that new shapes may take
MOST_PREPARED = MOST_GRAPHS - 16  # the others are for what nobody foresaw
AHEAD_MARGIN = 64  # positions beyond a sequence's end that steps in flight may write to


@dataclass
class Landed:
    """One request's part of a step that was read."""

    sequence: RunningSequence
    result: SlotResult


@dataclass
class _InFlight:
    flight: Flight
    sequences: list[RunningSequence | None]  # by slot, as they were at the launch
    width: int


class Ahead:
    """The running batch on the device, and the steps in flight."""

    def __init__(self, steps: DeviceSteps, book: PageBook, chooser: WidthChooser) -> None:
        self._steps, self._book, self._chooser = steps, book, chooser
        self._slots: list[RunningSequence | None] = []
        self._known: dict[RunningSequence, list[int]] = {}  # pages entered so far, by pool
        self._in_flight: deque[_InFlight] = deque()
        self._num_launched = 0
        self._new_s, self._steady_s = 0.0, 0.0  # spent on first steps of a shape, and on the others

    @property
    def is_flying(self) -> bool:
        """Whether anything is in flight that the host has not read."""
        return bool(self._in_flight)

    def board(self, sequences: Sequence[RunningSequence]) -> bool:
        """Have exactly these sequences on the device; False where steps in flight forbid it.

        Whoever left has left an empty slot. Where fewer slots would do, those in use move together;
        where somebody is new, everybody boards again.
        """
        aboard = [slot for slot, sequence in enumerate(self._slots) if sequence is not None]
        batch = self._batch_for(len(sequences))
        if {self._slots[slot] for slot in aboard} == set(sequences):
            if batch < len(self._slots):
                empty = [slot for slot, sequence in enumerate(self._slots) if sequence is None]
                order = [*aboard, *empty][:batch]
                self._steps.move(order)
                self._slots = [self._slots[slot] for slot in order]
            return True
        if self._in_flight:
            return False
        self._slots = [*sequences, *[None] * (batch - len(sequences))]
        self._known = {sequence: [0] * self._steps.num_pools for sequence in sequences}
        self._steps.load(
            range(len(sequences)),
            [
                SlotState(s.tokens[-1], s.num_cached, s.request.params, s.request.seed)
                for s in sequences
            ],
        )
        self._empty(range(len(sequences), len(self._slots)))
        return True

    def leave(self, sequence: RunningSequence) -> None:
        """Take a request out that has ended; what is in flight for it is not read."""
        if sequence in self._slots:
            slot = self._slots.index(sequence)
            self._slots[slot] = None
            del self._known[sequence]
            self._empty([slot])

    def launch(self, fixed: int | None, drawing: Drawing) -> bool:
        """Have a step in flight behind the one that is read next; False if pages are missing.

        `fixed` is a verify length that these requests asked for.
        """
        while len(self._in_flight) < MOST_IN_FLIGHT:
            if self._in_flight and not self._is_worth_it():
                return True
            among = None if self._affords_new() else self._ready_widths(drawing)
            width = self._chooser.choose(len(self._slots), self._steps.max_width, fixed, among)
            if not self._reserve():
                return bool(self._in_flight)
            if self._num_launched % CHANCES_PERIOD == 0 and width:
                self._steps.set_chances(self._chooser.chances())
            flight = self._start(self._shape(width, drawing))
            self._in_flight.append(_InFlight(flight, list(self._slots), width))
            self._num_launched += 1
        return True

    def land(self) -> list[Landed]:
        """Wait for the oldest step in flight and read it, for those who are still aboard."""
        first = self._in_flight.popleft()
        results = first.flight.land()
        seconds = first.flight.seconds
        if seconds is not None:
            self._steady_s += seconds
            self._chooser.remember_time(first.flight.shape.batch, first.width, seconds)
        landed = [
            Landed(sequence, result)
            for sequence, result in zip(first.sequences, results, strict=True)
            if sequence is not None and sequence in self._known
        ]
        if first.width:
            self._chooser.remember_drafts([one.result.confidence for one in landed])
        return landed

    def abandon(self) -> None:
        """Forget the batch and everything in flight: its requests start over from the host."""
        self._in_flight.clear()
        self._slots.clear()
        self._known.clear()

    def settle(self, truncate: Callable[[RunningSequence], None]) -> None:
        """Everybody leaves; pages that were reserved for steps ahead go back."""
        assert not self._in_flight
        for sequence in self._known:
            truncate(sequence)
        self.abandon()

    def prepare(self, at_once: int, seconds: float) -> None:
        """Have shapes of up to so many sequences captured, likeliest first, for about so long.

        Nobody is aboard: all slots are empty, and what they write goes to the page of nobody.
        """
        self.abandon()  # what may still be in flight is for requests that have ended
        deadline = time.perf_counter() + seconds
        for batch, width in self._likeliest(at_once)[:MOST_PREPARED]:
            self._slots = [None] * batch
            shape = self._shape(width, Drawing.GREEDY)
            try:
                while not self._steps.is_ready(shape) and time.perf_counter() < deadline:
                    self._empty(range(batch))
                    self._steps.launch(shape).land()
            except Exception as error:  # a step that is needed will say so itself
                log.warning("steps of %d requests cannot be prepared: %s", batch, error)
                break
            if shape in self._steps.graphs.failed:  # memory, most likely: leave what there is
                break
        self.abandon()

    def _likeliest(self, at_once: int) -> list[tuple[int, int]]:
        """Batches and verify lengths: every batch's best guess, then its second best, and so on."""
        batches = [size for size in reversed(BATCHES) if size <= smallest_batch(at_once)]
        ranked = {batch: self._chooser.ranked(batch, self._steps.max_width) for batch in batches}
        most = max((len(widths) for widths in ranked.values()), default=0)
        return [
            (batch, ranked[batch][place])
            for place in range(most)
            for batch in batches
            if place < len(ranked[batch])
        ]

    # -- pages ---------------------------------------------------------------------------------

    def _reserve(self) -> bool:
        """Pages for everything the next step may write, entered into the device's tables."""
        ahead = sum(1 + _most_verified(one.flight.shape) for one in self._in_flight)
        places: list[int] = []
        pages: list[int] = []
        for slot, sequence in enumerate(self._slots):
            if sequence is None:
                continue
            if not self._book.reserve(sequence, sequence.num_cached + ahead + self._reach):
                return False
            self._enter(slot, sequence, places, pages)
        self._steps.write_pages(np.asarray(places, np.int64), np.asarray(pages, np.int64))
        return True

    @property
    def _reach(self) -> int:
        """Positions that one step may write: an anchor and a whole block."""
        return 1 + self._steps.max_width

    def _enter(
        self, slot: int, sequence: RunningSequence, places: list[int], pages: list[int]
    ) -> None:
        known = self._known[sequence]
        for pool in range(self._steps.num_pools):
            table = self._book.table(sequence, pool)
            begin = self._steps.place_of(pool, slot)
            for index in range(known[pool], len(table)):
                if table[index] != NO_PAGE:
                    places.append(begin + index)
                    pages.append(table[index])
            known[pool] = len(table)

    def _empty(self, slots: Sequence[int]) -> None:
        """Empty slots go on in the step, and write to the page of nobody."""
        if not slots:
            return
        self._steps.clear(list(slots))
        pages_each = -(-self._reach // self._book.page_size)
        places = [
            self._steps.place_of(pool, slot) + index
            for slot in slots
            for pool in range(self._steps.num_pools)
            for index in range(pages_each)
        ]
        pages = [
            page for _ in slots for page in self._steps.scratch_pages for _ in range(pages_each)
        ]
        self._steps.write_pages(np.asarray(places, np.int64), np.asarray(pages, np.int64))

    # -- shapes --------------------------------------------------------------------------------

    def _start(self, shape: StepShape) -> Flight:
        """Launch a step, and note what it takes the host if the shape is new."""
        is_ready, begin = self._steps.is_ready(shape), time.perf_counter()
        flight = self._steps.launch(shape)
        if not is_ready:
            self._new_s += time.perf_counter() - begin
        return flight

    def _affords_new(self) -> bool:
        """Whether a shape may be tried that is not captured: that takes as long as many steps."""
        return self._new_s <= NEW_S + NEW_SHARE * self._steady_s

    def _batch_for(self, count: int) -> int:
        """The smallest batch for so many; where it would be new, a larger one may have to do."""
        if self._affords_new():
            return smallest_batch(count)
        ready = {shape.batch for shape in self._steps.captured if shape.batch >= count}
        return min(ready, default=smallest_batch(count))

    def _ready_widths(self, drawing: Drawing) -> set[int]:
        batch = len(self._slots)
        return {
            shape.num_slots // batch
            for shape in self._steps.captured
            if shape.batch == batch and shape.drawing is drawing
        }

    def _shape(self, width: int, drawing: Drawing) -> StepShape:
        batch = len(self._slots)
        drafted = width
        if batch > 1 and width:  # some sequences may verify more than the mean
            drafted = min(width + max(2, width // 2), self._steps.max_width)
        return StepShape(batch, batch * width, drafted, drawing)

    def _is_worth_it(self) -> bool:
        """Whether somebody is sure to go on after what is in flight; stop tokens aside."""
        most = sum(1 + _most_verified(one.flight.shape) for one in self._in_flight)
        return any(s is not None and s.num_left > most for s in self._slots)


def smallest_batch(count: int) -> int:
    """The smallest batch that is captured for so many sequences."""
    return next((size for size in BATCHES if size >= count), count)


def _most_verified(shape: StepShape) -> int:
    return min(shape.width, shape.num_slots)
