"""A sequence in a slot of the device, as the host knows it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from flashdraft.engine.sampling.grammar import Constraint
from flashdraft.engine.sequence import Sequence
from flashdraft.engine.step.result import SlotResult
from flashdraft.engine.step.shape import PromptChunk, ScoredRows
from flashdraft.engine.step.slots import SlotState
from flashdraft.errors import CapacityError
from flashdraft.kernels.draw.rule import SlotRequest, has_penalties


class SeatRequest(NamedTuple):
    """What a seat must know of its request."""

    request: SlotRequest
    constraint: Constraint | None


@dataclass(eq=False)
class Seat:
    """A sequence in a slot."""

    sequence: Sequence
    constraint: Constraint | None
    num_computed: int  # tokens that the cache holds once all launched steps are done, of a prompt
    num_scored: int  # rows of the prompt whose log-probabilities are known, or launched
    is_awake: bool = False  # it decodes in the next step that is launched
    limit: int = -1  # draft tokens verified in a step, where that is fixed
    branches: bool = False  # they may be a tree, which the device grows
    guided_nodes: int = 0  # of a tree that the host grows within a grammar
    known_pages: list[list[int]] = field(default_factory=list)  # entered so far, by pool

    @property
    def wants_scores(self) -> bool:
        """Log-probabilities, or a word on whose fault a row without a token is."""
        params = self.sequence.request.params
        adjusts = has_penalties(params) or params.logit_bias or params.min_tokens > 0
        return params.logprobs is not None or bool(adjusts) or self.constraint is not None

    def output_after(self, steps: Iterable[SlotResult]) -> list[int] | None:
        """The output once the host has committed these too; None if the answer ends with them.

        A stop string is found when they are committed, not here.
        """
        output = list(self.sequence.output_ids)
        for one in steps:
            tokens = one.tokens
            output += tokens
            if len(tokens) <= one.num_accepted or not self.sequence.stop_ids.isdisjoint(tokens):
                return None
        num_new = len(output) - self.sequence.num_output
        if num_new and self.constraint is not None and self.constraint.ends(output):
            return None
        return output if num_new < self.sequence.num_left else None

    def slot_state(self, request: SlotRequest) -> SlotState:
        """The sequence as a slot takes it in."""
        sequence = self.sequence
        return SlotState(
            sequence.tokens[-1],
            sequence.num_cached,
            request,
            self.is_awake,
            sequence.tokens,
            limit=self.limit,
            end=sequence.max_length,
            branches=self.branches,
        )

    def no_room(self, length: int) -> CapacityError:
        """What is wrong if the cache cannot hold so much of it, though nobody else is there."""
        return CapacityError(
            f"The cache has no room for {length} tokens of one request; raise cache_gb or lower "
            "max_context."
        )

    def take_chunk(self, slot: int, start: int, count: int, emits: bool) -> PromptChunk:
        """A share of the prompt for a step, with those of its rows that are to be scored."""
        sequence, end = self.sequence, start + count
        scored, num_top = None, sequence.request.prompt_logprobs
        first, last = max(start, self.num_scored), min(end, sequence.num_prompt - 1)
        if num_top is not None and first < last:
            following = sequence.tokens[first + 1 : last + 1]
            scored, self.num_scored = ScoredRows(first - start, following, num_top), last
        self.num_computed, self.is_awake = end, emits
        pictures = sequence.pictures_in(start, count)
        return PromptChunk(slot, start, sequence.tokens[start:end], emits, scored, pictures)
