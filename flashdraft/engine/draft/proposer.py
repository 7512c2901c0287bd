"""What the engine asks of a proposer with a state of its own, and a guard around any such."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Protocol

from torch import Tensor

from flashdraft.engine.drafts import Draft
from flashdraft.engine.policy.costs import DraftCost
from flashdraft.engine.sampling.process import RequestSampler
from flashdraft.engine.scheduler import Work
from flashdraft.engine.sequence import Sequence as RunningSequence

log = logging.getLogger(__name__)


class Proposer(Protocol):
    """What the engine asks of a drafter: keep up with committed tokens, and propose."""

    @property
    def max_drafts(self) -> int: ...

    def buffer(self, sequence: RunningSequence, taps: Tensor | None) -> None:
        """Take the taps of tokens just committed to the target's cache."""
        ...

    def forget(self, sequence: RunningSequence) -> None:
        """Drop what is buffered for a sequence that ended or lost its pages."""
        ...

    def fold(self, sequences: Sequence[RunningSequence]) -> None:
        """Bring the drafter's context up to the target's cache: num_folded = num_cached."""
        ...

    def fold_overdue(self, sequences: Sequence[RunningSequence]) -> None:
        """Fold where too much is buffered."""
        ...

    def propose(
        self,
        works: Sequence[Work],
        samplers: Sequence[RequestSampler],
        limits: Sequence[int],
    ) -> Sequence[Draft]:
        """A draft for every work, no longer than its room and its limit."""
        ...

    def measure(self, batch_sizes: Sequence[int]) -> DraftCost:
        """What `propose` takes for n sequences, for each n."""
        ...


class GuardedProposer:
    """A proposer whose failures cost drafts and never a request.

    The sequences it failed on are not shown to it again: they decode without it to their end.
    """

    def __init__(self, proposer: Proposer) -> None:
        self._proposer = proposer
        self._given_up: set[RunningSequence] = set()
        self.max_drafts = proposer.max_drafts
        self.measure = proposer.measure

    def serves(self, sequence: RunningSequence) -> bool:
        """Whether the sequence's drafter context is kept up."""
        return sequence not in self._given_up

    def buffer(self, sequence: RunningSequence, taps: Tensor | None) -> None:
        if self.serves(sequence):
            with self._guard([sequence]):
                self._proposer.buffer(sequence, taps)

    def forget(self, sequence: RunningSequence) -> None:
        with self._guard([sequence]):
            self._proposer.forget(sequence)
        self._given_up.discard(sequence)  # should it come back, it begins anew

    def fold(self, sequences: Sequence[RunningSequence]) -> None:
        if served := [s for s in sequences if self.serves(s)]:
            with self._guard(served):
                self._proposer.fold(served)

    def fold_overdue(self, sequences: Sequence[RunningSequence]) -> None:
        if served := [s for s in sequences if self.serves(s)]:
            with self._guard(served):
                self._proposer.fold_overdue(served)

    def propose(
        self,
        works: Sequence[Work],
        samplers: Sequence[RequestSampler],
        limits: Sequence[int],
    ) -> list[Draft]:
        drafts = [Draft([], []) for _ in works]
        if served := [i for i, work in enumerate(works) if self.serves(work.sequence)]:
            with self._guard([works[i].sequence for i in served]):
                proposed = self._proposer.propose(
                    [works[i] for i in served],
                    [samplers[i] for i in served],
                    [limits[i] for i in served],
                )
                for i, draft in zip(served, proposed, strict=True):
                    drafts[i] = draft
        return drafts

    @contextmanager
    def _guard(self, sequences: Sequence[RunningSequence]) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            name = type(error).__name__
            log.warning("drafting failed for %d requests: %s: %s", len(sequences), name, error)
            self._given_up.update(sequences)
            for sequence in sequences:
                with suppress(Exception):  # it is broken: all we can do is free what it holds
                    self._proposer.forget(sequence)
