"""Which sequences run in the next step, and with how many tokens. No torch.

Decoding sequences come first, oldest first; prompts fill the rest of the step in chunks; waiting
sequences are admitted while their pages fit. When pages run out the youngest running sequence gives
its own back and waits: it loses nothing, for its tokens are kept and its cache can be recomputed.
Drafts never cost another sequence its pages or its turn: their room is what is left over. A chunk
has whole pictures, the first one even where it is larger than what is left of the step.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace

from flashdraft.engine.cache.pages import PageBook
from flashdraft.engine.sequence import MAX_CHUNK_PICTURES, Sequence

# tokens of pictures, with which no more prompts ride in a step: a tower has nine patches for each,
# and whoever decodes waits for it
MANY_PICTURE_TOKENS = MAX_CHUNK_PICTURES // 2


@dataclass(frozen=True)
class Work:
    """One sequence's share of a step: known tokens to compute, room for draft tokens after."""

    sequence: Sequence
    start: int  # position of the first token to compute
    num_tokens: int
    room: int = 0  # draft tokens that may follow; 0 unless decoding
    is_decode: bool = False  # the anchor alone, after the first token of the answer
    emits: bool = False  # the share reaches the anchor, so the target's next token comes out


def takes_more(budget: int, works: Iterable[Work]) -> bool:
    """Whether a step takes more of prompts beside these, with so many tokens left for it."""
    return (
        budget > 0
        and sum(work.sequence.num_picture_tokens(work.start, work.num_tokens) for work in works)
        < MANY_PICTURE_TOKENS
    )


def _work(sequence: Sequence, start: int, count: int) -> Work:
    reaches_anchor = start + count == len(sequence.tokens)
    return Work(sequence, start, count, is_decode=sequence.is_decoding, emits=reaches_anchor)


class Scheduler:
    """Queues, admission, chunking and preemption."""

    def __init__(
        self, book: PageBook, max_batch: int, max_step_tokens: int, prefill_chunk: int
    ) -> None:
        self.book = book
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in order of admission
        self.preempted: list[Sequence] = []  # since the last look: their buffers must be dropped
        self._max_batch = max_batch
        self.max_step_tokens = max_step_tokens
        self.prefill_chunk = prefill_chunk

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out wherever it is and give its pages back."""
        if sequence in self.running:
            self.running.remove(sequence)
            self.book.close(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def schedule(self, lookahead: int, solo: bool = False) -> list[Work]:
        """Choose the next step's work; decoding sequences get room for up to `lookahead` drafts.

        With `solo` no more than one sequence runs.
        """
        max_batch = 1 if solo else self._max_batch
        num_preempted = len(self.preempted)
        plan: dict[Sequence, Work] = {}
        decoding = [s for s in self.running[:max_batch] if s.is_decoding]
        prefilling = [s for s in self.running[:max_batch] if not s.is_decoding]
        has_prompts = bool(prefilling or (self.waiting and len(self.running) < max_batch))
        lookahead = self._fair_lookahead(lookahead, len(decoding), has_prompts)
        for sequence in decoding:
            self._continue(sequence, 1, plan)
        budget = self.max_step_tokens - len(decoding) * (1 + lookahead)
        for sequence in prefilling:
            if takes_more(budget, plan.values()):
                budget -= self._continue(sequence, budget, plan)
        for sequence, work in plan.items():
            if work.is_decode:
                plan[sequence] = self._with_room(work, lookahead)
        if len(self.preempted) > num_preempted:
            max_batch = 0  # no room: whoever came in now would be the next to give way
        budget = self.max_step_tokens - sum(w.num_tokens + w.room for w in plan.values())
        while self.waiting and len(self.running) < max_batch:
            if not takes_more(budget, plan.values()):
                break
            admitted = self._admit(self.waiting[0], budget)
            if admitted is None:
                break
            plan[admitted.sequence] = admitted
            budget -= admitted.num_tokens
        return [plan[sequence] for sequence in self.running if sequence in plan]

    def _fair_lookahead(self, lookahead: int, num_decoding: int, has_prompts: bool) -> int:
        """Draft tokens for every decoding sequence alike; prompts keep half of the step."""
        if num_decoding == 0:
            return 0
        share = self.max_step_tokens // 2 if has_prompts else self.max_step_tokens
        return max(0, min(lookahead, share // num_decoding - 1))

    def _continue(self, sequence: Sequence, budget: int, plan: dict[Sequence, Work]) -> int:
        """Plan a running sequence's next tokens; return how many, 0 if it lost its pages."""
        if sequence not in self.running:  # preempted a moment ago
            return 0
        start = sequence.num_cached
        count = sequence.cut(start, min(budget, self.prefill_chunk))
        while not self.book.reserve(sequence, len(sequence.tokens), start + count):
            youngest = self.running[-1]
            plan.pop(youngest, None)
            self.preempt(youngest)
            if youngest is sequence:
                return 0
        plan[sequence] = _work(sequence, start, count)
        return count

    def _with_room(self, work: Work, lookahead: int) -> Work:
        room = min(lookahead, work.sequence.num_left - 1)
        if room > 0 and self.book.reserve(work.sequence, work.start + 1 + room):
            return replace(work, room=room)
        return work

    def admit_next(self, budget: int) -> Work | None:
        """Let the next one in, if its pages fit; its first chunk."""
        if not self.waiting or len(self.running) >= self._max_batch:
            return None
        return self._admit(self.waiting[0], budget)

    def _admit(self, sequence: Sequence, budget: int) -> Work | None:
        most, pictures = sequence.most_cached, sequence.request.pictures
        cached = self.book.open(sequence, sequence.tokens, most, pictures)
        count = sequence.cut(cached, min(budget, self.prefill_chunk))
        if not self.book.reserve(sequence, len(sequence.tokens), cached + count):
            self.book.close(sequence)
            return None
        self.waiting.popleft()
        self.running.append(sequence)
        sequence.num_cached = sequence.num_folded = cached
        if sequence.stats.preemptions == 0:  # later it would find its own pages
            sequence.stats.cached_tokens = cached
            sequence.stats.queue_s = time.perf_counter() - sequence.arrived_at
        return _work(sequence, cached, count)

    def preempt_all(self) -> None:
        """Send every running sequence back to the queue, in order."""
        while self.running:
            self.preempt(self.running[-1])

    def preempt(self, sequence: Sequence) -> None:
        """Send a running sequence back to the head of the queue without its pages."""
        self.running.remove(sequence)
        sequence.stats.preemptions += 1
        self._send_back(sequence)

    def recover(self, sequence: Sequence) -> None:
        """Queue a sequence that an interrupt tore out of both queues."""
        if sequence not in self.running and sequence not in self.waiting:
            self._send_back(sequence)

    def _send_back(self, sequence: Sequence) -> None:
        if sequence in self.book:
            self.book.close(sequence)
        sequence.num_cached = sequence.num_folded = 0
        self.preempted.append(sequence)
        self.waiting.appendleft(sequence)
