"""How many draft tokens a step on the device verifies: from measured steps and estimated survival.

The choice is made a step early, from what the last steps showed: which of the drafter's confidences
came true, and what steps of each shape took. A shape that was never timed is guessed from a rough
model of the device; the neighbours of the best one are tried once, so that the choice climbs to the
top wherever the guesses were wrong. Zero is always a candidate. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from itertools import accumulate

from flashdraft.engine.drafts import DEVICE_SOURCES
from flashdraft.engine.policy.costs import CostModel
from flashdraft.engine.policy.verify import BUCKET_EDGES, MIN_GAIN, Survival

WIDTHS = (0, 1, 2, 3, 4, 5, 7, 10, 15)  # draft tokens a sequence, on average
FADE = 0.2  # of the newest time in a shape's running mean
HOPELESS = 1.3  # a shape that is guessed to be slower than the best by this is not tried
SETTLED = 8  # steps of one batch before anything is tried out: a batch that shrinks has no time
PROBE_PERIOD = 64  # steps between drafts where drafting does not pay
UNTIMED_S = 0.03  # a step, before any was timed
UNKNOWN = 0.8  # survival of a draft token nobody has seen yet


class WidthChooser:
    """Picks the mean verify length of the next step for a batch."""

    def __init__(self, costs: CostModel | None, survival: Survival, fixed: int | None) -> None:
        self._costs = costs
        self._survival = survival
        self.fixed = fixed
        self._seconds: dict[tuple[int, int], float] = {}
        self._draft_s: dict[int, float] = {}
        self._num_drafted = 0  # sequences of the last drafts
        self._gains = [0.0]  # tokens that their likeliest slots bring together, by how many slots
        self._steps_since_draft = 0
        self._batch, self._steps_of_batch = 0, 0

    def chances(self) -> list[list[float]]:
        """How likely the target agrees, for each of DEVICE_SOURCES and bucket of confidence."""
        edges = [0.0, *BUCKET_EDGES, 1.0]
        middles = [(low + high) / 2 for low, high in zip(edges[:-1], edges[1:], strict=True)]
        return [
            [self._survival.chance(source, middle) for middle in middles]
            for source in DEVICE_SOURCES
        ]

    def remember_drafts(self, drafts: Sequence[tuple[str, Sequence[float]]]) -> None:
        """Take in the newest drafts: for each sequence the source, and its confidence in them."""
        curves = [self._curve(source, confidence) for source, confidence in drafts]
        slots = sorted((alive for curve in curves for alive in curve), reverse=True)
        self._num_drafted, self._gains = len(curves), [0.0, *accumulate(slots)]

    def remember_time(self, batch: int, width: int, seconds: float) -> None:
        """Take in what a step took."""
        last = self._seconds.get((batch, width), seconds)
        self._seconds[batch, width] = last + FADE * (seconds - last)

    def seconds_of(self, batch: int, width: int) -> float:
        """What a step takes, as far as is known."""
        if not self._seconds:
            return UNTIMED_S
        if self._costs is not None:
            return self._guess(batch, width)
        nearest = min(self._seconds, key=lambda one: _distance(one, (batch, width)))
        return self._seconds[nearest]

    def expected_tokens(self, batch: int, width: int) -> float:
        """Tokens that a step is expected to commit for the whole batch."""
        if width == 0:
            return float(batch)
        if self._num_drafted == 0:
            return batch * sum(UNKNOWN**slot for slot in range(width + 1))
        return batch + batch / self._num_drafted * self._gains[width * self._num_drafted]

    def choose(
        self,
        batch: int,
        max_width: int,
        among: Collection[int] | None = None,
    ) -> int:
        """The mean verify length of the next step over `batch` sequences.

        Where `among` is given nothing else is tried: zero, one of these, or the best guess if there
        are none.
        """
        if self.fixed is not None:
            return min(self.fixed, max_width)
        widths = [width for width in WIDTHS if width <= max_width]
        if among:
            widths = [width for width in widths if width == 0 or width in among]
        if self._costs is None or len(widths) == 1:
            return widths[-1]
        pace = {w: self._guess(batch, w) / self.expected_tokens(batch, w) for w in widths}
        best = min(widths, key=lambda width: pace[width])
        self._steps_of_batch = self._steps_of_batch + 1 if batch == self._batch else 0
        self._batch = batch
        near = self._untimed_neighbour(batch, widths, best)
        if near is not None and pace[near] < HOPELESS * pace[best]:
            return near
        if best > 0 and pace[best] > (1.0 - MIN_GAIN) * pace[0]:
            best = 0
        return self._or_probe(best, widths)

    def _or_probe(self, best: int, widths: Sequence[int]) -> int:
        """The best width, or now and then a little drafting where the best is none."""
        self._steps_since_draft = 0 if best else self._steps_since_draft + 1
        if self._steps_since_draft >= PROBE_PERIOD and len(widths) > 1:
            self._steps_since_draft = 0
            return widths[1]
        return best

    def choose_beside(
        self,
        batch: int,
        max_width: int,
        target_s: Callable[[int], float],
        among: Collection[int] | None = None,
    ) -> int:
        """The same in a step with prompts, whose target pass over n rows takes target_s(n).

        Below what those who decode take alone it takes no less.
        """
        if self.fixed is not None:
            return min(self.fixed, max_width)
        widths, pace = [width for width in WIDTHS if width <= max_width], {}
        if among:
            widths = [width for width in widths if width == 0 or width in among]
        for width in widths:
            drafting = self._draft_s.get(batch, 0.0) if width else 0.0
            alone = self.seconds_of(batch, width)
            seconds = max(alone, target_s(batch * (1 + width)) + drafting)
            pace[width] = seconds / self.expected_tokens(batch, width)
        best = min(pace, key=lambda width: pace[width])
        if pace[best] > (1.0 - MIN_GAIN) * pace[0]:
            best = 0
        return self._or_probe(best, widths)

    def remember_draft(self, batch: int, width: int, seconds: float) -> None:
        """Take in what the drafter's part of a step took."""
        if width:
            last = self._draft_s.get(batch, seconds)
            self._draft_s[batch] = last + FADE * (seconds - last)

    def ranked(self, batch: int, max_width: int) -> list[int]:
        """Verify lengths that `choose` may come to, the likeliest first and plain steps second."""
        if self.fixed is not None:
            return [min(self.fixed, max_width)]
        widths = [width for width in WIDTHS if 0 < width <= max_width]
        if self._costs is not None:
            widths.sort(key=lambda w: self._guess(batch, w) / self.expected_tokens(batch, w))
        return [*widths[:1], 0, *widths[1:]]

    def _untimed_neighbour(self, batch: int, widths: Sequence[int], best: int) -> int | None:
        """The next width up or down that was never tried; None until the best one itself was."""
        if (batch, best) not in self._seconds or self._steps_of_batch < SETTLED:
            return None
        place = widths.index(best)
        near = widths[max(0, place - 1) : place + 2]
        return next((width for width in near if (batch, width) not in self._seconds), None)

    def _guess(self, batch: int, width: int) -> float:
        """Seconds of a step: as timed, or from the model and the nearest timed one."""
        if (batch, width) in self._seconds:
            return self._seconds[batch, width]
        ratio = 1.0
        if self._seconds:  # of the nearest batch, and there of the nearest width
            nearest = min(self._seconds, key=lambda one: _distance(one, (batch, width)))
            ratio = self._seconds[nearest] / self._model(*nearest)
        return ratio * self._model(batch, width)

    def _model(self, batch: int, width: int) -> float:
        assert self._costs is not None
        drafting = self._costs.drafter(batch) if width else 0.0
        return self._costs.target(batch * (1 + width)) + drafting

    def _curve(self, source: str, confidence: Sequence[float]) -> list[float]:
        """Survival of every slot; those that were not drafted go on as the others did."""
        alive, curve = 1.0, []
        for one in confidence:
            alive *= self._survival.chance(source, one)
            curve.append(alive)
        usual = alive ** (1.0 / len(curve)) if curve else UNKNOWN
        while len(curve) < WIDTHS[-1]:
            alive *= usual
            curve.append(alive)
        return curve


def _distance(one: tuple[int, int], other: tuple[int, int]) -> tuple[float, int]:
    """Of two shapes (batch, width): first of their batches, then of their widths."""
    return abs(math.log(one[0] / other[0])), abs(one[1] - other[1])
