"""Device steps: wide where rows are cheap, no drafts where they fail, prompts as they fit."""

from __future__ import annotations

import pytest

from flashdraft.engine.drafts import (
    BEYOND_SOURCE,
    BLOCK_SOURCE,
    BRANCH_SOURCE,
    NGRAM_SOURCE,
    NODE_SOURCES,
    Draft,
)
from flashdraft.engine.policy.costs import GPU_COSTS, CostModel, DraftCost
from flashdraft.engine.policy.step import (
    FAR_CONTEXT,
    FAR_MARGIN,
    LONGEST_GAP_S,
    MAX_GAP_S,
    MIN_ROWS,
    PATIENCE_S,
    PROBE_PERIOD,
    StepOptions,
    StepPolicy,
)
from flashdraft.engine.policy.times import StepTimes
from flashdraft.engine.policy.verify import BUCKET_EDGES, Survival
from flashdraft.engine.step.shape import MIXED_ROWS
from flashdraft.kernels.tree import BEYOND, BRANCH

FLAT = CostModel({1: 1.0, 512: 1.03}, DraftCost({1: 0.1, 32: 0.2}))
STEEP = CostModel({1: 1.0, 16: 4.5, 512: 50.0}, DraftCost({1: 0.3, 32: 1.5}))
SIZES = MIXED_ROWS


def learnt(chance, count=400):
    """Survival after many observations of one confidence."""
    survival = Survival()
    for i in range(count):
        survival.observe(BLOCK_SOURCE, 0.5, (i * chance) % 1.0 + chance >= 1.0)
    return survival


def draft(source, confidence, parents=None, sources=None):
    return Draft([], confidence, source, parents, sources)


def policy_of(costs, chance, batch=1, fixed=None, max_rows=10**6):
    result = StepPolicy(StepTimes(costs), learnt(chance), fixed, max_rows)
    result.remember_drafts([draft(BLOCK_SOURCE, [0.5] * 15)] * batch)
    return result


def options(batch, num_awake=None, sizes=SIZES):
    rows = [batch * (1 + width) for width in (0, 1, 3, 7, 15)]
    awake = batch if num_awake is None else num_awake
    return StepOptions(batch, awake, rows, rows, sizes, lambda rows: [15 if rows > batch else 0])


def timed(alone, beside, chance=0.9, batch=8, context=0, **more):
    """A policy that has seen all steps of a batch: what they take by their rows."""
    policy = policy_of(FLAT, chance, batch, **more)
    for rows in options(batch).rows:
        policy.times.remember_alone(batch, rows, alone(rows))
    policy.times.remember_draft(batch, 15, 0.002)
    for size in SIZES:
        policy.times.remember_beside(size, context, beside(size))
    return policy


def h200(rows):
    """About what a pass of 31B takes."""
    return 0.016 + max(0, rows - 128) * 85e-6


def verified(choice, batch):
    return choice.num_rows // batch - 1


def test_rows_that_cost_nothing_are_all_used():
    assert policy_of(FLAT, 0.9).choose(options(1)).num_rows == 16


def test_dear_rows_are_used_sparingly():
    assert 1 < policy_of(STEEP, 0.9).choose(options(1)).num_rows < 10


def test_a_drafter_that_is_never_right_rests_but_is_asked_now_and_then():
    policy = policy_of(STEEP, 0.02)
    choices = [policy.choose(options(1)).num_rows for _ in range(2 * PROBE_PERIOD)]
    assert choices.count(1) == len(choices) - 2 and set(choices) == {1, 2}


def test_beside_prompts_a_drafter_that_rests_is_asked_now_and_then_too():
    policy = timed(lambda rows: 0.01 + 0.001 * rows, lambda rows: 0.01 + 0.001 * rows, chance=0.02)
    choices = [policy.choose(options(8), [500]).num_rows for _ in range(2 * PROBE_PERIOD)]
    assert choices.count(8) == len(choices) - 2 and set(choices) == {8, 16}


@pytest.mark.parametrize("prompts", [[], [900]])
@pytest.mark.parametrize(("drafted", "width"), [([0.5] * 15, 7), ([0.999] * 15, 15)])
def test_whole_blocks_are_drafted_where_some_can_use_them(drafted, width, prompts):
    """Others hope for little; where all hope for as much, halves are as good and cost less."""
    policy = timed(h200, lambda rows: 0.02 + h200(rows))
    policy.times.remember_draft(8, 7, 0.0015)
    for _ in range(400):
        policy._survival.observe(BLOCK_SOURCE, 0.999, True)
    drafts = [draft(BLOCK_SOURCE, drafted), draft(BLOCK_SOURCE, [0.5] * 15)]
    policy.remember_drafts(drafts * 4)
    widths = {8: [0], 16: [7], 32: [7], 64: [7, 15], 128: [15]}
    found = policy.choose(
        options(8)._replace(rows=[8, 64], rows_beside=[8, 64], widths_of=widths.get), prompts
    )
    assert (found.num_rows, found.width) == (64, width)


def test_times_that_were_measured_overrule_the_first_guess():
    policy = policy_of(FLAT, 0.9)
    for rows in options(1).rows:
        policy.times.remember_alone(1, rows, 0.01 * rows)
    assert policy.choose(options(1)).num_rows <= 4
    assert verified(policy.choose(options(8)), 8) <= 3  # the first guess for another batch


def test_a_wrong_first_guess_is_climbed_out_of():
    truth = {rows: 0.013 + 0.003 * rows for rows in options(1).rows}  # far dearer than guessed
    policy = policy_of(FLAT, 0.9)
    for _ in range(200):
        rows = policy.choose(options(1)).num_rows
        policy.times.remember_alone(1, rows, truth[rows])
        policy.times.remember_draft(1, 15, 0.0005)
    pace = {rows: truth[rows] / policy.expected_tokens(1, rows) for rows in truth}
    best = min(pace, key=lambda rows: pace[rows])
    assert policy.choose(options(1)).num_rows == best


@pytest.mark.parametrize(("fixed", "rows"), [(0, 8), (2, 32), (3, 32), (7, 64), (15, 128)])
def test_a_fixed_length_is_kept(fixed, rows):
    assert policy_of(STEEP, 0.5, 8, fixed).choose(options(8)).num_rows == rows
    assert policy_of(STEEP, 0.5, 8, fixed).choose(options(8), [300]).num_rows == rows


def test_whoever_sleeps_in_a_batch_brings_nothing():
    policy = policy_of(FLAT, 0.9, batch=8)
    assert policy.expected_tokens(8, 128) == pytest.approx(2 * policy.expected_tokens(4, 64))
    assert policy.choose(options(8, num_awake=4)).tokens < 4 * 11


def test_expected_tokens_follow_the_curve():
    policy = policy_of(FLAT, 0.5, batch=2)
    chance = policy._survival.chance(BLOCK_SOURCE, 0.5)
    assert policy.expected_tokens(2, 2) == 2
    assert policy.expected_tokens(2, 4) == pytest.approx(2 + 2 * chance)
    assert policy.expected_tokens(2, 6) == pytest.approx(2 + 2 * (chance + chance**2))


def test_short_drafts_say_what_longer_ones_would_bring():
    policy = StepPolicy(StepTimes(FLAT), learnt(0.9), None, 512)
    policy.remember_drafts([draft(BLOCK_SOURCE, [0.5, 0.5, 0.5])])
    assert policy.expected_tokens(1, 16) > 5


def test_nodes_of_a_tree_survive_with_their_parents():
    survival = learnt(0.9)
    for i in range(400):
        survival.observe(BRANCH_SOURCE, 0.5, i % 5 == 0)
        survival.observe(BEYOND_SOURCE, 0.5, i % 2 == 0)
    policy = StepPolicy(StepTimes(FLAT), survival, None, 512, num_nodes=31)
    # the chain, a sibling of its first token, that one's child
    sources = [BLOCK_SOURCE, BLOCK_SOURCE, BRANCH_SOURCE, BEYOND_SOURCE]
    policy.remember_drafts([draft(BLOCK_SOURCE, [0.5] * 4, [0, 1, 0, 3], sources)])
    chain, branch, beyond = (survival.chance(source, 0.5) for source in sources[1:])
    gains = [chain, chain**2, branch, branch * beyond]
    for rows in range(1, 6):
        assert policy.expected_tokens(1, rows) == pytest.approx(1 + sum(gains[: rows - 1]))
    assert policy.expected_tokens(1, 16) == pytest.approx(1 + sum(gains)), "there is no more"


def test_a_tree_is_worth_more_rows_than_a_chain():
    survival, parents = learnt(0.6), [*range(15), *[0] * 8, *[1] * 8]
    sources = [BLOCK_SOURCE] * 15 + [BRANCH_SOURCE] * 16
    for i in range(400):
        survival.observe(BRANCH_SOURCE, 0.5, i % 12 == 0)
    found = {}
    for num_nodes in (0, 31):
        policy = StepPolicy(StepTimes(FLAT), survival, None, 512, num_nodes=num_nodes)
        chain = draft(BLOCK_SOURCE, [0.5] * 15)
        tree = draft(BLOCK_SOURCE, [0.5] * 31, parents, sources)
        policy.remember_drafts([tree if num_nodes else chain])
        options = StepOptions(1, 1, [1, 4, 8, 16, 32], [1, 32], SIZES, lambda rows: [15])
        found[num_nodes] = policy.choose(options)
    assert found[31].num_rows == 32 > found[0].num_rows
    assert found[31].tokens > 1.3 * found[0].tokens


def test_nothing_is_tried_out_in_a_batch_that_does_not_last():
    policy, tried = policy_of(FLAT, 0.9, batch=8), set()
    for batch in (8, 6, 4, 8, 6, 4) * 5:
        rows = policy.choose(options(batch)).num_rows
        tried.add(rows // batch)
        policy.times.remember_alone(batch, rows, 0.018)
    assert tried == {16}


@pytest.mark.parametrize(("chance", "awake", "batch"), [(0.5, 17, 32), (0.6, 5, 16), (0.7, 17, 64)])
def test_rows_of_nobody_are_no_drafts(chance, awake, batch):
    policy = policy_of(GPU_COSTS, chance, awake)
    choice = policy.choose(options(batch, awake))
    assert choice.num_rows > batch and choice.plain_tokens == awake


@pytest.mark.parametrize("prompts", [[], [900]])
def test_what_a_step_without_drafts_promises_is_told_beside_a_fixed_length_too(prompts):
    policy = timed(h200, h200, fixed=7)
    choice = policy.choose(options(8), prompts)
    assert choice.tokens > choice.plain_tokens == 8
    assert 0 < choice.plain_s <= choice.seconds
    free = timed(h200, h200).choose(options(8), prompts)
    assert free.tokens > free.plain_tokens == 8


def test_prompts_move_on_beside_a_fixed_length():
    policy = timed(lambda rows: 7e-4 * rows, lambda rows: 7e-4 * rows, batch=21, fixed=5)
    assert policy.choose(options(21), [1500]).prompt_rows >= MIN_ROWS


def test_chances_are_those_of_each_source_and_bucket():
    policy = policy_of(FLAT, 0.9)
    chances = policy.chances()
    assert [len(row) for row in chances] == [len(BUCKET_EDGES) + 1] * len(NODE_SOURCES)
    assert all(0.0 < chance < 1.0 for row in chances[:BRANCH] for chance in row)
    assert chances[BRANCH] == chances[BEYOND] == [1.0] * len(chances[0])  # nothing was seen of them
    assert chances[0][6] > 0.8 > chances[1][6] == chances[2][6]  # 0.5 was seen, of the drafter
    policy.remember_drafts([draft(NGRAM_SOURCE, [0.5] * 3)])
    assert policy.expected_tokens(1, 16) < 3


def test_of_offers_the_part_is_learnt_that_comes_true():
    """Which of two is likelier is what they say themselves, however few were seen."""
    survival = Survival()
    for i in range(400):
        survival.observe(BRANCH_SOURCE, 0.05, i % 40 == 0)  # half as often as it says
    assert 0.4 < survival.rate(BRANCH_SOURCE, 0.05) < 0.75
    low, high = (survival.chance(BRANCH_SOURCE, one) for one in (0.03, 0.09))
    assert high == pytest.approx(3 * low)
    assert survival.chance(BRANCH_SOURCE, 0.5) == pytest.approx(0.5)
    for _ in range(100):
        survival.observe(BRANCH_SOURCE, 0.75, True)
    assert 0.95 < survival.chance(BRANCH_SOURCE, 0.75) <= survival.chance(BRANCH_SOURCE, 0.79) <= 1


# -- prompts ---------------------------------------------------------------------------------------


def test_a_lone_prompt_has_the_whole_step():
    choice = policy_of(FLAT, 0.9, max_rows=4096).choose(options(0, 0), [10**6])
    assert choice.num_rows == 0 and choice.prompt_rows == 4096


def test_a_prompt_is_spread_as_long_as_it_is_done_in_time():
    choice = timed(h200, h200).choose(options(8), [900])
    assert 900 / choice.prompt_rows * choice.seconds <= PATIENCE_S
    assert choice.prompt_rows < 900 and choice.num_rows + choice.prompt_rows in SIZES
    slow = timed(h200, lambda rows: 0.02 + h200(rows)).choose(options(8), [900])
    assert slow.prompt_rows > choice.prompt_rows


def test_the_rest_of_a_prompt_takes_no_larger_pass_than_it_needs():
    choice = timed(h200, h200).choose(options(8), [15])
    assert choice.prompt_rows == 15 and choice.seconds < h200(256)


def test_a_card_a_little_slower_serves_prompts_a_little_slower():
    """Between the largest pass and one that is always short enough there is another."""

    def rows_per_second(slower):
        policy = timed(
            lambda rows: slower * (0.025 + 6e-5 * rows),
            lambda rows: slower * (0.0145 + 9.6e-5 * rows),
            batch=32,
        )
        choice = policy.choose(options(32), [600] * 8)
        return choice.prompt_rows / choice.seconds

    assert rows_per_second(1.1) > 0.75 * rows_per_second(1.0)


def test_what_waits_makes_steps_longer_up_to_a_limit():
    policy = timed(h200, h200)
    one, many = policy.choose(options(8), [900]), policy.choose(options(8), [900] * 8)
    assert one.prompt_rows < many.prompt_rows
    assert one.seconds <= 1.3 * MAX_GAP_S and many.seconds <= LONGEST_GAP_S


def test_far_into_a_prompt_a_step_keeps_a_margin():
    policy = timed(h200, h200)
    fine = options(8, sizes=tuple(range(256, 2048, 16)))
    near = policy.choose(fine, [65536], FAR_CONTEXT - 1)
    far = policy.choose(fine, [65536], FAR_CONTEXT)
    assert FAR_MARGIN * LONGEST_GAP_S < near.seconds <= LONGEST_GAP_S
    assert far.seconds <= FAR_MARGIN * LONGEST_GAP_S


def test_where_all_have_to_wait_prompts_move_on():
    slow = timed(lambda rows: 2.0 + rows / 8, lambda rows: 2.0 + rows / 8)
    assert slow.choose(options(8), [500]).prompt_rows >= 1
    none = timed(h200, h200).choose(options(8, sizes=()), [500])
    assert none.prompt_rows == MIN_ROWS


def test_no_more_rows_of_prompts_than_the_engine_takes():
    assert timed(h200, h200, max_rows=40).choose(options(8), [900]).prompt_rows == 40


def test_rows_cost_what_they_took_at_their_context():
    policy = timed(h200, h200)
    for size in SIZES:
        policy.times.remember_beside(size, 16_000, h200(size) + size * 2e-4)
    near = policy.choose(options(8), [60_000], context=0)
    far = policy.choose(options(8), [60_000], context=16_000)
    further = policy.choose(options(8), [60_000], context=64_000)  # never seen: it is worse
    assert near.prompt_rows > far.prompt_rows >= further.prompt_rows
    assert policy.times.beside(512, 64_000) > 2 * policy.times.beside(512, 16_000)


def test_rows_that_the_reading_of_weights_hides_cost_the_others_nothing():
    policy = timed(h200, h200, chance=0.02)
    choice = policy.choose(options(8), [100])
    assert choice.prompt_rows == 100 and choice.seconds == pytest.approx(h200(128))


def test_a_stall_says_little_of_later_steps():
    """Whoever took it for the step's time would never choose that step again."""
    times = StepTimes(FLAT)
    for seconds in (0.1, 0.1, 4.0):
        times.remember_beside(1024, 0, seconds)
    assert times.beside(1024, 0) <= 0.121
    for _ in range(40):  # what lasts is believed
        times.remember_beside(1024, 0, 0.4)
    assert times.beside(1024, 0) > 0.39
