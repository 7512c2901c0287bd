"""One running request: its sequence, its sampler, its text, and when it ends."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from torch import Tensor

from flashdraft.core import FinishReason, Generation, TokenEvent, TokenLogprob
from flashdraft.engine.ngram import NgramIndex
from flashdraft.engine.output import TextOutput
from flashdraft.engine.policy import Momentum
from flashdraft.engine.sampling import RequestSampler, logprobs_of
from flashdraft.engine.sequence import Sequence


@dataclass(eq=False)
class Live:
    """Everything the engine keeps for a request."""

    sequence: Sequence
    sampler: RequestSampler
    output: TextOutput
    momentum: Momentum
    ngrams: NgramIndex | None
    _num_reported: int = field(default=0)

    def absorb(self, tokens: list[int], logits: Tensor, num_accepted: int) -> FinishReason | None:
        """Append the target's tokens until one of them ends the answer; return why it ended.

        tokens[j] was chosen from logits[j]; the first `num_accepted` of them had been drafted.
        """
        sequence, params = self.sequence, self.sequence.request.params
        now = time.perf_counter()
        if sequence.first_token_at is None:
            sequence.first_token_at = now
            sequence.stats.ttft_s = now - sequence.arrived_at
        sequence.stats.decode_s = now - sequence.first_token_at
        for place, token in enumerate(tokens):
            sequence.tokens.append(token)
            sequence.drafted.append(place < num_accepted)
            if params.logprobs is not None:
                sequence.logprobs.append(logprobs_of(logits[place], token, params.logprobs))
            if token in sequence.stop_ids and sequence.num_output > params.min_tokens:
                return FinishReason.STOP
            if self.output.push(token):
                return FinishReason.STOP
            if sequence.num_left <= 0:
                return FinishReason.LENGTH
        return None

    def count_step(self, num_drafted: int, num_accepted: int, num_kept: int) -> None:
        """Add a decode step to the statistics."""
        stats = self.sequence.stats
        stats.steps += 1
        stats.drafted += num_drafted
        stats.accepted += min(num_accepted, num_kept)
        stats.decode_tokens += num_kept
        stats.histogram[num_kept] = stats.histogram.get(num_kept, 0) + 1

    def event(self, finish: FinishReason | None, error: str | None = None) -> TokenEvent:
        """What was committed since the last event; with a finish, the whole answer too."""
        sequence = self.sequence
        if finish is not None:
            self.output.finish()
        new = slice(self._num_reported, sequence.num_output)
        self._num_reported = sequence.num_output
        has_logprobs = sequence.request.params.logprobs is not None
        logprobs: list[TokenLogprob] | None = sequence.logprobs if has_logprobs else None
        text = self.output.take()
        generation = None
        if finish is not None:
            generation = Generation(
                text=self.output.text,
                token_ids=sequence.output_ids,
                finish_reason=finish,
                stats=sequence.stats,
                logprobs=logprobs,
                drafted=sequence.drafted,
                error=error,
            )
        return TokenEvent(
            request_id=sequence.request.id,
            token_ids=tuple(sequence.output_ids[new]),
            text=text,
            drafted=tuple(sequence.drafted[new]),
            logprobs=None if logprobs is None else tuple(logprobs[new]),
            generation=generation,
        )
