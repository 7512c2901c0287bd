"""The last verb of a step: keep what the target agreed with, roll the caches back to it."""

from __future__ import annotations

from collections.abc import Sequence

from flashdraft.core import FinishReason, StepStats
from flashdraft.engine.cache.pages import PageBook
from flashdraft.engine.draft.proposer import GuardedProposer
from flashdraft.engine.live import Ending, Live
from flashdraft.engine.policy.verify import VerifyPolicy
from flashdraft.engine.sampling.process import LogitsError
from flashdraft.engine.sequence import Sequence as RunningSequence
from flashdraft.engine.step.pipeline import StepPart
from flashdraft.engine.step.result import TokenScores


class Committer:
    """Appends tokens to sequences and brings pages and drafter context in line with them."""

    def __init__(
        self,
        book: PageBook,
        proposer: GuardedProposer | None,
        policy: VerifyPolicy,
        is_at_once: bool,
    ) -> None:
        """`is_at_once` says that every step is read before the next is planned.

        The proposer is one whose context the host keeps up.
        """
        self._book = book
        self._proposer = proposer
        self._policy = policy
        self._is_at_once = is_at_once

    def accept(self, part: StepPart, live: Live, stats: StepStats) -> Ending | None:
        """Commit the accepted draft tokens and the bonus token of one sequence.

        The target's own tokens count up to the first row that none can be chosen from. Scores
        matter only where log-probabilities are wanted, and to say whose fault such a row is;
        without, it is the model's.
        """
        try:
            return self._accept(part, live, stats)
        except Exception as error:  # of the decoder, most likely
            return Ending.by_failure(error)

    def _accept(self, part: StepPart, live: Live, stats: StepStats) -> Ending | None:
        work, result, scores = part.work, part.result, part.result.scores
        sequence = work.sequence
        if not work.is_decode:
            stats.num_prefill_tokens += work.num_tokens
            self._score_prompt(sequence, part.prompt_scores)
        if not work.emits:
            sequence.num_cached = work.start + work.num_tokens
            return None
        tokens = result.tokens
        num_accepted = min(result.num_accepted, len(tokens))
        draft = part.draft
        if draft is None and result.drafts:
            draft = result.draft.cut(len(result.drafts))
        before = sequence.num_output
        finish = live.absorb(tokens, scores, num_accepted)
        if draft is not None:
            self._policy.observe(live.momentum, draft, num_accepted, result.path or ())
        if work.is_decode:
            rows = list(range(1 + num_accepted)) if result.path is None else result.path
            verified = draft or result.draft.cut(0)
            num_kept = sequence.num_output - before
            live.count_step(stats, verified, rows[1 : 1 + num_accepted], num_kept)
        computed = work.start + work.num_tokens + num_accepted
        sequence.num_cached = min(computed, len(sequence.tokens) - 1)
        if finish is not None:
            return Ending(finish)
        if num_accepted == len(tokens):  # there is no bonus token: its row is not sound
            position = work.start + work.num_tokens + num_accepted
            constraint, path = live.sampler.constraint, result.path or range(1 + num_accepted)
            failure = None
            if constraint is not None:
                failure = constraint.failures.get(path[num_accepted])
            was_sound = scores is not None and scores.is_sound(num_accepted)
            error = LogitsError(position, was_sound, live.sampler)
            return Ending(FinishReason.ERROR, failure or str(error))
        return None

    def _score_prompt(self, sequence: RunningSequence, scores: TokenScores | None) -> None:
        num_top = sequence.request.prompt_logprobs
        if scores is not None and num_top is not None:
            sequence.score(scores.logprobs(place, num_top) for place in range(len(scores)))

    def settle(self, parts: Sequence[StepPart], ended: Sequence[RunningSequence]) -> None:
        """Bring pages and the drafter's context in line, and publish complete pages.

        A device that runs ahead writes the context itself, and needs the pages it was given.
        """
        for part in parts:
            sequence, start = part.work.sequence, part.work.start
            if self._proposer is None:
                sequence.num_folded = sequence.num_cached
            elif sequence.num_cached > start:
                count = sequence.num_cached - start
                self._proposer.buffer(sequence, None if part.taps is None else part.taps[:count])
            if self._is_at_once and part.work.is_decode:
                self._book.truncate(sequence, sequence.num_cached)
        if self._proposer is not None:
            self._proposer.fold_overdue([part.work.sequence for part in parts])
            self._proposer.fold(ended)  # so that the next turn finds complete pages
        for part in parts:
            self._release(part.work.sequence)

    def _release(self, sequence: RunningSequence) -> None:
        """Publish complete pages, and give back those that a window has left behind."""
        self._book.publish(sequence, sequence.tokens, sequence.num_folded)
        drafts = self._proposer is not None and self._proposer.serves(sequence)
        self._book.recycle(sequence, sequence.num_folded if drafts else sequence.num_cached)
