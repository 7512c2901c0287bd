"""The scheduler over random traces with a fake model, and its rules one by one."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from flashdraft.core import Request, SamplingParams
from flashdraft.engine.cache.pages import PageBook, Pool
from flashdraft.engine.cache.planning import window_pages
from flashdraft.engine.scheduler import Scheduler, Work
from flashdraft.engine.sequence import Sequence

PAGE = 4


def make_sequence(name: str, num_prompt: int, max_length: int, seed: int | None = None) -> Sequence:
    rng = random.Random(name if seed is None else seed)
    prompt = [rng.randrange(50) for _ in range(num_prompt)]
    return Sequence(Request(name, prompt, SamplingParams(), 0), frozenset(), max_length)


def make_scheduler(
    num_pages: int = 100, max_batch: int = 4, max_step_tokens: int = 64, prefill_chunk: int = 32
) -> Scheduler:
    book = PageBook([Pool(num_pages, None)], PAGE)
    return Scheduler(book, max_batch, max_step_tokens, prefill_chunk)


def commit(
    scheduler: Scheduler, works: list[Work], rng: random.Random, max_lag: int = 0, keep: int = 99
) -> None:
    """Advance every work's sequence the way the engine does: up to `keep` draft tokens are kept."""
    book = scheduler.book
    for work in works:
        sequence = work.sequence
        if work.emits:
            num_kept = rng.randint(0, min(work.room, keep))
            sequence.tokens += [rng.randrange(50) for _ in range(num_kept + 1)]
            sequence.num_cached = work.start + work.num_tokens + num_kept
        else:
            sequence.num_cached = work.start + work.num_tokens
        if work.is_decode:
            book.truncate(sequence, sequence.num_cached)
        if sequence.num_cached - sequence.num_folded >= max_lag:
            sequence.num_folded = sequence.num_cached
        book.publish(sequence, sequence.tokens, sequence.num_folded)
        book.recycle(sequence, sequence.num_folded)


def decode_until(scheduler: Scheduler, *sequences: Sequence) -> None:
    """Step until all of these are decoding."""
    for _ in range(50):
        if all(s.is_decoding for s in sequences):
            return
        commit(scheduler, scheduler.schedule(0), random.Random(0))
    raise AssertionError("they do not come to decode")


# -- random traces -------------------------------------------------------------------------------


@dataclass
class Limits:
    """What a random trace runs under."""

    max_batch: int
    max_step_tokens: int
    prefill_chunk: int
    lookahead: int
    max_context: int
    max_lag: int  # how far the drafter's context may lag behind


def random_limits(rng: random.Random) -> Limits:
    max_batch = rng.choice((1, 2, 4, 7))
    return Limits(
        max_batch=max_batch,
        max_step_tokens=max(max_batch, rng.choice((1, 8, 40, 200))),
        prefill_chunk=rng.choice((1, 5, 16, 64)),
        lookahead=rng.choice((0, 3, 15)),
        max_context=rng.choice((20, 60, 90)),
        max_lag=rng.choice((0, 0, 12)),
    )


def smallest_book(windows: list[int | None], limits: Limits, spare: int) -> PageBook:
    """Hardly more pages than a lone sequence of max_context needs, as cache/memory.py has it."""
    slack = min(limits.prefill_chunk, limits.max_step_tokens) + 1 + limits.lookahead
    pools = []
    for window in windows:
        num_pages = -(-limits.max_context // PAGE)
        if window is not None:
            num_pages = min(num_pages, window_pages(window, slack + limits.max_lag, PAGE))
        pools.append(Pool(num_pages + spare, window))
    return PageBook(pools, PAGE, use_prefix_cache=spare % 2 == 0)


class Trace:
    """Random arrivals, cancels and ends over a scheduler; every rule is checked at every step."""

    def __init__(self, windows: list[int | None], seed: int) -> None:
        self.rng = random.Random(f"{windows} {seed}")
        self.limits = random_limits(self.rng)
        book = smallest_book(windows, self.limits, self.rng.choice((0, 1, 6)))
        self.scheduler = Scheduler(
            book, self.limits.max_batch, self.limits.max_step_tokens, self.limits.prefill_chunk
        )
        self.alive: list[Sequence] = []  # in order of arrival
        self.num_preemptions = 0

    def run(self) -> None:
        num_left, steps = self.rng.randint(1, 12), 0
        while num_left or self.scheduler.has_work:
            for _ in range(min(num_left, self.rng.choice((0, 0, 1, 3)))):
                self.arrive(num_left)
                num_left -= 1
            self.step()
            steps += 1
            assert steps < 12 * 4 * self.limits.max_context, "no end in sight"
        pools = self.scheduler.book.pools
        assert [pool.num_available for pool in pools] == [pool.num_pages for pool in pools]

    def arrive(self, name: int) -> None:
        most = self.limits.max_context
        num_prompt = self.rng.choice((1, 6, most // 2, most - 1))
        length = min(most, num_prompt + self.rng.choice((1, 8, most)))
        sequence = make_sequence(str(name), num_prompt, length, seed=self.rng.randrange(3))
        self.alive.append(sequence)
        self.scheduler.add(sequence)

    def step(self) -> None:
        scheduler, rng = self.scheduler, self.rng
        if self.alive and rng.random() < 0.02:
            self.end(rng.choice(self.alive))
        before = {s: list(s.tokens) for s in self.alive}
        works = scheduler.schedule(self.limits.lookahead)
        self.check_plan(works)
        assert all(s.tokens == tokens for s, tokens in before.items())
        assert works or not self.alive, "nothing runs although something waits"
        commit(scheduler, works, rng, self.limits.max_lag)
        self.check()
        for work in works:
            if work.sequence.num_left <= 0 or (work.emits and rng.random() < 0.02):
                assert work.sequence.num_left >= 0, "longer than allowed"
                self.end(work.sequence)
        self.check()

    def end(self, sequence: Sequence) -> None:
        self.alive.remove(sequence)
        self.scheduler.remove(sequence)
        assert sequence not in self.scheduler.book

    def check_plan(self, works: list[Work]) -> None:
        scheduler, limits = self.scheduler, self.limits
        planned = [work.sequence for work in works]
        assert len(set(planned)) == len(planned), "planned twice"
        assert planned == [s for s in scheduler.running if s in planned], "out of order"
        assert len(scheduler.running) <= limits.max_batch
        assert sum(w.num_tokens + w.room for w in works) <= limits.max_step_tokens
        for work in works:
            sequence, end = work.sequence, work.start + work.num_tokens
            assert work.start == sequence.num_cached and work.num_tokens >= 1
            assert end <= len(sequence.tokens) and work.emits == (end == len(sequence.tokens))
            assert work.num_tokens <= limits.prefill_chunk or work.is_decode
            assert work.room <= (limits.lookahead if work.is_decode else 0)
            assert work.room < sequence.num_left, "drafts beyond the answer's end"
            for pool in range(len(scheduler.book.pools)):
                table = scheduler.book.table(sequence, pool)
                assert len(table) * PAGE >= end + work.room, "no pages for its rows"
        decoding = [s for s in scheduler.running if s.is_decoding]
        assert all(s in planned for s in decoding), "a decoding sequence was passed over"
        oldest = self.alive[:1]
        assert not oldest or oldest[0] in planned, "the oldest must always go on"
        self.num_preemptions += len(scheduler.preempted)
        assert not any(s in scheduler.running for s in scheduler.preempted), "let in again at once"
        scheduler.preempted.clear()
        self.check()

    def check(self) -> None:
        scheduler = self.scheduler
        scheduler.book.check_integrity()
        assert [*scheduler.running, *scheduler.waiting] == self.alive, "order of arrival is lost"
        for sequence in self.alive:
            assert (sequence in scheduler.book) == (sequence in scheduler.running)
            assert 0 <= sequence.num_folded <= sequence.num_cached < len(sequence.tokens)


@pytest.mark.parametrize(
    "windows", [[None], [None, 24], [None, 16, 40], [24]], ids=["full", "24", "16+40", "only 24"]
)
def test_random_traces(windows: list[int | None]) -> None:
    num_preemptions = 0
    for seed in range(250):  # four configurations: a thousand traces
        trace = Trace(windows, seed)
        trace.run()
        num_preemptions += trace.num_preemptions
    assert num_preemptions > 100, "the traces do not press hard enough"


# -- the rules, one by one -----------------------------------------------------------------------


def test_decoding_comes_first_then_prompts_then_the_queue() -> None:
    scheduler = make_scheduler(max_step_tokens=40, prefill_chunk=16)
    old, long, late = (make_sequence(n, k, 90) for n, k in (("a", 4), ("b", 60), ("c", 30)))
    scheduler.add(old)
    decode_until(scheduler, old)
    scheduler.add(long)
    commit(scheduler, scheduler.schedule(0), random.Random(0))
    scheduler.add(late)
    works = scheduler.schedule(0)
    assert [(w.sequence, w.num_tokens) for w in works] == [(old, 1), (long, 16), (late, 16)]
    assert [(w.is_decode, w.emits) for w in works] == [(True, True), (False, False), (False, False)]


def test_a_prompt_in_chunks_emits_with_its_last_one() -> None:
    scheduler = make_scheduler(prefill_chunk=8)
    sequence = make_sequence("a", 20, 30)
    scheduler.add(sequence)
    seen = []
    for _ in range(4):
        [work] = works = scheduler.schedule(5)
        seen.append((work.start, work.num_tokens, work.room, work.is_decode, work.emits))
        commit(scheduler, works, random.Random(0), keep=0)
    assert seen == [
        (0, 8, 0, False, False),
        (8, 8, 0, False, False),
        (16, 4, 0, False, True),
        (20, 1, 5, True, True),
    ]


@pytest.mark.parametrize(("max_length", "room"), [(30, 15), (14, 2), (13, 1), (12, 0)])
def test_room_ends_with_the_answer(max_length: int, room: int) -> None:
    scheduler = make_scheduler()
    sequence = make_sequence("a", 10, max_length)
    scheduler.add(sequence)
    decode_until(scheduler, sequence)
    assert len(sequence.tokens) == 11
    assert scheduler.schedule(15)[0].room == room


def test_drafts_share_a_step_evenly_and_leave_half_of_it_to_prompts() -> None:
    scheduler = make_scheduler(max_step_tokens=32)
    sequences = [make_sequence(str(i), 2, 90) for i in range(4)]
    for sequence in sequences[:3]:
        scheduler.add(sequence)
    decode_until(scheduler, *sequences[:3])
    works = scheduler.schedule(15)
    assert [work.room for work in works] == [9, 9, 9]
    commit(scheduler, works, random.Random(0), keep=0)
    scheduler.add(make_sequence("long", 60, 90))
    works = scheduler.schedule(15)
    assert [(work.num_tokens, work.room) for work in works] == [(1, 4), (1, 4), (1, 4), (17, 0)]


def test_no_more_sequences_run_than_a_step_has_tokens() -> None:
    scheduler = make_scheduler(max_step_tokens=2)
    sequences = [make_sequence(str(i), 1, 90) for i in range(3)]
    for sequence in sequences:
        scheduler.add(sequence)
    decode_until(scheduler, *sequences[:2])
    works = scheduler.schedule(15)
    assert [(w.sequence, w.num_tokens, w.room) for w in works] == [
        (sequences[0], 1, 0),
        (sequences[1], 1, 0),
    ]


def test_drafts_take_no_page_that_another_sequence_needs() -> None:
    scheduler = make_scheduler(num_pages=5)
    first, second = make_sequence("a", 7, 90), make_sequence("b", 7, 90)
    for sequence in (first, second):
        scheduler.add(sequence)
    decode_until(scheduler, first, second)
    commit(scheduler, scheduler.schedule(0), random.Random(0))
    assert first.num_cached == second.num_cached == 8, "both need a page now, and one is left"
    works = scheduler.schedule(15)
    assert [work.sequence for work in works] == [first]
    assert scheduler.preempted == [second]
    # had the pages been six, both would have run, and without room for drafts
    roomy = make_scheduler(num_pages=6)
    for sequence in (a := make_sequence("a", 7, 90), b := make_sequence("b", 7, 90)):
        roomy.add(sequence)
    decode_until(roomy, a, b)
    commit(roomy, roomy.schedule(0), random.Random(0))
    works = roomy.schedule(15)
    assert [(work.sequence, work.room) for work in works] == [(a, 0), (b, 0)]
    assert roomy.preempted == []


def test_the_youngest_gives_way_loses_nothing_and_is_first_in_the_queue() -> None:
    scheduler = make_scheduler(num_pages=9)
    sequences = [make_sequence(str(i), 10, 90) for i in range(3)]
    waiting = make_sequence("w", 10, 90)
    for sequence in (*sequences, waiting):
        scheduler.add(sequence)
    decode_until(scheduler, *sequences)
    for _ in range(2):
        commit(scheduler, scheduler.schedule(0), random.Random(0))
    tokens = list(sequences[2].tokens)
    works = scheduler.schedule(0)
    assert [work.sequence for work in works] == sequences[:2]
    assert list(scheduler.waiting) == [sequences[2], waiting]
    assert scheduler.preempted == [sequences[2]]
    assert sequences[2].tokens == tokens and sequences[2].num_cached == 0
    assert sequences[2].stats.preemptions == 1
    assert sequences[2] not in scheduler.book
    scheduler.remove(sequences[0])
    works = scheduler.schedule(0)
    assert [work.sequence for work in works] == [sequences[1], sequences[2]]
    assert works[1].start == 4, "the others took the end of what it had published"
    assert works[1].emits and not works[1].is_decode
    assert sequences[2].stats.cached_tokens == 0, "finding one's own pages again is no hit"
    scheduler.book.check_integrity()


def test_a_sequence_already_planned_can_still_be_preempted() -> None:
    book = PageBook([Pool(100, None), Pool(8, 8)], PAGE)
    scheduler = Scheduler(book, max_batch=4, max_step_tokens=64, prefill_chunk=16)
    long, short = make_sequence("long", 60, 90), make_sequence("short", 2, 90)
    scheduler.add(long)
    scheduler.add(short)
    decode_until(scheduler, short)
    while short.num_cached < 8:  # its window grows, and the old prompt is held back meanwhile
        commit(
            scheduler, [w for w in scheduler.schedule(0) if w.sequence is short], random.Random()
        )
    assert not long.is_decoding
    works = scheduler.schedule(0)  # `short` is planned first, then `long` needs its pages
    assert [work.sequence for work in works] == [long]
    assert scheduler.preempted == [short] and list(scheduler.waiting) == [short]
    book.check_integrity()


def test_the_queue_is_served_in_order_without_overtaking() -> None:
    scheduler = make_scheduler(num_pages=10)
    first, large, small = (make_sequence(n, k, 90) for n, k in (("a", 20), ("b", 36), ("c", 2)))
    for sequence in (first, large, small):
        scheduler.add(sequence)
    assert [work.sequence for work in scheduler.schedule(0)] == [first]
    assert list(scheduler.waiting) == [large, small]
    scheduler.remove(first)
    assert [work.sequence for work in scheduler.schedule(0)] == [large, small]


def test_a_prefix_hit_saves_pages_and_work() -> None:
    scheduler = make_scheduler(num_pages=12)
    first, second = make_sequence("a", 33, 90, seed=1), make_sequence("b", 33, 90, seed=1)
    scheduler.add(first)
    decode_until(scheduler, first)
    scheduler.add(second)
    works = scheduler.schedule(0)
    assert (works[1].sequence, works[1].start, works[1].num_tokens) == (second, 32, 1)
    assert second.stats.cached_tokens == 32
    assert second.num_cached == second.num_folded == 32


def test_solo_runs_one_only() -> None:
    scheduler = make_scheduler()
    sequences = [make_sequence(str(i), 6, 90) for i in range(3)]
    for sequence in sequences:
        scheduler.add(sequence)
    assert [work.sequence for work in scheduler.schedule(3, solo=True)] == sequences[:1]
    assert scheduler.running == sequences[:1]
    decode_until(scheduler, *sequences)
    assert [work.sequence for work in scheduler.schedule(3, solo=True)] == sequences[:1]


def test_preempt_all_keeps_the_order() -> None:
    scheduler = make_scheduler(max_batch=3)
    sequences = [make_sequence(str(i), 6, 90) for i in range(5)]
    for sequence in sequences:
        scheduler.add(sequence)
    scheduler.schedule(0)
    scheduler.preempt_all()
    assert scheduler.running == [] and list(scheduler.waiting) == sequences
    assert scheduler.book.pools[0].num_available == 100
    assert set(scheduler.preempted) == set(sequences[:3])


def test_remove_frees_pages_wherever_the_sequence_is() -> None:
    scheduler = make_scheduler(max_batch=1)
    running, waiting, unknown = (make_sequence(n, 6, 90) for n in "abc")
    scheduler.add(running)
    scheduler.add(waiting)
    scheduler.schedule(0)
    for sequence in (unknown, waiting, running):
        scheduler.remove(sequence)
        scheduler.book.check_integrity()
    assert not scheduler.has_work
    assert scheduler.book.pools[0].num_available == 100
    assert scheduler.schedule(15) == []
