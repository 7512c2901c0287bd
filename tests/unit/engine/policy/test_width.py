"""The verify length of steps on the device: wide where rows are cheap, none where drafts fail."""

from __future__ import annotations

import pytest

from flashdraft.engine.drafts import BLOCK_SOURCE
from flashdraft.engine.policy.costs import CostModel, DraftCost
from flashdraft.engine.policy.verify import BUCKET_EDGES, Survival
from flashdraft.engine.policy.width import PROBE_PERIOD, WIDTHS, WidthChooser

FLAT = CostModel({1: 0.016, 512: 0.0165}, DraftCost({1: 0.0015, 32: 0.003}))
STEEP = CostModel({1: 0.002, 16: 0.009, 512: 0.1}, DraftCost({1: 0.0006, 32: 0.003}))


def learnt(chance, count=400):
    """Survival after many observations of one confidence."""
    survival = Survival()
    for i in range(count):
        survival.observe(BLOCK_SOURCE, 0.5, (i * chance) % 1.0 + chance >= 1.0)
    return survival


def chooser(costs, chance, batch=1, fixed=None):
    result = WidthChooser(costs, learnt(chance), fixed)
    result.remember_drafts([(BLOCK_SOURCE, [0.5] * 15)] * batch)
    return result


def test_rows_that_cost_nothing_are_all_used():
    assert chooser(FLAT, 0.9).choose(1, 15) == 15


def test_dear_rows_are_used_sparingly():
    assert 0 < chooser(STEEP, 0.9).choose(1, 15) < 10


def test_a_drafter_that_is_never_right_rests_but_is_asked_now_and_then():
    one = chooser(STEEP, 0.02)
    choices = [one.choose(1, 15) for _ in range(2 * PROBE_PERIOD)]
    assert choices.count(0) == len(choices) - 2 and set(choices) == {0, 1}


def test_beside_prompts_a_drafter_that_rests_is_asked_now_and_then_too():
    one = chooser(STEEP, 0.02)
    for width in WIDTHS:
        one.remember_time(1, width, 0.002 + 0.001 * width)
    choices = [one.choose_beside(1, 15, lambda rows: 0.001 * rows) for _ in range(2 * PROBE_PERIOD)]
    assert choices.count(0) == len(choices) - 2 and set(choices) == {0, 1}


def test_beside_prompts_rows_are_free_until_the_others_wait_for_them():
    one = chooser(FLAT, 0.9, batch=8)
    for width in WIDTHS:
        one.remember_time(8, width, 0.02)
    assert one.choose_beside(8, 15, lambda rows: 0.001) == 15
    assert one.choose_beside(8, 15, lambda rows: 0.001 * rows + 0.02) < 7


def test_times_that_were_measured_overrule_the_start_up_costs():
    one = chooser(FLAT, 0.9)
    assert one.choose(1, 15) == 15
    for width in WIDTHS:
        one.remember_time(1, width, 0.01 + 0.01 * width)
    assert one.choose(1, 15) <= 3
    assert one.choose(8, 15) <= 3  # what one batch showed is the first guess for another


def test_a_wrong_model_is_climbed_out_of():
    truth = {width: 0.016 + 0.003 * width for width in WIDTHS}  # far dearer than the model says
    one, tried = chooser(FLAT, 0.9, batch=32), []
    for _ in range(60):
        width = one.choose(32, 15)
        tried.append(width)
        one.remember_time(32, width, truth[width])
    pace = {w: truth[w] / one.expected_tokens(32, w) for w in WIDTHS}
    assert tried[0] == 15
    assert tried[-1] == min(pace, key=lambda width: pace[width])
    assert len(set(tried)) <= 7  # each one that is tried is captured, which takes a while


def test_nothing_is_tried_out_in_a_batch_that_does_not_last():
    one = chooser(FLAT, 0.9, batch=8)
    tried = set()
    for batch in (8, 6, 4, 8, 6, 4) * 5:
        width = one.choose(batch, 15)
        tried.add(width)
        one.remember_time(batch, width, 0.018)
    assert tried == {15}


def test_every_candidate_that_might_pay_is_timed_once():
    truth = {width: 0.002 + 0.0004 * width + (0.0006 if width else 0.0) for width in WIDTHS}
    one, tried = chooser(STEEP, 0.9), set()
    for _ in range(80):
        width = one.choose(1, 15)
        tried.add(width)
        one.remember_time(1, width, truth[width])
    pace = {w: truth[w] / one.expected_tokens(1, w) for w in WIDTHS}
    assert one.choose(1, 15) == min(pace, key=lambda width: pace[width])


@pytest.mark.parametrize("fixed", [0, 3, 15])
def test_a_fixed_length_is_kept(fixed):
    assert chooser(STEEP, 0.02, fixed=fixed).choose(4, 15) == fixed
    assert chooser(STEEP, 0.9, fixed=fixed).choose(4, 2) == min(fixed, 2)


def test_expected_tokens_follow_the_curve():
    one = chooser(FLAT, 0.5, batch=2)
    chance = one._survival.chance(BLOCK_SOURCE, 0.5)
    assert one.expected_tokens(2, 0) == 2
    assert one.expected_tokens(2, 1) == pytest.approx(2 + 2 * chance)
    assert one.expected_tokens(2, 2) == pytest.approx(2 + 2 * (chance + chance**2))


def test_short_drafts_say_what_longer_ones_would_bring():
    one = WidthChooser(FLAT, learnt(0.9), None)
    one.remember_drafts([(BLOCK_SOURCE, [0.5, 0.5, 0.5])])
    assert one.expected_tokens(1, 15) > 5


def test_there_is_a_chance_for_every_bucket_of_confidence():
    block, found = chooser(FLAT, 0.9).chances()
    assert len(block) == len(found) == len(BUCKET_EDGES) + 1
    assert all(0.0 < chance < 1.0 for chance in (*block, *found)) and block != found


def test_nothing_new_is_tried_where_that_is_not_to_be_had():
    one = chooser(FLAT, 0.9, batch=8)
    assert {one.choose(8, 15, among={3, 7}) for _ in range(50)} == {7}
    assert one.choose(8, 15, among=set()) == 15  # there is nothing to go by but the guess
    never = chooser(STEEP, 0.02, batch=8)
    assert [never.choose(8, 15, among={7}) for _ in range(PROBE_PERIOD)].count(
        0
    ) >= PROBE_PERIOD - 1
    assert {never.choose(8, 15, among={0}) for _ in range(2 * PROBE_PERIOD)} == {0}
