"""The last verb of a step: keep what the target agreed with, roll the caches back to it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from torch import Tensor

from flashdraft.core import FinishReason, StepStats
from flashdraft.engine.cache.pages import PageBook
from flashdraft.engine.draft.proposer import GuardedProposer
from flashdraft.engine.drafts import BLOCK_SOURCE, Draft
from flashdraft.engine.live import Ending, Live
from flashdraft.engine.policy.verify import VerifyPolicy
from flashdraft.engine.sampling.process import LogitsError, RowScores
from flashdraft.engine.scheduler import Work
from flashdraft.engine.sequence import Sequence as RunningSequence
from flashdraft.engine.step.result import SlotResult


class Committer:
    """Appends tokens to sequences and brings pages and drafter context in line with them."""

    def __init__(
        self, book: PageBook, proposer: GuardedProposer | None, policy: VerifyPolicy
    ) -> None:
        self._book = book
        self._proposer = proposer
        self._policy = policy

    def accept_read(
        self, work: Work, live: Live, result: SlotResult, stats: StepStats
    ) -> Ending | None:
        """Commit what a step on the device did for one work."""
        draft = None
        if result.drafts:
            confidence = result.confidence[: len(result.drafts)]
            draft = Draft(result.drafts, confidence, BLOCK_SOURCE)
        samples = list(takewhile(lambda token: token >= 0, result.samples))
        num_accepted = min(result.num_accepted, len(samples))
        return self.accept(work, live, draft, samples, num_accepted, result.scores, stats)

    def accept(
        self,
        work: Work,
        live: Live,
        draft: Draft | None,
        samples: list[int],
        num_accepted: int,
        scores: RowScores | None,
        stats: StepStats,
    ) -> Ending | None:
        """Commit the accepted draft tokens and the bonus token of one work.

        `samples` are the target's own tokens, one per row, cut before the first row that no token
        can be chosen from. The scores matter only where log-probabilities are wanted, and to say
        whose fault such a row is; without, it is the model's.
        """
        try:
            return self._accept(work, live, draft, samples, num_accepted, scores, stats)
        except Exception as error:  # of the decoder, most likely
            return Ending.by_failure(error)

    def _accept(
        self,
        work: Work,
        live: Live,
        draft: Draft | None,
        samples: list[int],
        num_accepted: int,
        scores: RowScores | None,
        stats: StepStats,
    ) -> Ending | None:
        sequence = work.sequence
        if not work.is_decode:
            stats.num_prefill_tokens += work.num_tokens
        if not work.emits:
            sequence.num_cached = work.start + work.num_tokens
            return None
        drafts = draft.tokens if draft is not None else []
        before = sequence.num_output
        finish = live.absorb(samples[: num_accepted + 1], scores, num_accepted)
        if draft is not None:
            self._policy.observe(live.momentum, draft, num_accepted)
        if work.is_decode:
            num_kept = sequence.num_output - before
            live.count_step(len(drafts), num_accepted, num_kept)
            stats.num_decoding += 1
            stats.num_accepted += min(num_accepted, num_kept)
        computed = work.start + work.num_tokens + num_accepted
        sequence.num_cached = min(computed, len(sequence.tokens) - 1)
        if finish is not None:
            return Ending(finish)
        if num_accepted == len(samples):  # there is no bonus token: its row is not sound
            position = work.start + work.num_tokens + num_accepted
            constraint = live.sampler.constraint
            failure = constraint.failure if constraint is not None else None
            was_sound = scores is not None and scores.is_sound(num_accepted)
            error = LogitsError(position, was_sound, live.sampler)
            return Ending(FinishReason.ERROR, failure or str(error))
        return None

    def settle(
        self,
        works: Sequence[Work],
        taps: Tensor | None,
        row_offsets: Sequence[int],
        ended: Sequence[RunningSequence],
    ) -> None:
        """Truncate to what was committed, fold the drafter's context, publish complete pages."""
        for i, work in enumerate(works):
            sequence, first = work.sequence, row_offsets[i]
            if self._proposer is None:
                sequence.num_folded = sequence.num_cached
            elif sequence.num_cached > work.start:
                end = first + sequence.num_cached - work.start
                self._proposer.buffer(sequence, None if taps is None else taps[first:end])
            if work.is_decode:
                self._book.truncate(sequence, sequence.num_cached)
        if self._proposer is not None:
            self._proposer.fold_overdue([work.sequence for work in works])
            self._proposer.fold(ended)  # so that the next turn finds complete pages
        for work in works:
            self._release(work.sequence)

    def settle_read(self, sequences: Sequence[RunningSequence]) -> None:
        """The same after a step on the device, which folds what it computes and needs its pages."""
        for sequence in sequences:
            sequence.num_folded = sequence.num_cached
            self._release(sequence)

    def _release(self, sequence: RunningSequence) -> None:
        """Publish complete pages, and give back those that a window has left behind."""
        self._book.publish(sequence, sequence.tokens, sequence.num_folded)
        drafts = self._proposer is not None and self._proposer.serves(sequence)
        self._book.recycle(sequence, sequence.num_folded if drafts else sequence.num_cached)
