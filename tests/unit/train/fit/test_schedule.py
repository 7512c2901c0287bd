"""The learning rate, a run's length, and its clock."""

from __future__ import annotations

import pytest

from flashdraft.errors import RequestError
from flashdraft.train.fit.schedule import (
    Length,
    RunClock,
    TrainConfig,
    known_length,
    learning_rate,
    plan_length,
)


def test_warms_up_stays_and_decays_to_zero() -> None:
    config = TrainConfig(learning_rate=0.1, warmup_steps=4, decay_share=0.25, steps=100)
    length = known_length(config, steps_per_epoch=7)
    assert length == Length(100, 75)
    rates = [learning_rate(config, length, step) for step in range(101)]
    assert rates[:5] == pytest.approx([0.02, 0.04, 0.06, 0.08, 0.1])
    assert set(rates[4:76]) == {0.1}
    assert rates[75:] == sorted(rates[75:], reverse=True)
    assert rates[100] == 0 < rates[99]
    assert rates[81] < 0.1 * (1 - 6 / 25), "falls faster than a line"


def test_a_short_run_warms_up_for_a_tenth_at_most() -> None:
    config = TrainConfig(learning_rate=0.1, warmup_steps=200, steps=20)
    assert learning_rate(config, Length(20, 16), 2) == 0.1


def test_epochs_give_the_length_and_steps_override() -> None:
    assert known_length(TrainConfig(epochs=2.5), 10) == Length(25, 20)
    assert known_length(TrainConfig(epochs=2.5, steps=4, minutes=1), 10) == Length(4, 3)
    assert known_length(TrainConfig(minutes=3), 10) is None


class FakeClock(RunClock):
    """Steps of one second each."""

    def __init__(self, elapsed: float, evaluation_s: float = 0.0) -> None:
        super().__init__()
        self.now, self.evaluation_s = elapsed, evaluation_s

    def elapsed(self) -> float:
        return self.now

    def step_seconds(self, steps: int) -> float:
        return 1.0


def test_a_budget_keeps_time_for_the_decay() -> None:
    config = TrainConfig(minutes=10, decay_share=0.2, warmup_steps=0)
    assert plan_length(config, 470, FakeClock(470.0)) is None
    assert plan_length(config, 480, FakeClock(480.0)) == Length(600, 480)
    # what the last evaluation takes is part of the budget
    assert plan_length(config, 400, FakeClock(400.0, evaluation_s=100.0)) == Length(500, 400)
    # a machine that stood still still ends its run, with one step
    assert plan_length(config, 9, FakeClock(5000.0)) == Length(10, 9)


def test_budgeted_run_has_no_decay_before_it_is_planned() -> None:
    config = TrainConfig(learning_rate=0.1, minutes=1, warmup_steps=0)
    assert learning_rate(config, None, 10**6) == 0.1


def test_clock_leaves_compilation_and_evaluations_out() -> None:
    clock = RunClock(seconds_before=1000.0, steps_before=7)
    assert 1000 <= clock.elapsed() < 1001
    clock.lap(9)
    clock.exclude(50.0)
    seconds, steps = clock.lap(10)
    assert steps == 1 and seconds < 0
    assert clock.step_seconds(10) < 1, "the first lap is not counted"
    assert clock.evaluation_s == 50.0


@pytest.mark.parametrize(
    ("name", "value"),
    [("learning_rate", 0.0), ("minutes", 0.0), ("rows", 1), ("steps", 0)],
)
def test_bad_settings_are_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(RequestError, match=f"{name} is {value!r}"):
        TrainConfig(**{name: value})  # type: ignore[arg-type]
