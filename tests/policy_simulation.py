"""A simulated target and drafter for the verify-length policy: costs, requests, steps."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from flashdraft.engine.drafts import Draft
from flashdraft.engine.policy.costs import CostModel, DraftCost
from flashdraft.engine.policy.verify import Momentum, VerifyPolicy

NUM_DRAFTS = 15
WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)
COSTS: dict[str, Callable[[int], float]] = {  # seconds of a step by its rows
    "flat": lambda rows: 1.0 + 0.005 * (rows - 1),
    "slope": lambda rows: 1.0 + 0.08 * (rows - 1),
    "steep": lambda rows: 1.0 + 0.5 * (rows - 1),
    "linear": float,
    "stepped": lambda rows: float(-(-rows // 8)),
    "jump": lambda rows: 1.0 if rows == 1 else max(1.9, 1.0 + 0.12 * rows),
}


def make_costs(name: str, drafter: float = 0.0) -> CostModel:
    target = {width: COSTS[name](width) for width in WIDTHS}
    return CostModel(target, DraftCost({n: drafter * (1 + 0.05 * (n - 1)) for n in (1, 2, 4, 8)}))


@dataclass(frozen=True)
class Kind:
    """How a request's drafts fare: mean acceptance, its spread, and how wrong confidence is."""

    accept: float
    spread: float = 0.0
    bias: float = 0.0

    def draw(self, rng: random.Random) -> tuple[list[float], int]:
        """Confidences of a draft, and how many of its tokens the target agrees with."""
        chances = [
            min(1.0, max(0.0, self.accept + rng.uniform(-self.spread, self.spread)))
            for _ in range(NUM_DRAFTS)
        ]
        refused = (slot for slot, chance in enumerate(chances) if rng.random() >= chance)
        confidences = [min(0.999, max(0.001, chance + self.bias)) for chance in chances]
        return confidences, next(refused, NUM_DRAFTS)


@dataclass
class Outcome:
    """What a simulated run took."""

    seconds: float = 0.0
    tokens: int = 0
    num_steps: int = 0
    num_drafted: int = 0  # sequences the drafter ran for

    def per_token(self) -> float:
        return self.seconds / self.tokens


def step(
    policy: VerifyPolicy,
    costs: CostModel,
    momenta: list[Momentum],
    kinds: list[Kind],
    rng: random.Random,
    outcome: Outcome,
    cut: bool = False,
) -> list[int]:
    """One decode step of a batch; returns how many tokens each request got.

    With `cut` the drafter drafts no more than it is asked for, as the real one does.
    """
    count = len(momenta)
    drafts: list[Draft | None] = [None] * count
    agreed = [0] * count
    wanted = policy.slots_wanted(momenta, [None] * count, count)
    for i, momentum in enumerate(momenta):
        if wanted[i]:
            confidence, agreed[i] = kinds[i].draw(rng)
            block = Draft([0] * NUM_DRAFTS, confidence, "block")
            block = block.cut(wanted[i]) if cut else block
            drafts[i] = policy.better(momentum, None, block)
    lengths = policy.choose(drafts, momenta, [None] * count, count)
    num_drafted = sum(draft is not None for draft in drafts)
    outcome.seconds += costs.drafter(num_drafted) + costs.target(count + sum(lengths))
    outcome.num_steps += 1
    outcome.num_drafted += num_drafted
    gained = []
    for momentum, draft, length, accepted in zip(momenta, drafts, lengths, agreed, strict=True):
        if draft is not None and length:
            policy.observe(momentum, draft.cut(length), min(accepted, length))
        gained.append(1 + min(accepted, length))
    outcome.tokens += sum(gained)
    return gained


def simulate(
    costs: CostModel,
    new_kind: Callable[[random.Random], Kind],
    batch: int,
    num_steps: int,
    seed: int,
    lengths: tuple[int, int] = (20, 300),
) -> Outcome:
    """Requests come and go, as many at once as `batch`."""
    rng, policy, outcome = random.Random(seed), VerifyPolicy(costs), Outcome()
    momenta = [policy.new_request() for _ in range(batch)]
    kinds = [new_kind(rng) for _ in range(batch)]
    left = [rng.randint(*lengths) for _ in range(batch)]
    for _ in range(num_steps):
        for i, gained in enumerate(step(policy, costs, momenta, kinds, rng, outcome)):
            left[i] -= gained
            if left[i] <= 0:
                momenta[i], kinds[i] = policy.new_request(), new_kind(rng)
                left[i] = rng.randint(*lengths)
    return outcome


def best_fixed(costs: CostModel, kind: Kind, batch: int, seed: int) -> float:
    """Seconds per token of the best verify length that never changes, 0 without a drafter too."""
    rng = random.Random(seed)
    agreed = [kind.draw(rng)[1] for _ in range(2000)]
    best = costs.target(batch) / batch
    for length in range(1, NUM_DRAFTS + 1):
        tokens = sum(1 + min(length, n) for n in agreed) / len(agreed)
        seconds = costs.drafter(batch) + costs.target(batch * (1 + length))
        best = min(best, seconds / (batch * tokens))
    return best
