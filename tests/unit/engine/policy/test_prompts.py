"""How many prompt tokens ride beside those who decode."""

from __future__ import annotations

import pytest

from flashdraft.engine.policy.prompts import (
    LONGEST_GAP_S,
    MAX_GAP_S,
    MIN_ROWS,
    PATIENCE,
    PromptBudget,
)


def test_a_lone_prompt_has_the_whole_step():
    assert PromptBudget(4096).rows(0.0, context=0, num_waiting=10**6) == 4096


def test_the_others_wait_no_longer_than_the_limit():
    budget = PromptBudget(4096)
    budget.remember(1000, context=0, seconds=0.1)
    rows = budget.rows(0.02, context=0, num_waiting=0)
    assert 0.02 + rows * 1e-4 == pytest.approx(MAX_GAP_S, abs=1e-3)


def test_the_limit_grows_with_what_waits_up_to_an_end():
    budget = PromptBudget(10**6)
    budget.remember(1000, context=0, seconds=0.1)
    rows = [budget.rows(0.02, 0, waiting) for waiting in (0, PATIENCE // 2, PATIENCE, 10**6)]
    assert rows == sorted(rows) and rows[0] < rows[1]
    assert 0.02 + rows[-1] * 1e-4 == pytest.approx(LONGEST_GAP_S, abs=1e-3)


def test_rows_cost_what_they_took_at_their_context():
    budget = PromptBudget(4096)
    budget.remember(1000, context=500, seconds=0.1)
    budget.remember(1000, context=60_000, seconds=0.5)
    near, far = (budget.rows(0.02, context, 0) for context in (0, 50_000))
    assert near == pytest.approx(5 * far, rel=0.1)


def test_prompts_move_on_however_slow_the_others_are():
    budget = PromptBudget(4096)
    budget.remember(10, context=0, seconds=1.0)
    assert budget.rows(5.0, 0, 0) == MIN_ROWS
