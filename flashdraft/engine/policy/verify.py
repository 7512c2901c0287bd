"""How many draft tokens to send to the target: per request and step, from measured costs. No torch.

The target's step cost is known per number of rows (measured at start-up), each draft slot's chance
of survival is learnt online from the proposer's own confidence, and the choice minimises the time a
token is expected to take, averaged over the requests: a row for one of them slows all others down.
Zero is always a candidate. Where drafting does not pay the drafter rests, but for a probe now and
then that costs one percent: so drafting is never much slower than none.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from flashdraft.core import StepStats
from flashdraft.engine.config import MAX_VERIFY
from flashdraft.engine.drafts import BLOCK_SOURCE, OFFERED_SOURCES, Draft
from flashdraft.engine.policy.costs import CostModel

# confidences below the first edge are one bucket, between two edges another, and so on; finer near
# one, where a small difference decides over a long draft; what a grammar forces is by itself
BUCKET_EDGES = (0.02, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.97, 0.99, 1.0)
CONFIDENCE_WEIGHT = 4.0  # observations that the proposer's own word counts for
PARENT_WEIGHT = 12.0  # observations that all requests together count for, for one of them
DECAY, PARENT_DECAY = 0.98, 0.995  # per observation of a bucket: old evidence fades
MIN_WEIGHT = 0.05  # of one step in a request's running means
AFTER_REST = 1.0  # the same when the drafter comes back to a request
NEW_WEIGHT = 0.5  # the same for what a new request begins with: other requests' means
UNLIKELY, THIN = 0.5, 16  # an acceptance is news below this chance, or this many observations
PROBE_COST = 0.01  # what probing may cost, as a part of plain decoding
MIN_PROBE_PERIOD = 32  # steps
FIRST_LOOK = 2.0  # what trying the drafter once for new requests may cost, in plain steps
MIN_ALIVE = 0.02  # a slot less likely than this is never worth a row
MIN_GAIN = 0.03  # what drafting must promise over plain decoding: estimates err, requests end
PLAN_PERIOD = 4  # steps between looks at who is drafted for, while as many requests run
REST_PERIOD = 8  # steps, a part of a probe's; between looks for drafts where none was worth it
PLANNED_LENGTHS = (1, 2, 3, 4, 6, 8, 11, MAX_VERIFY)
SPARE_SLOTS = 2  # draft tokens asked for beyond what was verified lately
REACH_WEIGHT = 0.1  # of a step that verified less than the drafter was asked for


class Survival:
    """Learns how often a draft token of a given confidence is accepted, once its turn comes."""

    def __init__(self, parent: Survival | None = None) -> None:
        self._parent = parent
        self._accepted: dict[tuple[str, int], float] = {}
        self._seen: dict[tuple[str, int], float] = {}

    def chance(self, source: str, confidence: float) -> float:
        """Estimated probability that the target agrees, given that it agreed so far."""
        rate = self.rate(source, confidence)
        return min(confidence * rate, 1.0) if source in OFFERED_SOURCES else rate

    def rate(self, source: str, confidence: float) -> float:
        """The chance of all that are about as sure; of offers, the part of it that comes true.

        Offers are many and unlikely, and which of them is likelier is what their confidences say.
        """
        key = (source, bisect.bisect(BUCKET_EDGES, confidence))
        if self._parent is not None:
            prior, weight = self._parent.rate(source, confidence), PARENT_WEIGHT
        elif source in OFFERED_SOURCES:
            prior, weight = 1.0, CONFIDENCE_WEIGHT
        else:
            prior, weight = min(max(confidence, 0.02), 0.98), CONFIDENCE_WEIGHT
        seen, accepted = self._seen.get(key, 0.0), self._accepted.get(key, 0.0)
        return (accepted + weight * prior) / (seen + weight)

    def doubts(self, source: str, confidence: float) -> bool:
        """Whether an acceptance would be news: it is thought unlikely, or was hardly ever seen."""
        key = (source, bisect.bisect(BUCKET_EDGES, confidence))
        origin = self._parent or self
        return self.chance(source, confidence) < UNLIKELY or origin._seen.get(key, 0.0) < THIN

    def observe(self, source: str, confidence: float, accepted: bool) -> None:
        """Take in the target's word on one slot."""
        key = (source, bisect.bisect(BUCKET_EDGES, confidence))
        decay = PARENT_DECAY if self._parent is None else DECAY
        expected = confidence if source in OFFERED_SOURCES else 1.0
        self._seen[key] = self._seen.get(key, 0.0) * decay + expected
        self._accepted[key] = self._accepted.get(key, 0.0) * decay + float(accepted)
        if self._parent is not None:
            self._parent.observe(source, confidence, accepted)

    def curve(self, draft: Draft) -> list[float]:
        """Cumulative survival of every slot, up to where hardly any survives."""
        alive, result = 1.0, []
        last, chance = math.nan, 0.0  # a lookup is equally sure of all its tokens
        for confidence in draft.confidence:
            if confidence != last:
                last, chance = confidence, self.chance(draft.source, confidence)
            alive *= chance
            if alive < MIN_ALIVE:
                break
            result.append(alive)
        return result


@dataclass(eq=False)
class Momentum:
    """What the block drafter brings one request lately, and whether it runs for it."""

    survival: Survival
    is_drafting: bool = True
    extra: list[float] = field(default_factory=list)  # per slot: running mean of survival it adds
    weight: float = math.inf  # of the last step in that mean: an average first, fading later
    reach: float = math.inf  # draft tokens that are worth asking the drafter for
    is_new: bool = True  # was never asked about
    was_drafted: bool = False  # in this step
    surprise: str = ""  # whose unlikely slot was accepted: that proposer is worth another look
    rival: list[float] = field(default_factory=list)  # survival of the draft there was without it
    curve: list[float] = field(default_factory=list)  # survival of the draft of this step

    def remember(self, curve: Sequence[float], num_drafted: int) -> None:
        """Take in the survival of this step's draft; the rival's was to be had without it."""
        self.weight = max(MIN_WEIGHT, 1.0 / (1.0 + 1.0 / self.weight))
        self.extra += [0.0] * (num_drafted - len(self.extra))
        for slot in range(num_drafted):
            gain = curve[slot] if slot < len(curve) else 0.0
            gain -= self.rival[slot] if slot < len(self.rival) else 0.0
            self.extra[slot] += self.weight * (gain - self.extra[slot])
        # survival never rises along a block: what was not asked for is no better than what was
        for slot in range(max(1, num_drafted), len(self.extra)):
            self.extra[slot] = min(self.extra[slot], max(0.0, self.extra[slot - 1]))

    def stretch(self, length: int) -> None:
        """Ask next time for a little more than was verified; come down slowly."""
        wanted = length + SPARE_SLOTS
        slowly = self.reach + REACH_WEIGHT * (wanted - self.reach)
        self.reach = wanted if self.reach == math.inf else max(wanted, slowly)


class VerifyPolicy:
    """Chooses verify lengths. `fixed` overrides the choice for every request."""

    def __init__(self, costs: CostModel | None, fixed: int | None = None) -> None:
        self._costs = costs
        self._fixed = fixed
        self.survival = Survival()
        self._asked: list[Momentum] = []  # the requests that could draft in this step
        self._num_drafting = 0  # requests that the drafter runs for
        self._planned_for = 0  # how many requests decoded when that was decided
        self._num_steps = 1  # not 0: the first step is no probe
        self._typical = Momentum(self.survival)  # where new requests begin

    def new_request(self) -> Momentum:
        """Begin where the requests of the last step stand, as a guess to be corrected soon."""
        last = self._typical
        return Momentum(
            Survival(self.survival),
            is_drafting=last.is_drafting,
            extra=list(last.extra),
            weight=max(last.weight, NEW_WEIGHT),
            reach=last.reach,
        )

    def slots_wanted(
        self, momenta: Sequence[Momentum], fixed: Sequence[int | None], num_sequences: int
    ) -> list[int]:
        """How many tokens the block drafter is to draft for each request; 0 = not worth it.

        `num_sequences` requests decode in this step, these among them.
        """
        limits = [self._fixed if one is None else one for one in fixed]
        costs = self._costs
        if costs is None:
            return [MAX_VERIFY if limit is None else limit for limit in limits]
        pairs = list(zip(momenta, limits, strict=True))
        self._asked = [momentum for momentum, limit in pairs if limit is None]
        self._plan(costs, num_sequences)
        surprises = [momentum.surprise for momentum in self._asked]
        num_new = sum(momentum.is_new for momentum in self._asked)
        looks = num_new > 0 and self._affords_a_look(costs, num_sequences, num_new)
        is_probe = self._is_time_to_probe(costs, num_sequences)
        for momentum in self._asked:
            momentum.was_drafted = (
                momentum.is_drafting
                or (momentum.is_new and looks)
                or self._probes(momentum, num_sequences, BLOCK_SOURCE, surprises, is_probe)
            )
            momentum.is_new = False
        return [self._reach(momentum) if limit is None else limit for momentum, limit in pairs]

    def _reach(self, momentum: Momentum) -> int:
        return math.ceil(min(momentum.reach, MAX_VERIFY)) if momentum.was_drafted else 0

    def better(self, momentum: Momentum, first: Draft | None, second: Draft) -> Draft:
        """The draft from which more tokens are expected; the second one took a drafter pass."""
        if first is None:
            momentum.rival = []
            return second
        momentum.rival = momentum.survival.curve(first)
        return first if sum(momentum.rival) >= sum(momentum.survival.curve(second)) else second

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
            momenta[index].curve = []
            if draft is None or not draft.tokens:
                continue
            momenta[index].curve = momenta[index].survival.curve(draft)
            limit = self._fixed if fixed[index] is None else fixed[index]
            if limit is not None:
                lengths[index] = min(limit, len(draft.tokens))
            elif self._costs is None:
                lengths[index] = len(draft.tokens)
            else:
                curves[index] = momenta[index].curve
        if self._costs is not None:
            self._compete(self._costs, lengths, curves, num_rows)
            surprises = [momenta[index].surprise for index in curves]
            count = len(self._asked) or len(drafts)
            is_probe = bool(curves) and self._is_time_to_probe(self._costs, count)
            for index, curve in curves.items():
                momentum, length, draft = momenta[index], lengths[index], drafts[index]
                assert draft is not None
                if momentum.was_drafted:
                    momentum.remember(curve, len(draft.tokens))
                    momentum.stretch(length)
                    momentum.was_drafted = False
                if length == 0 and self._probes(momentum, count, draft.source, surprises, is_probe):
                    lengths[index] = 1  # only what is verified can be learnt from
            self._num_steps += 1
        return lengths

    def rest(self) -> int:
        """Steps in which nobody need ask, as nothing pays now; they count as if all had asked."""
        skipped = -self._num_steps % REST_PERIOD
        self._num_steps += skipped
        return skipped

    def expect(
        self,
        curves: Sequence[Sequence[float]],
        lengths: Sequence[int],
        num_decoding: int,
        num_rows: int,
        stats: StepStats,
    ) -> None:
        """Note what a step of these verify lengths is expected to be, and be without drafts."""
        gains = [sum(curve[:length]) for curve, length in zip(curves, lengths, strict=True)]
        stats.plain_tokens = float(num_decoding)
        stats.expected_tokens = num_decoding + sum(gains)
        if self._costs is not None:
            stats.plain_s = self._costs.target(num_rows)
            stats.expected_s = self._costs.target(num_rows + sum(lengths))
            stats.expected_s += self._drafting_costs(self._costs)

    def _compete(
        self, costs: CostModel, lengths: list[int], curves: dict[int, list[float]], num_rows: int
    ) -> None:
        """Hand rows to the best slots of all requests while the time of a token falls."""
        # a request's slots only ever bring less, so taking the best first keeps prefixes
        slots = []
        for index, curve in curves.items():
            tokens = 1.0
            for alive in curve:
                slots.append((1.0 / (tokens + alive) - 1.0 / tokens, index))
                tokens += alive
        slots.sort()
        # a prompt's rows are computed anyway: they are no reason to draft more, or less
        rows, plain = num_rows + sum(lengths), costs.target(len(lengths))
        base = plain - costs.target(rows) + self._drafting_costs(costs)
        steps = float(len(lengths))  # per token, summed over the requests
        best, best_count = (base + costs.target(rows)) * steps, 0
        # the pass is spent whether or not its draft is used; only the rows are still to decide on
        least = MIN_GAIN * plain * steps
        for count, (saved, _) in enumerate(slots, start=1):
            steps += saved
            seconds = (base + costs.target(rows + count)) * steps
            if seconds < best - (0.0 if best_count else least):
                best, best_count = seconds, count
        for _, index in slots[:best_count]:
            lengths[index] += 1

    def _drafting_costs(self, costs: CostModel) -> float:
        drafting = [momentum for momentum in self._asked if momentum.is_drafting]
        return costs.drafter(len(drafting), sum(momentum.reach for momentum in drafting))

    def _plan(self, costs: CostModel, num_sequences: int) -> None:
        """Decide for whom the drafter runs, from what it brought lately and today's crowd."""
        asked, size = self._asked, num_sequences
        if not asked or (size == self._planned_for and self._num_steps % PLAN_PERIOD and size > 1):
            return
        self._planned_for = size
        gains = {id(m): [0.0, *accumulate(m.extra)] for m in asked}
        asked.sort(key=lambda momentum: -gains[id(momentum)][-1])
        best, best_count = (1.0 - MIN_GAIN) * size * costs.target(size), 0
        slots = accumulate(momentum.reach for momentum in asked)
        drafting = [costs.drafter(count, total) for count, total in enumerate(slots, start=1)]
        for length in PLANNED_LENGTHS:
            steps = float(size)
            for count, momentum in enumerate(asked, start=1):
                gain = gains[id(momentum)][: length + 1][-1]
                steps += 1.0 / (1.0 + max(0.0, gain)) - 1.0
                seconds = costs.target(size + count * length) + drafting[count - 1]
                if steps * seconds < best:
                    best, best_count = steps * seconds, count
        for place, momentum in enumerate(asked):
            is_unknown = momentum.weight == math.inf  # nothing to go by: try, if it can pay
            momentum.is_drafting = place < best_count or (
                is_unknown and self._could_pay(size, size, 0, BLOCK_SOURCE)
            )
            if not momentum.is_drafting and not is_unknown:
                momentum.weight = AFTER_REST  # the past says less by then
        self._num_drafting = sum(momentum.is_drafting for momentum in asked)
        self._typical = asked[len(asked) // 2]

    def _is_time_to_probe(self, costs: CostModel, num_sequences: int) -> bool:
        """Whether this step tries again what did not pay. All requests try in the same step."""
        if self._num_steps % MIN_PROBE_PERIOD != 0:
            return False
        plain = costs.target(num_sequences)
        probe = costs.target(2 * num_sequences) - plain + costs.drafter(num_sequences)
        period = max(MIN_PROBE_PERIOD, probe / (PROBE_COST * plain))
        return bool(self._num_steps % 2 ** math.ceil(math.log2(period)) == 0)

    def _probes(
        self,
        momentum: Momentum,
        num_sequences: int,
        source: str,
        surprises: Sequence[str],
        is_probe: bool,
    ) -> bool:
        """Whether one request tries what did not pay: it is time, or it was surprised last time."""
        if momentum.surprise == source:
            num_tried = surprises.count(source)
            num_drafting = min(self._num_drafting, num_sequences - num_tried)
            return self._could_pay(num_sequences, num_tried, num_drafting, source)
        return is_probe and self._could_pay(num_sequences, num_sequences, 0, source)

    def _affords_a_look(self, costs: CostModel, num_sequences: int, num_new: int) -> bool:
        """Whether new requests may try the drafter once, whatever the last ones thought of it."""
        plain = costs.target(num_sequences)
        look = costs.target(num_sequences + num_new) - plain + costs.drafter(num_new)
        return look <= FIRST_LOOK * plain and self._could_pay(
            num_sequences, num_new, min(self._num_drafting, num_sequences - num_new), BLOCK_SOURCE
        )

    def _could_pay(
        self, num_sequences: int, num_tried: int, num_drafting: int, source: str
    ) -> bool:
        """Whether drafting for so many more would pay if all their draft tokens were accepted."""
        costs = self._costs
        assert costs is not None
        before = after = costs.drafter(num_drafting)
        if source == BLOCK_SOURCE:
            after = costs.drafter(num_drafting + num_tried)
        return any(
            (num_sequences - num_tried + num_tried / (1 + length))
            * (costs.target(num_sequences + num_tried * length) + after)
            < num_sequences * (costs.target(num_sequences) + before)
            for length in PLANNED_LENGTHS
        )

    def observe(
        self, momentum: Momentum, draft: Draft, num_accepted: int, path: Sequence[int] = ()
    ) -> None:
        """Learn from a verified draft: every accepted slot, and the first refused one.

        Of a tree every child of the rows on the target's path, which begins with the anchor.
        """
        survival, sources, confidence = momentum.survival, draft.sources, draft.confidence
        first = path[1] - 1 if len(path) > 1 else 0
        surprised = num_accepted > 0 and survival.doubts(sources[first], confidence[first])
        momentum.surprise = draft.source if surprised else ""
        if draft.parents is not None:
            nodes = zip(draft.parents, sources, confidence, strict=True)
            for row, (parent, source, sure) in enumerate(nodes, start=1):
                if parent in path:
                    survival.observe(source, sure, row in path)
            return
        for slot in range(min(num_accepted + 1, len(draft.tokens))):
            survival.observe(draft.source, confidence[slot], slot < num_accepted)
