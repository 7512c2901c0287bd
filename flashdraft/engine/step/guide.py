"""What the host says at the seams of a step: drafts before the verify, masks before the draw.

Where the host makes the drafts they are given to the step. Else the device drafts and verifies,
and a grammar, which lives on the host, puts what it forces in the place of draft tokens that it
forbids. While the target runs the host makes the masks of every row that the drafts lead to. A row
that they do not lead to has an empty mask: nothing is drawn there, and nothing before it can be
drawn that leads there. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flashdraft.engine.drafts import Draft
from flashdraft.engine.sampling.grammar import Constraint

Words = NDArray[np.int32]


@dataclass(frozen=True)
class GuidedSlot:
    """A slot whose tokens a grammar allows."""

    constraint: Constraint
    history: Sequence[int]  # output tokens before the step


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

    def fit(self, drafts: dict[int, Draft]) -> dict[int, Draft]:
        """Drafts as the grammars have them, as long as they were."""
        return {slot: self._fit(self.decoding[slot], draft) for slot, draft in drafts.items()}

    def masks(self, drafts: Mapping[int, Draft]) -> tuple[NDArray[np.int64], Words]:
        """Which rows have a mask, as [slot, draft tokens before it] each, and the masks."""
        places: list[tuple[int, int]] = []
        masks: list[Words] = []
        for slot, guided in (*self.decoding.items(), *self._waking.items()):
            tokens = drafts[slot].tokens if slot in drafts else []
            for place, mask in enumerate(guided.constraint.masks(guided.history, tokens)):
                places.append((slot, place))
                masks.append(self._widen(mask))
        shape = (len(masks), self._num_words)
        rows = np.stack(masks) if masks else np.zeros(shape, dtype=np.int32)
        return np.asarray(places, dtype=np.int64).reshape(-1, 2), rows

    def _fit(self, guided: GuidedSlot, draft: Draft) -> Draft:
        fitted = guided.constraint.fit(guided.history, draft, len(draft.tokens))
        if fitted is None:
            return draft
        # what is left of the draft is not led to, unless the grammar happens to allow it
        rest = slice(len(fitted.tokens), None)
        confidence = fitted.confidence + [0.0] * len(draft.tokens[rest])
        return Draft(fitted.tokens + draft.tokens[rest], confidence, draft.source)

    def _widen(self, mask: NDArray[np.uint8]) -> Words:
        padded = np.zeros(4 * self._num_words, dtype=np.uint8)
        padded[: len(mask)] = mask
        return padded.view(np.int32)
