"""Drafts that the host makes, and how many of them are verified: where every step is read at once.

A CPU is at the host's side: it can look at drafts before they are verified, ask the drafter for
some requests alone, and look up what followed earlier without a pass. Among many requests even
looking costs a share of the step: where nothing was worth verifying, nobody looks for some steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from flashdraft.core import StepStats
from flashdraft.engine.config import MAX_VERIFY
from flashdraft.engine.draft.proposer import GuardedProposer
from flashdraft.engine.drafts import Draft
from flashdraft.engine.live import Live
from flashdraft.engine.policy.verify import VerifyPolicy
from flashdraft.engine.scheduler import Work

MIN_RESTING = 4  # requests: fewer may change their minds at every step


class HostDrafting:
    """Proposes and chooses verify lengths for the works of a step."""

    def __init__(
        self,
        proposer: GuardedProposer | None,
        policy: VerifyPolicy,
        live_of: Callable[[Work], Live],
    ) -> None:
        self._proposer, self._policy, self._live_of = proposer, policy, live_of
        self._num_resting = 0  # requests that found nothing worth verifying
        self._rest = 0  # steps before they look again

    @property
    def may_draft(self) -> bool:
        """Whether the next step may have drafts."""
        return self._rest == 0

    def draft(self, works: Sequence[Work], stats: StepStats) -> list[Draft | None]:
        """What is verified for every work; None = nothing."""
        begin = time.perf_counter()
        num_rows = sum(work.num_tokens for work in works)
        if self._rests(works):
            self._policy.expect([], [], len(works), num_rows, stats)
            return [None] * len(works)
        lives = [self._live_of(work) for work in works]
        fixed = [work.sequence.request.verify for work in works]
        drafts = [self._look_up(work, live) for work, live in zip(works, lives, strict=True)]
        num_decoding = sum(work.is_decode for work in works)
        if self._proposer is not None:
            self._propose(self._proposer, works, lives, drafts, num_decoding)
        lengths = self._policy.choose(drafts, [live.momentum for live in lives], fixed, num_rows)
        curves = [live.momentum.curve for live in lives]
        self._policy.expect(curves, lengths, num_decoding, num_rows, stats)
        if not any(lengths) and self._may_rest(works, lives):
            self._num_resting, self._rest = len(works), self._policy.rest()
        stats.draft_s = time.perf_counter() - begin
        return [d.cut(n) if d and n else None for d, n in zip(drafts, lengths, strict=True)]

    def _may_rest(self, works: Sequence[Work], lives: Sequence[Live]) -> bool:
        """Whether what was not worth it now will not be for some steps; prompts change all."""
        if len(works) < MIN_RESTING or not all(work.is_decode for work in works):
            return False
        is_free = all(work.sequence.request.verify is None for work in works)
        return is_free and all(live.sampler.constraint is None for live in lives)

    def _rests(self, works: Sequence[Work]) -> bool:
        """Whether nobody looks for drafts in this step: the same requests found none lately."""
        is_same = len(works) == self._num_resting and all(work.is_decode for work in works)
        if self._rest == 0 or not is_same:
            self._rest = 0
            return False
        self._rest -= 1
        return True

    def _propose(
        self,
        proposer: GuardedProposer,
        works: Sequence[Work],
        lives: Sequence[Live],
        drafts: list[Draft | None],
        num_decoding: int,
    ) -> None:
        """Ask the drafter where that may pay, and keep the better draft of each request."""
        able = [i for i, w in enumerate(works) if w.room and proposer.serves(w.sequence)]
        wanted = self._policy.slots_wanted(
            [lives[i].momentum for i in able],
            [works[i].sequence.request.verify for i in able],
            num_decoding,
        )
        limits = {i: limit for i, limit in zip(able, wanted, strict=True) if limit}
        blocks = proposer.propose(
            [works[i] for i in limits], [lives[i].sampler for i in limits], list(limits.values())
        )
        for i, proposed in zip(limits, blocks, strict=True):
            block = self._fit(works[i], lives[i], proposed) or Draft([], [])
            drafts[i] = self._policy.better(lives[i].momentum, drafts[i], block)

    def _look_up(self, work: Work, live: Live) -> Draft | None:
        if work.room == 0 or work.sequence.request.verify == 0:
            return None
        found = None
        if live.ngrams is not None:
            found = live.ngrams.propose(work.sequence.tokens, min(work.room, MAX_VERIFY))
        return self._fit(work, live, found)

    def _fit(self, work: Work, live: Live, draft: Draft | None) -> Draft | None:
        """The draft as the request's grammar has it, if there is one."""
        constraint = live.sampler.constraint
        if constraint is None:
            return draft
        return constraint.fit(work.sequence.output_ids, draft, min(work.room, MAX_VERIFY))
