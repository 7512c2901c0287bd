"""How many prompt tokens ride beside those who decode, and what steps with them take."""

from __future__ import annotations

import pytest

from flashdraft.engine.policy.prompts import (
    LONGEST_GAP_S,
    MAX_GAP_S,
    MIN_ROWS,
    PromptBudget,
)

ROW_S = 1e-4


def learnt(slope=ROW_S, base=0.0, context=0, max_rows=10**6, spread=4):
    budget = PromptBudget(max_rows, spread)
    for rows in [200, 800, 400, 1200] * 20:
        budget.remember(rows, context, base + slope * rows)
    return budget


def test_a_lone_prompt_has_the_whole_step():
    assert PromptBudget(4096).rows(0.0, 0, context=0, prompts=[10**6]) == 4096


def test_what_a_step_takes_is_learnt():
    for base in (0.0, 0.012):
        budget = learnt(base=base)
        for rows in (100, 500, 2000):
            assert budget.seconds(rows, 0) == pytest.approx(base + ROW_S * rows, rel=0.1, abs=2e-3)


def test_rows_that_the_weights_reading_hides_are_taken():
    rows = learnt().rows(0.02, num_others=8, context=0, prompts=[300])
    assert rows == pytest.approx(0.02 / ROW_S - 8, rel=0.1)


def test_a_prompt_is_spread_over_a_few_steps():
    rows = learnt().rows(0.02, num_others=128, context=0, prompts=[1000])
    assert rows == 1000 // 4
    both = learnt().rows(0.02, num_others=128, context=0, prompts=[1000, 600])
    assert both == 1600 // 4


def test_pieces_that_wake_all_experts_are_few():
    rows = learnt(spread=1).rows(0.005, num_others=8, context=0, prompts=[500])
    assert rows == 500


def test_the_others_wait_no_longer_than_the_limit():
    budget = learnt(spread=1)
    rows = budget.rows(0.02, 100, context=0, prompts=[2000])
    assert MAX_GAP_S < (rows + 100) * ROW_S < 1.6 * MAX_GAP_S
    rows = budget.rows(0.02, 100, context=0, prompts=[10**6])
    assert (rows + 100) * ROW_S == pytest.approx(LONGEST_GAP_S, rel=0.1)


def test_rows_cost_what_they_took_at_their_context():
    budget = learnt(spread=1)
    for _ in range(20):
        budget.remember(1000, context=60_000, seconds=0.5)
    near, far = (budget.rows(0.02, 0, context, [10**6]) for context in (0, 50_000))
    assert near == pytest.approx(5 * far, rel=0.2)


def test_prompts_move_on_however_slow_the_others_are():
    assert learnt(slope=0.1).rows(5.0, 50, 0, [100]) == MIN_ROWS
