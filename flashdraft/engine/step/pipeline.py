"""The pipeline: who sits in which slot of the device, and the steps that are on their way.

On a GPU two steps are kept in flight; the host reads the older one, commits it, and launches
another (`launch`). Where the host plans and drafts, each is read at once (`launch_planned`). Slots
are filled and emptied between two launches while steps fly: whoever comes brings a prompt, whose
chunks ride beside those who decode, and wakes in the step that ends it; whoever leaves is simply
not read any more, and its pages are only used again by work that the device does later. Where
pages run out the youngest gives its own back.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

import numpy as np
from torch import Tensor

from flashdraft.engine.cache.pages import NO_PAGE, PageBook
from flashdraft.engine.draft.guided import MOST_GUIDED
from flashdraft.engine.drafts import Draft
from flashdraft.engine.policy.step import StepChoice, StepOptions, StepPolicy
from flashdraft.engine.scheduler import Scheduler, Work, takes_more
from flashdraft.engine.sequence import Sequence as RunningSequence
from flashdraft.engine.step.device import DeviceSteps, PendingStep, StepSeconds
from flashdraft.engine.step.guide import GuidedSlot, StepGuide
from flashdraft.engine.step.prepare import prepare_steps
from flashdraft.engine.step.result import SlotResult, TokenScores
from flashdraft.engine.step.seats import Seat, SeatRequest
from flashdraft.engine.step.shape import MAX_CHUNKS, MIXED_ROWS, StepShape

MOST_IN_FLIGHT = 2
LONG_STEPS = 4  # that a long prompt would take all of
RETRY_PERIOD = 8  # steps between two tries to let somebody in for whom there were no pages
CHANCES_PERIOD = 8  # steps between two looks at how the drafter's confidences come true
AHEAD_MARGIN = 96  # positions beyond a sequence's end that steps in flight may write to


@dataclass(frozen=True)
class StepPart:
    """What a step that was read did for one sequence."""

    work: Work
    result: SlotResult
    draft: Draft | None = None  # the host's, where it made one
    prompt_scores: TokenScores | None = None  # of the tokens behind the rows of a prompt
    taps: Tensor | None = None  # of all its rows, where the host keeps the drafter's context up


@dataclass
class _InFlight:
    step: PendingStep
    decoding: list[Seat | None]  # by slot, as they were at the launch
    prompts: list[tuple[Seat, Work]]
    given: dict[int, Draft] = field(default_factory=dict)  # by slot
    choice: StepChoice | None = None  # what it was launched for, where the policy chose it

    def results_of(self, seat: Seat) -> list[SlotResult]:
        """What the step drew for a seat, once it is done; at most one result."""
        drawn, result = [seat for seat, work in self.prompts if work.emits], self.step.read()
        pairs = [*zip(self.decoding, result.slots, strict=True)]
        pairs += zip(drawn, result.woken, strict=True)
        return [found for other, found in pairs if other is seat]


class StepPipeline:
    """The running batch on the device, and the steps in flight."""

    def __init__(
        self,
        steps: DeviceSteps,
        book: PageBook,
        scheduler: Scheduler,
        policy: StepPolicy,
        describe: Callable[[RunningSequence], SeatRequest],
        vocab_size: int,
    ) -> None:
        self._steps, self._book, self._scheduler = steps, book, scheduler
        self._policy, self._describe = policy, describe
        self._slots, self._vocab_size = steps.slots, vocab_size
        self._seats: list[Seat | None] = [None] * steps.slots.count
        self._in_flight: deque[_InFlight] = deque()
        self._num_launched = 0
        # of the step that was read last
        self.last_seconds, self.last_choice = StepSeconds(0.0, 0.0), StepChoice(0, 0, 0.0, 0.0)
        self._is_full = False  # somebody gave way: nobody comes in until somebody leaves
        self._is_short = False  # there were no pages for somebody: it is tried again later
        self._is_stale = False  # the slots hold what nobody knows of any more
        self._is_solo = False  # one sequence only, without drafts

    @property
    def is_flying(self) -> bool:
        """Whether anything is in flight that the host has not read."""
        return bool(self._in_flight)

    def launch(self, is_solo: bool = False) -> None:
        """Have a step in flight behind the one that is read next, if there are pages for it.

        Solo there is one sequence only, and nothing is drafted.
        """
        self._begin()
        self._is_solo = is_solo
        while len(self._in_flight) < MOST_IN_FLIGHT:
            self._close_ranks()
            if not self._reserve():
                return
            self._is_short &= self._num_launched % RETRY_PERIOD != 0 and self._batch > 0
            choice = self._choose(self._prompt_lengths())
            prompts = self._plan_prompts(choice.prompt_rows)
            if choice.prompt_rows and not prompts:  # there are no pages for them
                choice = self._choose([])
            if not prompts and not self._is_worth_it():
                return
            shape = self._shape(choice, bool(prompts))
            if self._num_launched % CHANCES_PERIOD == 0 and shape.width:
                self._steps.set_chances(self._policy.chances())
            self._launch(shape, prompts, choice=choice)

    def launch_planned(self, works: Sequence[Work], drafts: Sequence[Draft | None]) -> None:
        """Have a step in flight that the host has planned and drafted for; it is read next."""
        assert not self._in_flight
        self._begin()
        slot_of = {seat.sequence: slot for slot, seat in enumerate(self._seats) if seat is not None}
        for work in works:
            slot = slot_of.get(work.sequence)
            if slot is not None and work.is_decode and not self._seat_at(slot).is_awake:
                self._seats[slot] = None  # only its anchor is left to compute: it sits down awake
                slot = None
            if slot is None:
                self._sit_down(work.sequence, work.is_decode)
        self._close_ranks()
        slot_of = {seat.sequence: slot for slot, seat in enumerate(self._seats) if seat is not None}
        given = {
            slot_of[work.sequence]: draft
            for work, draft in zip(works, drafts, strict=True)
            if draft is not None
        }
        lengths = [len(draft.tokens) for draft in given.values()]
        batch = self._batch
        shape = StepShape(batch, batch + sum(lengths), max(lengths, default=0), is_given=True)
        self._launch(shape, [work for work in works if not work.is_decode], given)

    def _begin(self) -> None:
        if self._is_stale:
            self._slots.clear(range(self._slots.count))
            self._is_stale = False

    def read(self) -> list[StepPart]:
        """Wait for the oldest step in flight; what it did for those who are still there."""
        first = self._in_flight.popleft()
        result, taps = first.step.read(), first.step.taps
        self.last_seconds = first.step.device_seconds
        self.last_choice = first.choice or StepChoice(0, 0, 0.0, 0.0)
        self._remember_time(first)
        parts, row = [], 0
        for slot, (seat, one) in enumerate(zip(first.decoding, result.slots, strict=True)):
            num_rows = one.num_rows
            if seat is not None and seat in self._seats:
                sequence = seat.sequence
                parts.append(
                    StepPart(
                        Work(sequence, sequence.num_cached, 1, is_decode=True, emits=True),
                        one,
                        first.given.get(slot),
                        taps=None if taps is None else taps[row : row + num_rows],
                    )
                )
            row += num_rows
        if first.step.shape.width and not first.step.shape.is_given:
            self._policy.remember_drafts([part.result.draft for part in parts])
        woken = iter(result.woken)
        for (seat, work), scores in zip(first.prompts, result.prompt_scores, strict=True):
            own = next(woken) if work.emits else SlotResult(0, [], [], [])
            if seat in self._seats:
                rows = None if taps is None else taps[row : row + work.num_tokens]
                parts.append(StepPart(work, own, prompt_scores=scores, taps=rows))
            row += work.num_tokens
        return parts

    def prepare(self, seconds: float) -> None:
        """Have all steps captured and timed, for about so long."""
        self.abandon()  # what may still be in flight is for requests that have ended
        self._begin()
        max_rows = self._scheduler.max_step_tokens
        prepare_steps(self._steps, self._policy.times, max_rows, seconds)

    def leave(self, sequence: RunningSequence) -> None:
        """Take a request out that has ended; what is in flight for it is not read."""
        for slot, seat in enumerate(self._seats):
            if seat is not None and seat.sequence is sequence:
                self._stand_up(slot)
                self._is_full = self._is_short = False

    def abandon(self) -> None:
        """Forget the batch and everything in flight: its requests start over from the host."""
        self._in_flight.clear()
        self._seats = [None] * len(self._seats)
        # the device's slots are emptied before anybody sits down again: now it may be broken
        self._is_full, self._is_stale = False, True

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
        return self._steps.batch_for(awake[-1] + 1) if awake else 0

    def _sit_down(self, sequence: RunningSequence, is_awake: bool) -> None:
        """Give a sequence a slot, where it decodes at once or after its prompt."""
        slot = self._seats.index(None)
        request, constraint = self._describe(sequence)
        cached, scored = sequence.num_cached, len(sequence.prompt_logprobs or [None]) - 1
        seat = Seat(sequence, constraint, cached, scored, is_awake)
        seat.known_pages = [[] for _ in range(self._slots.num_pools)]
        fixed = self._policy.fixed if sequence.request.verify is None else sequence.request.verify
        # what a request fixes is a chain; what a grammar allows the host grows
        may_branch = sequence.request.verify is None and self._steps.pieces.trees.have_branches
        seat.branches = may_branch and constraint is None
        most = self._steps.num_nodes if seat.branches else self._steps.max_width
        if may_branch and constraint is not None:
            most = seat.guided_nodes = min(MOST_GUIDED, MOST_GUIDED if fixed is None else fixed)
        seat.limit = -1 if fixed is None else min(fixed, most)
        self._seats[slot] = seat
        self._slots.load(slot, seat.slot_state(request))

    def _stand_up(self, slot: int) -> None:
        self._seats[slot] = None
        self._slots.clear([slot])

    def _close_ranks(self) -> None:
        """Move together where fewer slots would do: who decodes first, then who will."""
        if self._steps.batch_for(self._num_awake) >= self._batch:
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

    @property
    def _asleep(self) -> list[Seat]:
        """Those whose prompts are not done, oldest first."""
        return [one for one in self._in_order() if not one.is_awake]

    def _plan_prompts(self, budget: int) -> list[Work]:
        """Chunks of about so many rows: of those who sit first, oldest first, then of newcomers."""
        asleep, works = self._asleep, list[Work]()
        num_waiting = len(asleep) + min(len(self._scheduler.waiting), self._seats.count(None))
        for place, seat in enumerate(asleep[:MAX_CHUNKS]):
            if seat in self._seats and takes_more(budget, works):
                # a long one leaves room for those behind it; others are done one after another
                left = len(seat.sequence.tokens) - seat.num_computed
                is_long = place < num_waiting - 1 and left > LONG_STEPS * budget
                chunk = self._next_chunk(seat, -(-budget // 2) if is_long else budget)
                budget -= sum(work.num_tokens for work in chunk)
                works += chunk
        waiting = self._scheduler.waiting
        while waiting and len(works) < MAX_CHUNKS and self._has_room:
            if not takes_more(budget, works):
                break
            work = self._scheduler.admit_next(budget)
            if work is None:
                self._is_short = True
                break
            self._sit_down(work.sequence, is_awake=False)
            works.append(replace(work, is_decode=False))
            budget -= work.num_tokens
        return [work for work in works if work.sequence in self._scheduler.running]

    @property
    def _has_room(self) -> bool:
        if self._is_solo:
            return all(seat is None for seat in self._seats)
        return not self._is_full and not self._is_short and None in self._seats

    def _next_chunk(self, seat: Seat, budget: int) -> list[Work]:
        sequence, start = seat.sequence, seat.num_computed
        count = sequence.cut(start, min(budget, self._scheduler.prefill_chunk))
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
        """Pages for all that the next step may write for those who decode, up to their ends.

        False = there are none now; what is in flight may bring some.
        """
        ahead = sum(1 + one.step.shape.most_verified for one in self._in_flight)
        for seat in self._in_order():
            length = seat.sequence.num_cached + ahead + self._reach
            if not seat.sequence.is_decoding:  # it wakes in a step in flight
                length += len(seat.sequence.tokens) - seat.sequence.num_cached
            length = min(length, seat.sequence.max_length)  # the device writes nothing behind it
            while (
                seat in self._seats
                and seat.is_awake
                and not self._book.reserve(seat.sequence, length)
            ):
                if len(self._scheduler.running) > 1:
                    self._give_way()
                elif self._in_flight:
                    return False
                else:
                    raise seat.no_room(length)
        return True

    @property
    def _reach(self) -> int:
        """Positions that one step may write: an anchor and a whole block, or tree."""
        return 1 + self._steps.num_nodes

    def _enter_pages(self) -> None:
        """Enter new pages of everybody into the device's tables."""
        places: list[int] = []
        pages: list[int] = []
        for slot, seat in enumerate(self._seats):
            if seat is None:
                continue
            full = seat.sequence.num_cached // self._book.page_size  # those behind may change
            for pool, known in enumerate(seat.known_pages):
                table = self._book.table(seat.sequence, pool)
                begin, first = self._slots.place_of(pool, slot), min(full, len(known))
                for index in range(first, len(table)):
                    is_known = index < len(known) and known[index] == table[index]
                    if table[index] != NO_PAGE and not is_known:
                        places.append(begin + index)
                        pages.append(table[index])
                known[first:] = table[first:]
        if places:
            self._slots.write_pages(np.asarray(places, np.int64), np.asarray(pages, np.int64))

    # -- steps ---------------------------------------------------------------------------------

    def _launch(
        self,
        shape: StepShape,
        works: Sequence[Work],
        given: Mapping[int, Draft] | None = None,
        choice: StepChoice | None = None,
    ) -> None:
        """Start a step over those who are awake and these chunks of prompts.

        `given` are drafts that the host has made, by slot.
        """
        self._enter_pages()
        slot_of = {seat.sequence: slot for slot, seat in enumerate(self._seats) if seat is not None}
        decoding = [seat if seat and seat.is_awake else None for seat in self._seats[: shape.batch]]
        prompts = [(self._seat_at(slot_of[work.sequence]), work) for work in works]
        chunks = [
            seat.take_chunk(slot_of[work.sequence], work.start, work.num_tokens, work.emits)
            for seat, work in prompts
        ]
        drawn = [seat for seat in decoding if seat is not None]
        drawn += [seat for seat, work in prompts if work.emits]
        guide = self._guide(decoding, [seat for seat, work in prompts if work.emits], given)
        # who woke in a step that is not read yet is longer than the host has seen
        ends = [max(s.sequence.num_cached, s.num_computed) for s in decoding if s is not None]
        ends += [chunk.start + len(chunk.tokens) for chunk in chunks]
        scored = any(seat.wants_scores for seat in drawn)
        step = self._steps.launch(shape, chunks, scored, guide, max(ends) + AHEAD_MARGIN)
        self._in_flight.append(_InFlight(step, decoding, prompts, dict(given or {}), choice))
        self._num_launched += 1

    def _seat_at(self, slot: int) -> Seat:
        seat = self._seats[slot]
        assert seat is not None
        return seat

    def _guide(
        self,
        decoding: Sequence[Seat | None],
        waking: Sequence[Seat],
        given: Mapping[int, Draft] | None,
    ) -> StepGuide | None:
        """What the host has to say in a step; None where that is nothing."""
        slot_of = {seat: slot for slot, seat in enumerate(self._seats) if seat is not None}
        decoded, woken = (
            {
                slot_of[seat]: GuidedSlot(
                    seat.constraint,
                    seat.sequence.request,
                    self._history_of(seat),
                    seat.sequence.max_length - seat.sequence.num_prompt,
                    seat.guided_nodes,
                )
                for seat in seats
                if seat is not None and seat.constraint is not None
            }
            for seats in (decoding, waking)
        )
        if not decoded and not woken and given is None:
            return None
        return StepGuide(decoded, woken, self._vocab_size, given, self._policy.chance)

    def _history_of(self, seat: Seat) -> Callable[[], list[int] | None]:
        """How to know a seat's output before the next step: what is in flight is waited for."""
        steps = tuple(self._in_flight)
        return lambda: seat.output_after(found for one in steps for found in one.results_of(seat))

    def _remember_time(self, first: _InFlight) -> None:
        seconds, shape, pass_rows, context = first.step.seconds, first.step.shape, 0, 0
        if seconds is None or shape.is_given:
            return
        if first.prompts:
            rows = shape.num_rows + sum(work.num_tokens for _, work in first.prompts)
            pass_rows = self._steps.fill_up(rows, shape.batch)
            context = max(work.start for _, work in first.prompts)
        took = seconds.draft, seconds.total - seconds.draft
        self._policy.times.remember(*shape[:3], *took, pass_rows, context)

    # -- shapes --------------------------------------------------------------------------------

    def _prompt_lengths(self) -> list[int]:
        """What is left of the prompts of those who sleep, and of those for whom there is room."""
        lengths = [len(one.sequence.tokens) - one.num_computed for one in self._asleep]
        free = self._seats.count(None) if self._has_room else 0
        return lengths + [len(one.tokens) for one in islice(self._scheduler.waiting, free)]

    def _choose(self, prompts: Sequence[int]) -> StepChoice:
        """What the next step is about, where so much of prompts waits."""
        asleep, steps, batch = self._asleep, self._steps, self._batch
        alone, beside = (
            steps.rows_for(batch, self._num_awake, is_beside) if batch else [0]
            for is_beside in (False, True)
        )
        options = StepOptions(
            batch,
            self._num_awake,
            alone[:1] if self._is_solo else alone,
            beside[:1] if self._is_solo else beside,
            MIXED_ROWS,
            lambda rows: steps.widths_for(batch, rows, self._is_solo),
        )
        return self._policy.choose(options, prompts, asleep[0].num_computed if asleep else 0)

    def _shape(self, choice: StepChoice, is_beside: bool) -> StepShape:
        """The step that was chosen, or a larger one where some fix how many they verify.

        Whoever gave way since then has no rows.
        """
        batch, steps, num_rows = self._batch, self._steps, choice.num_rows
        if batch == 0:
            return StepShape(0, 0)
        limits = [seat.limit for seat in self._seats[:batch] if seat is not None and seat.is_awake]
        fixed = [one for one in limits if one >= 0]
        if fixed and not self._is_solo:
            shared = max(num_rows - len(limits), 0) / len(limits)
            wanted = len(limits) + sum(fixed) + shared * (len(limits) - len(fixed))
            num_rows = max(math.ceil(wanted), batch + 1 if any(fixed) else 0)
        num_rows = min(max(num_rows, len(limits)), steps.sizes.most_rows(batch))
        if not is_beside and steps.graphs.captures:
            sizes = steps.rows_for(batch, len(limits))
            num_rows = next((rows for rows in sizes if rows >= num_rows), sizes[-1])
        widths = steps.widths_for(batch, num_rows, self._is_solo)
        longest = min(max(fixed, default=0), steps.max_width)
        fits = choice.width in widths and choice.width >= longest
        return StepShape(batch, num_rows, choice.width if fits else widths[-1])

    def _is_worth_it(self) -> bool:
        """Whether somebody is sure to go on after what is in flight; stop tokens aside."""
        most = sum(1 + one.step.shape.most_verified for one in self._in_flight)
        return any(s is not None and s.is_awake and s.sequence.num_left > most for s in self._seats)


def _rank(seat: Seat | None) -> int:
    if seat is None:
        return 2
    return 0 if seat.is_awake else 1
