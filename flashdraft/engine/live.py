"""One running request: its sequence, its sampler, its text, and when it ends."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from flashdraft.core import (
    FinishReason,
    Generation,
    ShownTree,
    StepStats,
    TokenEvent,
    TokenLogprob,
)
from flashdraft.engine.config import OUT_OF_MEMORY
from flashdraft.engine.draft.ngram import NgramIndex
from flashdraft.engine.drafts import Draft
from flashdraft.engine.output import TextOutput
from flashdraft.engine.policy.verify import Momentum
from flashdraft.engine.sampling.process import RequestSampler, RowScores
from flashdraft.engine.sequence import Sequence
from flashdraft.kernels.draw.rule import SlotRequest


class Ending(NamedTuple):
    """Why a request ended."""

    reason: FinishReason
    error: str | None = None

    @classmethod
    def by_failure(cls, error: Exception) -> Ending:
        """The end of a request that could not be computed."""
        if isinstance(error, torch.OutOfMemoryError | MemoryError):
            return cls(FinishReason.ERROR, OUT_OF_MEMORY)
        what = f"The engine could not compute this request: {type(error).__name__}: {error}"
        return cls(FinishReason.ERROR, what)


@dataclass(eq=False)
class Live:
    """Everything the engine keeps for a request."""

    sequence: Sequence
    sampler: RequestSampler
    output: TextOutput
    momentum: Momentum
    ngrams: NgramIndex | None
    _num_reported: int = field(default=0)
    _trees: list[ShownTree] = field(default_factory=list)  # of steps that are not reported yet

    @property
    def slot_request(self) -> SlotRequest:
        """What the device must know to choose this request's tokens."""
        return self.sampler.slot_request(self.sequence.output_ids)

    def absorb(
        self, tokens: list[int], scores: RowScores | None, num_accepted: int
    ) -> FinishReason | None:
        """Append the target's tokens until one of them ends the answer; return why it ended.

        tokens[j] was chosen from row j of `scores`; the first `num_accepted` had been drafted.
        """
        sequence, params = self.sequence, self.sequence.request.params
        constraint = self.sampler.constraint
        if not tokens:
            return None
        sequence.clock()
        for place, token in enumerate(tokens):
            sequence.tokens.append(token)
            sequence.drafted.append(place < num_accepted)
            if params.logprobs is not None:
                assert scores is not None
                sequence.logprobs.append(scores.logprobs(place, params.logprobs))
            may_stop = sequence.num_output > params.min_tokens
            # a grammar has let a stop token through because the answer ends with it
            if token in sequence.stop_ids and (may_stop or constraint is not None):
                return FinishReason.STOP
            if self.output.push(token, may_stop):
                return FinishReason.STOP
            if constraint is not None and constraint.ends(sequence.output_ids):
                return FinishReason.STOP
            if sequence.num_left <= 0:
                return FinishReason.LENGTH
        return None

    def count_step(self, step: StepStats, draft: Draft, path: list[int], num_kept: int) -> None:
        """Add a decode step to the statistics: what it verified, and the rows that were accepted.

        So many tokens of it were kept, the target's own one among them.
        """
        stats, depth, kept = self.sequence.stats, draft.depth, path[:num_kept]
        accepted, num_branches = len(kept), draft.num_branches
        num_off_chain = draft.num_off_chain(kept) if num_branches else 0
        step.num_decoding += 1
        step.num_accepted += accepted
        step.depths += (depth,)
        step.num_branches += num_branches
        step.num_branches_accepted += num_off_chain
        stats.expect(step)
        stats.steps += 1
        stats.drafted += len(draft.tokens)
        stats.accepted += accepted
        stats.branches += num_branches
        stats.branches_accepted += num_off_chain
        if num_branches and self.sequence.request.shows_trees:
            assert draft.parents is not None, "it has branches"
            at = self.sequence.num_output - num_kept - self._num_reported
            tree = ShownTree(at, tuple(draft.tokens), tuple(draft.parents), tuple(kept))
            self._trees.append(tree)
        unseen = [0] * (depth - len(stats.slots_verified))
        stats.slots_verified += unseen
        stats.slots_accepted += unseen
        for slot in range(depth):
            stats.slots_verified[slot] += 1
            stats.slots_accepted[slot] += slot < accepted
        stats.decode_tokens += num_kept
        stats.histogram[num_kept] = stats.histogram.get(num_kept, 0) + 1

    def event(self, ending: Ending | None) -> TokenEvent:
        """What was committed since the last event; with an ending, the whole answer too."""
        sequence = self.sequence
        if ending is not None:
            try:
                self.output.finish()
            except Exception as error:  # the decoder's: what it held back is lost
                ending = Ending.by_failure(error) if ending.error is None else ending
        new = slice(self._num_reported, sequence.num_output)
        self._num_reported = sequence.num_output
        has_logprobs = sequence.request.params.logprobs is not None
        logprobs: list[TokenLogprob] | None = sequence.logprobs if has_logprobs else None
        shown = self.output.take()
        trees, self._trees = tuple(self._trees), []
        generation = None
        if ending is not None:
            generation = Generation(
                text=self.output.text,
                token_ids=sequence.output_ids,
                finish_reason=ending.reason,
                stats=sequence.stats,
                logprobs=logprobs,
                drafted=sequence.drafted,
                error=ending.error,
                prompt_logprobs=sequence.prompt_logprobs,
                text_ends=self.output.ends,
            )
        return TokenEvent(
            request_id=sequence.request.id,
            token_ids=tuple(sequence.output_ids[new]),
            text=shown.text,
            drafted=tuple(sequence.drafted[new]),
            logprobs=None if logprobs is None else tuple(logprobs[new]),
            generation=generation,
            pieces=shown.pieces,
            trees=trees,
        )
