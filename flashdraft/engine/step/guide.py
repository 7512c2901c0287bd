"""What the host says at the seams of a step: drafts before the verify, masks before the draw.

Where the host makes the drafts they are given to the step. Else the device drafts and verifies, and
a grammar lives on the host: a way through it is picked from the drafter's likeliest tokens, or
several as a tree, and what was looked up is cut where it forbids it. While the target runs the host
makes the masks of every row that the drafts lead to, each by its own way. A row that they do not
lead to has an empty mask: nothing is drawn there, and nothing before it can be drawn that leads
there. No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flashdraft.core import Request
from flashdraft.engine.draft.candidates import Candidates
from flashdraft.engine.draft.guided import Growth, draft_within
from flashdraft.engine.drafts import Draft
from flashdraft.engine.sampling.grammar import Constraint

Words = NDArray[np.int32]


@dataclass(frozen=True)
class GuidedSlot:
    """A slot whose tokens a grammar allows."""

    constraint: Constraint
    request: Request
    read_history: Callable[[], Sequence[int] | None]  # waits for the steps before
    most_output: int  # tokens that the answer may have
    num_nodes: int = 0  # of the tree that the host grows; 0 = its drafts are chains

    @cached_property
    def history(self) -> Sequence[int] | None:
        """Output tokens before the step; None where the answer has ended with them."""
        return self.read_history()


class DeviceDraft(NamedTuple):
    """What the device drafted for a slot, where a grammar is still to have its say."""

    tokens: list[int]  # the slot's chain
    candidates: Candidates  # what a drafter offers at the same places
    known: Draft | None = None  # the chain, where it was looked up


class StepGuide:
    """The grammars of a step, by slot: of those who decode, and of those who wake in it.

    `given` are the drafts of a step for which the host makes them, by slot too; `chance` is that
    of a draft token at its turn, by its source and its confidence.
    """

    def __init__(
        self,
        decoding: Mapping[int, GuidedSlot],
        waking: Mapping[int, GuidedSlot],
        vocab_size: int,
        given: Mapping[int, Draft] | None,
        chance: Callable[[str, float], float],
    ) -> None:
        self.decoding, self._waking, self.given = decoding, waking, given
        self._chance = chance
        self._num_words = -(-vocab_size // 32)

    @property
    def has_grammars(self) -> bool:
        return bool(self.decoding or self._waking)

    @property
    def slots(self) -> list[int]:
        return [*self.decoding, *self._waking]

    def look_ahead(self) -> None:
        """Wait for the steps before, and have the first masks, which no draft changes."""
        for guided in self.decoding.values():
            if guided.history is not None:
                guided.constraint.masks(guided.history, ())

    def fit(self, slot: int, found: DeviceDraft, most: int) -> Draft:
        """What was drafted as the slot's grammar has it: a tree, or a chain as long as before.

        A tree has no more nodes than the step has rows for: it is the beginning of a larger one.
        """
        guided, draft = self.decoding[slot], Draft([], [])
        history = guided.history
        if history is None:
            pass
        elif guided.num_nodes:  # nothing is so deep that no token is left for the target's own
            near = found.candidates.first(max(0, guided.most_output - len(history) - 1))
            growth = Growth(min(guided.num_nodes, most), self._chance)
            known = found.known
            return draft_within(guided.constraint, guided.request, history, near, growth, known)
        elif found.known is None:
            draft = draft_within(guided.constraint, guided.request, history, found.candidates)
        else:
            fitted = guided.constraint.fit(history, found.known, len(found.tokens))
            draft = fitted or Draft([], [], found.known.source)
        # what is left is not led to, unless the grammar happens to allow it
        rest = found.tokens[len(draft.tokens) :]
        return Draft(draft.tokens + rest, draft.confidence + [0.0] * len(rest), draft.source)

    def survival_of(self, draft: Draft) -> list[float]:
        """The chance of every token and all on its way; none has more than those before it."""
        alive, count = [1.0], len(draft.tokens)  # by rows, the anchor's first
        parents = range(count) if draft.parents is None else draft.parents
        for parent, source, sure in zip(parents, draft.sources, draft.confidence, strict=True):
            alive.append(min(alive[-1], alive[parent] * self._chance(source, sure)))
        return alive[1:]

    def masks(self, drafts: Mapping[int, Draft]) -> tuple[NDArray[np.int64], Words]:
        """Which rows have a mask, as [slot, its row] each, and the masks."""
        places: list[tuple[int, int]] = []
        masks: list[Words] = []
        for slot, guided in (*self.decoding.items(), *self._waking.items()):
            if guided.history is None:
                continue
            draft = drafts.get(slot) or Draft([], [])
            found = guided.constraint.masks(guided.history, draft.tokens, draft.parents)
            places += [(slot, row) for row in found]
            masks += map(self._widen, found.values())
        shape = (len(masks), self._num_words)
        rows = np.stack(masks) if masks else np.zeros(shape, dtype=np.int32)
        return np.asarray(places, dtype=np.int64).reshape(-1, 2), rows

    def _widen(self, mask: NDArray[np.uint8]) -> Words:
        padded = np.zeros(4 * self._num_words, dtype=np.uint8)
        padded[: len(mask)] = mask
        return padded.view(np.int32)
