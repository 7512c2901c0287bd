"""How many draft tokens to send to the target: per request and step, from measured costs. No torch.

The target's step cost is known per number of rows (measured at start-up), each draft slot's chance
of survival is estimated online from the proposer's own confidence, and the choice maximises
expected tokens per second. Zero is always a candidate, so drafting is never slower than plain decoding by
more than an occasional probe.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

NUM_BUCKETS = 10
PRIOR_WEIGHT = 4.0  # observations a prior counts for
DECAY = 0.98  # per observation of a bucket: old evidence fades


@dataclass
class Draft:
    """Draft tokens for one sequence, with the proposer's confidence in each."""

    tokens: list[int]
    confidence: list[float]  # per slot: the proposer's own probability, given the slots before it
    source: str = ""  # the proposer's name

    def cut(self, length: int) -> Draft:
        return Draft(self.tokens[:length], self.confidence[:length], self.source)


class CostModel:
    """Seconds of a target step by number of rows, and of a drafter pass by number of sequences."""

    def __init__(self, target: dict[int, float], drafter: dict[int, float] | None = None) -> None:
        self._target = _monotone(target)
        self._drafter = _monotone(drafter or {})

    def target(self, num_rows: int) -> float:
        return _interpolate(self._target, num_rows)

    def drafter(self, num_sequences: int) -> float:
        return (
            _interpolate(self._drafter, num_sequences) if self._drafter and num_sequences else 0.0
        )


def _monotone(points: dict[int, float]) -> list[tuple[int, float]]:
    """Sorted points whose cost never falls: a measurement's noise must not reward more rows."""
    result: list[tuple[int, float]] = []
    for rows, cost in sorted(points.items()):
        result.append((rows, max(cost, result[-1][1] if result else 0.0)))
    return result


def _interpolate(points: list[tuple[int, float]], x: int) -> float:
    place = bisect.bisect_left(points, (x, -math.inf))
    if place < len(points) and points[place][0] == x:
        return points[place][1]
    if place == 0:
        return points[0][1]
    if len(points) == 1:
        return points[0][1] * x / points[0][0]
    low, high = points[max(0, min(place, len(points) - 1) - 1)], points[min(place, len(points) - 1)]
    return low[1] + (high[1] - low[1]) * (x - low[0]) / (high[0] - low[0])


class Survival:
    """Learns how often a draft token of a given confidence is accepted, once its turn comes."""

    def __init__(self, parent: Survival | None = None) -> None:
        self._parent = parent
        self._accepted: dict[tuple[str, int], float] = {}
        self._seen: dict[tuple[str, int], float] = {}

    def chance(self, source: str, confidence: float) -> float:
        """Estimated probability that the target agrees, given that it agreed so far."""
        key = (source, _bucket(confidence))
        if self._parent is None:
            prior = min(max(confidence, 0.02), 0.98)
        else:
            prior = self._parent.chance(source, confidence)
        seen = self._seen.get(key, 0.0)
        return (self._accepted.get(key, 0.0) + PRIOR_WEIGHT * prior) / (seen + PRIOR_WEIGHT)

    def observe(self, source: str, confidence: float, accepted: bool) -> None:
        key = (source, _bucket(confidence))
        self._seen[key] = self._seen.get(key, 0.0) * DECAY + 1.0
        self._accepted[key] = self._accepted.get(key, 0.0) * DECAY + float(accepted)
        if self._parent is not None:
            self._parent.observe(source, confidence, accepted)

    def curve(self, draft: Draft) -> list[float]:
        """Cumulative survival of every slot."""
        alive, result = 1.0, []
        for confidence in draft.confidence:
            alive *= self.chance(draft.source, confidence)
            result.append(alive)
        return result


def _bucket(confidence: float) -> int:
    return min(NUM_BUCKETS - 1, max(0, int(confidence * NUM_BUCKETS)))


@dataclass
class Momentum:
    """Whether drafting pays for one request lately, and when to try again."""

    gain: float | None = None  # running mean of the tokens a drafted step is expected to add
    width: float = 0.0  # running mean of the verify lengths chosen
    pause: int = 0  # steps left without drafting
    backoff: int = 8
    survival: Survival = field(default_factory=Survival)

    def remember(self, gain: float, width: int) -> None:
        """Take in what was chosen for a drafted step."""
        self.width = width if self.gain is None else 0.8 * self.width + 0.2 * width
        self.gain = gain if self.gain is None else 0.8 * self.gain + 0.2 * gain


class VerifyPolicy:
    """Chooses verify lengths. `fixed` overrides the choice for every request."""

    def __init__(self, costs: CostModel | None, fixed: int | None = None) -> None:
        self._costs = costs
        self._fixed = fixed
        self._survival = Survival()

    def new_request(self) -> Momentum:
        return Momentum(survival=Survival(self._survival))

    def wants_draft(self, momentum: Momentum, num_sequences: int, fixed: int | None) -> bool:
        """Whether running the block drafter for this request is worth its cost this step."""
        limit = self._fixed if fixed is None else fixed
        if limit is not None:
            return limit > 0
        if self._costs is None:
            return True
        if momentum.pause > 0:
            momentum.pause -= 1
            return False
        if momentum.gain is None:
            return True
        plain = self._costs.target(num_sequences)
        extra = max(1, round(momentum.width * num_sequences))
        drafted = self._costs.target(num_sequences + extra) + self._costs.drafter(num_sequences)
        if (1.0 + momentum.gain) * plain >= drafted:
            momentum.backoff = 8
            return True
        momentum.pause, momentum.gain = momentum.backoff, None  # then probe once
        momentum.backoff = min(64, momentum.backoff * 2)
        return False

    def better(self, momentum: Momentum, first: Draft | None, second: Draft) -> Draft:
        """The draft from which more tokens are expected."""
        if first is None:
            return second
        curve = momentum.survival.curve
        return first if sum(curve(first)) > sum(curve(second)) else second

    def choose(
        self,
        drafts: Sequence[Draft | None],
        momenta: Sequence[Momentum],
        fixed: Sequence[int | None],
        num_rows: int,
    ) -> list[int]:
        """Verify length of every draft; `num_rows` other rows are in the step already."""
        lengths = [0] * len(drafts)
        curves: dict[int, list[float]] = {}
        for index, draft in enumerate(drafts):
            if draft is None or not draft.tokens:
                continue
            limit = self._fixed if fixed[index] is None else fixed[index]
            if limit is not None:
                lengths[index] = min(limit, len(draft.tokens))
            elif self._costs is None:
                lengths[index] = len(draft.tokens)
            else:
                curves[index] = momenta[index].survival.curve(draft)
        if self._costs is not None:
            self._compete(lengths, curves, num_rows)
        for index, curve in curves.items():
            momenta[index].remember(sum(curve[: lengths[index]]), lengths[index])
        return lengths

    def _compete(self, lengths: list[int], curves: dict[int, list[float]], num_rows: int) -> None:
        """Hand rows to the likeliest slots of all requests while expected speed rises."""
        assert self._costs is not None
        # survival never rises along a draft, so taking the likeliest slots first keeps prefixes
        slots = sorted(((-alive, i) for i, curve in curves.items() for alive in curve))
        rows, tokens = num_rows + sum(lengths), float(len(lengths))
        best, best_count = tokens / self._costs.target(rows), 0
        for count, (negative_alive, _) in enumerate(slots, start=1):
            tokens -= negative_alive
            speed = tokens / self._costs.target(rows + count)
            if speed > best:
                best, best_count = speed, count
        for _, index in slots[:best_count]:
            lengths[index] += 1

    def observe(self, momentum: Momentum, draft: Draft, num_accepted: int) -> None:
        """Learn from a verified draft: every accepted slot, and the first refused one."""
        for slot in range(min(num_accepted + 1, len(draft.tokens))):
            momentum.survival.observe(draft.source, draft.confidence[slot], slot < num_accepted)
