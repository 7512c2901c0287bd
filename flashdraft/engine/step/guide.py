"""What the host says at the seams of a step: drafts before the verify, masks before the draw.

Where the host makes the drafts they are given to the step. Else the device drafts and verifies, and
a grammar lives on the host: a way through it is picked from the drafter's likeliest tokens, and
what was looked up is cut where it forbids it. While the target runs the host makes the masks of
every row that the drafts lead to. A row that they do not lead to has an empty mask: nothing is
drawn there, and nothing before it can be drawn that leads there. No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from flashdraft.core import Request
from flashdraft.engine.draft.guided import Candidates, draft_within
from flashdraft.engine.drafts import Draft
from flashdraft.engine.sampling.grammar import Constraint

Words = NDArray[np.int32]


@dataclass(frozen=True)
class GuidedSlot:
    """A slot whose tokens a grammar allows."""

    constraint: Constraint
    request: Request
    read_history: Callable[[], Sequence[int] | None]  # waits for the steps before

    @cached_property
    def history(self) -> Sequence[int] | None:
        """Output tokens before the step; None where the answer has ended with them."""
        return self.read_history()


class StepGuide:
    """The grammars of a step, by slot: of those who decode, and of those who wake in it.

    `given` are the drafts of a step for which the host makes them, by slot too.
    """

    def __init__(
        self,
        decoding: Mapping[int, GuidedSlot],
        waking: Mapping[int, GuidedSlot],
        vocab_size: int,
        given: Mapping[int, Draft] | None = None,
    ) -> None:
        self.decoding, self._waking, self.given = decoding, waking, given
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

    def fit(self, slot: int, found: Draft | Candidates) -> Draft:
        """A draft, or what a drafter offers for one, as the slot's grammar has it; as long."""
        guided, tokens = self.decoding[slot], list(map(int, found.tokens))
        draft = Draft([], [])
        if guided.history is None:
            pass
        elif isinstance(found, Candidates):
            draft = draft_within(guided.constraint, guided.request, guided.history, found)
        else:
            fitted = guided.constraint.fit(guided.history, found, len(tokens))
            draft = fitted or Draft([], [], found.source)
        # what is left is not led to, unless the grammar happens to allow it
        rest = tokens[len(draft.tokens) :]
        return Draft(draft.tokens + rest, draft.confidence + [0.0] * len(rest), draft.source)

    def masks(self, drafts: Mapping[int, Draft]) -> tuple[NDArray[np.int64], Words]:
        """Which rows have a mask, as [slot, draft tokens before it] each, and the masks."""
        places: list[tuple[int, int]] = []
        masks: list[Words] = []
        for slot, guided in (*self.decoding.items(), *self._waking.items()):
            if guided.history is None:
                continue
            tokens = drafts[slot].tokens if slot in drafts else []
            for place, mask in enumerate(guided.constraint.masks(guided.history, tokens)):
                places.append((slot, place))
                masks.append(self._widen(mask))
        shape = (len(masks), self._num_words)
        rows = np.stack(masks) if masks else np.zeros(shape, dtype=np.int32)
        return np.asarray(places, dtype=np.int64).reshape(-1, 2), rows

    def _widen(self, mask: NDArray[np.uint8]) -> Words:
        padded = np.zeros(4 * self._num_words, dtype=np.uint8)
        padded[: len(mask)] = mask
        return padded.view(np.int32)
