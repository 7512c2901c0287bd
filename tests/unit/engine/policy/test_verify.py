"""The verify-length policy: its parts one by one, then at work against a simulated target."""

from __future__ import annotations

import random

import pytest

from flashdraft.core import StepStats
from flashdraft.engine.config import MAX_VERIFY
from flashdraft.engine.drafts import Draft
from flashdraft.engine.policy.costs import CostModel, DraftCost
from flashdraft.engine.policy.verify import Survival, VerifyPolicy
from tests.policy_simulation import (
    COSTS,
    NUM_DRAFTS,
    WIDTHS,
    Kind,
    Outcome,
    best_fixed,
    make_costs,
    simulate,
    step,
)


def choose(
    policy: VerifyPolicy, *confidences: list[float], fixed: list[int | None] | None = None
) -> list[int]:
    """Verify lengths for new requests with drafts of these confidences."""
    drafts = [Draft([7] * len(c), c, "block") for c in confidences]
    momenta = [policy.new_request() for _ in drafts]
    return policy.choose(drafts, momenta, fixed or [None] * len(drafts), len(drafts))


# -- costs ---------------------------------------------------------------------------------------


def test_costs_between_and_beyond_the_measured_points() -> None:
    costs = CostModel({2: 10.0, 4: 20.0, 8: 24.0}, DraftCost({1: 3.0, 4: 6.0}))
    rows = {1: 10.0, 2: 10.0, 3: 15.0, 4: 20.0, 6: 22.0, 8: 24.0, 12: 28.0, 100: 116.0}
    assert {n: costs.target(n) for n in rows} == pytest.approx(rows)
    sequences = {0: 0.0, 1: 3.0, 2: 4.0, 4: 6.0, 8: 10.0}
    assert {n: costs.drafter(n) for n in sequences} == pytest.approx(sequences)


def test_a_single_measurement_is_taken_in_proportion() -> None:
    costs = CostModel({4: 8.0})
    assert [costs.target(n) for n in (1, 4, 8)] == [8.0, 8.0, 16.0]
    assert costs.drafter(5) == 0.0, "there is no drafter"


def test_noise_never_makes_more_rows_cheaper() -> None:
    rng = random.Random(0)
    for _ in range(50):
        costs = CostModel({width: rng.uniform(1.0, 2.0) for width in WIDTHS})
        seconds = [costs.target(rows) for rows in range(1, 100)]
        assert seconds == sorted(seconds)


# -- survival ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("confidence", "truth"), [(0.95, 0.3), (0.3, 0.9), (0.6, 0.0), (0.5, 0.5)])
def test_survival_finds_the_true_acceptance(confidence: float, truth: float) -> None:
    rng, everyone = random.Random(1), Survival()
    request = Survival(everyone)
    assert request.chance("block", confidence) == pytest.approx(confidence), "at first, its word"
    estimates = []
    for number in range(4000):
        request.observe("block", confidence, rng.random() < truth)
        if number > 2000:
            estimates.append(request.chance("block", confidence))
    assert sum(estimates) / len(estimates) == pytest.approx(truth, abs=0.04)
    assert Survival(everyone).chance("block", confidence) == pytest.approx(truth, abs=0.12)
    assert Survival(everyone).chance("ngram", confidence) == pytest.approx(confidence)


def test_survival_tells_requests_and_confidences_apart() -> None:
    everyone = Survival()
    good, bad = Survival(everyone), Survival(everyone)
    for _ in range(60):
        good.observe("block", 0.95, True)
        bad.observe("block", 0.95, False)
    assert good.chance("block", 0.95) > 0.8 > 0.2 > bad.chance("block", 0.95)
    assert bad.chance("block", 0.4) == pytest.approx(0.4)


def test_a_curve_never_rises() -> None:
    draft = Draft([1, 2, 3], [0.5, 1.0, 0.8])
    curve = Survival().curve(draft)
    assert curve == sorted(curve, reverse=True)
    assert curve == pytest.approx([0.5, 0.5 * 0.98, 0.5 * 0.98 * 0.8])


# -- one choice ----------------------------------------------------------------------------------


def test_rows_that_cost_nothing_are_used_for_everything_likely() -> None:
    flat = CostModel({1: 1.0, 64: 1.0})
    assert choose(VerifyPolicy(flat), [0.9] * NUM_DRAFTS) == [NUM_DRAFTS]
    assert choose(VerifyPolicy(make_costs("flat")), [0.9] * 4 + [0.02] * 4) == [4]


def test_steep_costs_or_hopeless_drafts_mean_plain_decoding() -> None:
    assert choose(VerifyPolicy(make_costs("linear")), [0.98] * NUM_DRAFTS) == [0]
    assert choose(VerifyPolicy(make_costs("steep")), [0.4] * NUM_DRAFTS) == [0]
    assert choose(VerifyPolicy(make_costs("slope")), [0.02] * NUM_DRAFTS) == [0]


def test_a_step_in_the_costs_is_filled_to_its_edge() -> None:
    assert choose(VerifyPolicy(make_costs("stepped")), [0.7] * NUM_DRAFTS) == [7]


def test_requests_compete_by_the_time_a_row_saves_and_keep_prefixes() -> None:
    policy = VerifyPolicy(CostModel({1: 1.0, 8: 1.0, 9: 4.0, 64: 30.0}))  # room for eight rows
    assert choose(policy, [0.9] * 8, [0.4] * 8) == [4, 2]
    assert choose(policy, [0.9, 0.05, 0.9], [0.6] * 8) == [1, 5]
    assert choose(policy, [0.7] * 8, [0.7] * 8) == [3, 3]


def test_a_prompts_rows_are_no_reason_to_verify_more() -> None:
    policy, draft = VerifyPolicy(make_costs("slope")), Draft([7] * 8, [0.5] * 8, "block")
    momenta = [policy.new_request(), policy.new_request()]
    alone = policy.choose([draft, draft], momenta, [None, None], 2)
    with_prompt = policy.choose([draft, None], momenta, [None, None], 1 + 60)
    assert 0 < with_prompt[0] <= alone[0]
    costly = VerifyPolicy(CostModel({1: 1.0, 2: 2.0, 64: 64.0}))
    assert costly.choose([draft, None], momenta, [None, None], 1 + 60) == [0, 0]


def test_what_a_step_is_expected_to_be_is_noted() -> None:
    policy, stats = VerifyPolicy(CostModel({1: 1.0, 9: 2.0})), StepStats()
    policy.expect([[0.5, 0.25, 0.1], [0.9], []], [2, 0, 0], 2, 5, stats)  # one is a prompt's
    assert (stats.plain_tokens, stats.expected_tokens) == (2, 2.75)
    assert (stats.plain_s, stats.expected_s) == pytest.approx((1.5, 1.75))


def test_fixed_lengths_are_kept_for_all_and_for_one() -> None:
    four = [0.01] * 4
    steep = make_costs("linear")
    assert choose(VerifyPolicy(steep, fixed=3), four, four) == [3, 3]
    assert choose(VerifyPolicy(steep, fixed=9), four, four) == [4, 4]
    assert choose(VerifyPolicy(None, fixed=0), four) == [0]
    assert choose(VerifyPolicy(steep, fixed=3), four, four, fixed=[1, None]) == [1, 3]
    assert choose(VerifyPolicy(steep), four, four, four, fixed=[2, None, 0]) == [2, 0, 0]
    assert choose(VerifyPolicy(None), four) == [4], "without costs, whatever was drafted"


def test_fixed_lengths_decide_whether_to_draft() -> None:
    costs = make_costs("linear", drafter=9.0)
    policy = VerifyPolicy(costs, fixed=2)
    momenta = [policy.new_request() for _ in range(3)]
    assert policy.slots_wanted(momenta, [None, 0, 5], 3) == [2, 0, 5]
    assert VerifyPolicy(costs, fixed=0).slots_wanted(momenta[:1], [None], 1) == [0]
    assert VerifyPolicy(None).slots_wanted(momenta[:2], [None, 3], 2) == [MAX_VERIFY, 3]


def test_nothing_drafted_nothing_verified() -> None:
    policy = VerifyPolicy(make_costs("flat"))
    momenta = [policy.new_request(), policy.new_request()]
    assert policy.choose([None, Draft([], [])], momenta, [None, 3], 2) == [0, 0]


def test_the_better_of_two_drafts_is_the_one_that_brings_more() -> None:
    policy = VerifyPolicy(make_costs("flat"))
    momentum = policy.new_request()
    sure, long = Draft([1], [0.98], "ngram"), Draft([2] * 5, [0.7] * 5, "block")
    assert policy.better(momentum, None, sure) is sure
    assert policy.better(momentum, sure, long) is long
    for _ in range(30):
        policy.observe(momentum, long, 0)
    assert policy.better(momentum, sure, long) is sure


# -- at work -------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", [0.05, 0.3, 1.5])
@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("shape", COSTS)
def test_never_slower_than_plain_decoding(shape: str, batch: int, drafter: float) -> None:
    costs, num_steps = make_costs(shape, drafter), 1200 if batch == 1 else 400
    plain = costs.target(batch) / batch

    def any_kind(rng: random.Random) -> Kind:
        return Kind(rng.random(), 0.2, rng.uniform(-0.2, 0.2))

    def boastful(rng: random.Random) -> Kind:
        return Kind(0.95 if rng.random() < 0.1 else 0.1, 0.1, 0.5)

    for new_kind in (any_kind, boastful, lambda rng: Kind(0.0, 0.0, 0.9)):
        outcome = simulate(costs, new_kind, batch, num_steps, seed=3)
        assert outcome.per_token() <= 1.03 * plain


@pytest.mark.parametrize("shape", [name for name in COSTS if name != "flat"])
def test_a_fixed_batch_ends_no_later_because_one_request_drafts_well(shape: str) -> None:
    """Rows for one request slow down the others, which is no gain if they end last."""
    costs, batch, length = make_costs(shape, 0.3), 5, 200
    for good in (0.55, 0.8, 0.98):
        kinds = [Kind(good, 0.1)] + [Kind(0.03, 0.02, 0.2)] * (batch - 1)
        rng, outcome, policy = random.Random(5), Outcome(), VerifyPolicy(costs)
        running = [(policy.new_request(), kind, [length]) for kind in kinds]
        while running:
            momenta, present = [m for m, _, _ in running], [kind for _, kind, _ in running]
            gains = step(policy, costs, momenta, present, rng, outcome)
            for (_, _, left), gained in zip(running, gains, strict=True):
                left[0] -= gained
            running = [entry for entry in running if entry[2][0] > 0]
        assert outcome.seconds <= 1.04 * length * costs.target(batch), good


def test_the_drafter_is_asked_for_little_more_than_is_verified() -> None:
    costs = CostModel(
        {1: 1.0, 64: 6.0}, DraftCost({1: 1.0}, slot_share=0.75, max_drafts=NUM_DRAFTS)
    )
    assert costs.drafter(1, 5) == pytest.approx(0.5) and costs.drafter(1) == 1.0
    cheap = CostModel({1: 1.0}, DraftCost({1: 1.0, 8: 2.0}, slot_share=1.0, max_drafts=NUM_DRAFTS))
    assert 0.0 <= cheap.drafter(8, 0) < cheap.drafter(8, 24) < cheap.drafter(8) == 2.0
    policy = VerifyPolicy(costs)
    momentum, wanted = policy.new_request(), []
    for accept in [0.8] * 60 + [1.0] * 60:
        wanted += policy.slots_wanted([momentum], [None], 1)
        confident = [accept - 0.01] * 3 + [accept * accept - 0.4] * NUM_DRAFTS
        draft = Draft([0] * wanted[-1], confident[: wanted[-1]], "block")
        [length] = policy.choose([draft], [momentum], [None], 1)
        policy.observe(momentum, draft.cut(length), min(length, 3) if accept < 1.0 else length)
    assert wanted[0] == MAX_VERIFY, "nothing is known yet"
    assert wanted[59] in range(4, 10) and wanted[-1] > wanted[59]


@pytest.mark.parametrize(
    ("shape", "drafter", "batch", "kind"),
    [
        ("flat", 0.3, 1, Kind(0.9, 0.1)),
        ("flat", 0.3, 8, Kind(0.9, 0.3)),
        ("flat", 0.3, 1, Kind(0.3, 0.3)),
        ("slope", 0.3, 1, Kind(0.6, 0.0, 0.3)),
        ("slope", 0.05, 8, Kind(0.8, 0.1, -0.2)),
        ("stepped", 0.3, 1, Kind(0.8, 0.2, 0.1)),
        ("steep", 0.3, 1, Kind(0.5, 0.3)),
        ("jump", 0.05, 1, Kind(0.8, 0.2, 0.1)),
        ("jump", 0.3, 8, Kind(0.9, 0.0, 0.1)),
        ("linear", 0.3, 1, Kind(1.0)),
    ],
)
def test_close_to_the_best_fixed_length(shape: str, drafter: float, batch: int, kind: Kind) -> None:
    costs, ratios = make_costs(shape, drafter), []
    for seed in range(3):
        outcome = simulate(costs, lambda rng: kind, batch, 1200 if batch == 1 else 300, seed)
        ratios.append(outcome.per_token() / best_fixed(costs, kind, batch, seed))
    assert sum(ratios) / len(ratios) < 1.10


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize(
    ("shape", "drafter"), [("flat", 0.3), ("slope", 0.01), ("slope", 0.3), ("jump", 0.3)]
)
def test_a_useless_drafter_rests_and_a_useful_one_returns(
    shape: str, drafter: float, batch: int
) -> None:
    rng, costs = random.Random(1), make_costs(shape, drafter)
    policy = VerifyPolicy(costs)
    momenta = [policy.new_request() for _ in range(batch)]
    shares = []
    for accept in (0.0, 0.0, 0.9, 0.9):  # the same requests all along
        outcome = Outcome()
        for _ in range(300):
            step(policy, costs, momenta, [Kind(accept, 0.05)] * batch, rng, outcome)
        shares.append(outcome.num_drafted / (outcome.num_steps * batch))
    assert shares[1] < 0.05 and shares[3] > 0.9, shares


def test_a_resting_drafter_is_tried_for_all_requests_in_the_same_step() -> None:
    rng, costs = random.Random(0), make_costs("slope", 0.3)
    policy = VerifyPolicy(costs)
    momenta = [policy.new_request() for _ in range(8)]
    counts = []
    for _ in range(600):
        outcome = Outcome()
        step(policy, costs, momenta, [Kind(0.0, 0.0, 0.5)] * 8, rng, outcome)
        counts.append(outcome.num_drafted)
    assert set(counts[200:]) == {0, 8}
    assert policy.new_request().is_drafting is False, "what is known holds for new requests too"


def test_one_good_request_among_bad_ones_is_drafted_for_alone() -> None:
    rng = random.Random(0)
    costs = CostModel({1: 1.0, 64: 1.2}, DraftCost({1: 0.03, 8: 0.24}))
    policy = VerifyPolicy(costs)
    momenta = [policy.new_request() for _ in range(8)]
    kinds = [Kind(0.98, 0.0, -0.1)] + [Kind(0.02, 0.0, 0.8)] * 7
    for _ in range(300):
        step(policy, costs, momenta, kinds, rng, Outcome())
    assert [momentum.is_drafting for momentum in momenta] == [True] + [False] * 7


def test_a_rested_ngram_proposer_is_tried_again() -> None:
    costs = make_costs("slope")
    policy = VerifyPolicy(costs)
    momentum, draft = policy.new_request(), Draft([7] * 4, [0.35] * 4, "ngram")
    lengths = []
    for number in range(1500):
        [length] = policy.choose([draft], [momentum], [None], 1)
        lengths.append(length)
        if length:
            policy.observe(momentum, draft.cut(length), 0 if number < 700 else length)
    assert sum(length > 0 for length in lengths[300:700]) in range(3, 30)
    assert sum(lengths[-300:]) == 4 * 300


def test_the_drafter_rests_where_a_lookup_brings_as_much() -> None:
    costs = make_costs("flat", 0.5)
    policy = VerifyPolicy(costs)
    momentum = policy.new_request()
    repeats, block = Draft([1] * 8, [0.9] * 8, "ngram"), Draft([1] * 8, [0.9] * 8, "block")
    num_drafted = 0
    for _ in range(400):
        draft = repeats
        if policy.slots_wanted([momentum], [None], 1)[0]:
            num_drafted += 1
            draft = policy.better(momentum, repeats, block)
        [length] = policy.choose([draft], [momentum], [None], 1)
        policy.observe(momentum, draft.cut(length), length)
    assert num_drafted < 40, "the lookup proposes the same tokens for nothing"


def test_what_pays_for_one_request_is_not_begun_for_a_crowd() -> None:
    """A batch's last request may draft; the next full batch must not begin with that habit."""
    target = {1: 10.5, 2: 11.0, 4: 12.0, 8: 16.5, 16: 27.0, 64: 90.0}
    costs = CostModel(target, DraftCost({1: 9.6, 2: 16.8, 4: 31.0, 8: 61.0}))
    policy, rng = VerifyPolicy(costs), random.Random(0)
    alone = [policy.new_request()]
    for _ in range(40):
        step(policy, costs, alone, [Kind(0.85, 0.1)], rng, Outcome())
    assert alone[0].is_drafting
    crowd = [policy.new_request() for _ in range(5)]
    assert policy.slots_wanted(crowd, [None] * 5, 5) == [0] * 5
    assert policy.slots_wanted(crowd[:1], [None], 1) != [0], "left alone, it drafts at once"


@pytest.mark.parametrize("batch", [1, 4])
def test_the_drafter_rests_when_an_easy_text_turns_hard(batch: int) -> None:
    """What long drafts once brought says nothing when only short ones are asked for."""
    target = {1: 1.0, 4: 1.2, 8: 1.6, 16: 2.3, 64: 8.0}
    costs = CostModel(target, DraftCost({1: 0.35, 8: 0.8}, slot_share=0.3, max_drafts=NUM_DRAFTS))
    policy, rng = VerifyPolicy(costs), random.Random(0)
    momenta = [policy.new_request() for _ in range(batch)]
    for _ in range(60):
        step(policy, costs, momenta, [Kind(0.97)] * batch, rng, Outcome(), cut=True)
    hard, strangers = Outcome(), [policy.new_request() for _ in range(batch)]
    for _ in range(500):
        step(policy, costs, momenta, [Kind(0.03, 0.02)] * batch, rng, hard, cut=True)
    assert hard.num_drafted < 0.1 * hard.num_steps * batch
    assert hard.per_token() <= 1.04 * costs.target(batch) / batch
    inherited = Outcome()
    for _ in range(200):
        step(policy, costs, strangers, [Kind(0.03, 0.02)] * batch, rng, inherited, cut=True)
    assert inherited.num_drafted < 0.2 * inherited.num_steps * batch


def test_a_new_request_gets_one_look_whatever_the_last_one_was_like() -> None:
    costs = CostModel({1: 10.0, 8: 16.0, 16: 27.0, 64: 90.0}, DraftCost({1: 9.0, 8: 60.0}))
    policy, rng = VerifyPolicy(costs), random.Random(0)
    hard = [policy.new_request()]
    for _ in range(100):
        step(policy, costs, hard, [Kind(0.05, 0.04, 0.3)], rng, Outcome())
    assert not hard[0].is_drafting
    easy, outcome = [policy.new_request()], Outcome()
    for _ in range(60):
        step(policy, costs, easy, [Kind(0.9, 0.05)], rng, outcome)
    assert outcome.num_drafted > 50
    again, outcome = [policy.new_request()], Outcome()
    for _ in range(60):
        step(policy, costs, again, [Kind(0.05, 0.04, 0.3)], rng, outcome)
    assert outcome.per_token() <= 1.25 * costs.target(1), "a few looks, then it rests"


def test_of_a_tree_every_child_on_the_path_is_learnt_from():
    policy = VerifyPolicy(None)
    momentum = policy.new_request()
    # the anchor's children are rows 1 and 3; row 2 follows row 1, row 4 follows row 3
    sources = ["block", "block", "ngram aside", "ngram"]
    tree = Draft([5, 6, 7, 8], [0.85, 0.75, 0.25, 0.15], "block", [0, 1, 0, 3], sources)
    pairs = list(zip(tree.sources, tree.confidence, strict=True))
    before = [momentum.survival.chance(*pair) for pair in pairs]
    policy.observe(momentum, tree, 1, [0, 3])
    after = [momentum.survival.chance(*pair) for pair in pairs]
    assert after[0] < before[0], "refused at its turn"
    assert after[1] == before[1], "its turn never came"
    assert after[2] > before[2], "taken"
    assert after[3] < before[3], "refused behind it"
    aside = momentum.survival.chance("block", 0.25)
    policy.observe(momentum, tree, 1, [0, 3])
    assert momentum.survival.chance("block", 0.25) == aside, "another's word"
