"""A training run's settings, its learning rate, its length and its clock. No torch.

Warm-up, a constant rate, then a decay to zero: any point before the decay can be continued from.
The rate is a pure function of the step and the run's `Length`. With a wall-clock budget the length
is not known at first; `plan_length` fixes it, once, when the share left for the decay begins.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import NamedTuple

from flashdraft.errors import RequestError


@dataclass(frozen=True)
class TrainConfig:
    """How a drafter is trained. One of `steps`, `minutes` and `epochs` ends the run, in that order.

    A batch holds `rows` tokens of context and `blocks` blocks; a step averages the gradients of
    `accumulation` batches on every process.
    """

    learning_rate: float = 3e-3
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.01
    clip: float = 1.0  # of the gradient's norm
    warmup_steps: int = 200  # at most a tenth of a run whose length is known
    decay_share: float = 0.2  # of the run
    epochs: float = 3.0
    minutes: float | None = None
    steps: int | None = None
    rows: int = 32768
    blocks: int = 4096
    short_share: float = 0.5  # of the blocks: cut to a random width, for engines that draft less
    accumulation: int = 1
    seed: int = 0
    log_every: int = 20  # steps
    evaluate_every: int = 500  # steps; 0 = at the end only
    save_every: int = 1000  # steps; 0 = at the end and on an interrupt only
    keep_last: int = 2  # states
    compile: bool = True  # on CUDA

    def __post_init__(self) -> None:
        for name, holds, limit in (
            ("learning_rate", 0 < self.learning_rate < 1, "above 0 and below 1"),
            ("betas", all(0 <= beta < 1 for beta in self.betas), "at least 0 and below 1"),
            ("weight_decay", 0 <= self.weight_decay < 1, "at least 0 and below 1"),
            ("clip", self.clip > 0, "above 0"),
            ("warmup_steps", self.warmup_steps >= 0, "at least 0"),
            ("decay_share", 0 <= self.decay_share <= 1, "between 0 and 1"),
            ("epochs", 0 < self.epochs < math.inf, "a number above 0"),
            ("minutes", self.minutes is None or 0 < self.minutes < math.inf, "above 0"),
            ("steps", self.steps is None or self.steps >= 1, "at least 1"),
            ("rows", self.rows >= 2, "at least 2: an anchor and a token after it"),
            ("blocks", self.blocks >= 1, "at least 1"),
            ("short_share", 0 <= self.short_share <= 1, "between 0 and 1"),
            ("accumulation", self.accumulation >= 1, "at least 1"),
            ("log_every", self.log_every >= 1, "at least 1"),
            ("evaluate_every", self.evaluate_every >= 0, "0 (at the end only) or more"),
            ("save_every", self.save_every >= 0, "0 (at the end only) or more"),
            ("keep_last", self.keep_last >= 1, "at least 1"),
            ("seed", -(2**63) <= self.seed < 2**63, "a 64-bit integer"),
        ):
            if not holds:
                raise RequestError(f"{name} is {getattr(self, name)!r}; it must be {limit}.")

    @property
    def has_budget(self) -> bool:
        """Does the clock end the run?"""
        return self.minutes is not None and self.steps is None


class Length(NamedTuple):
    """How long a run is: its steps, and the first of those that decay."""

    steps: int
    decay_from: int


def known_length(config: TrainConfig, steps_per_epoch: float) -> Length | None:
    """The run's length where the settings say it; None under a wall-clock budget."""
    if config.has_budget:
        return None
    steps = config.steps or max(1, round(config.epochs * steps_per_epoch))
    return Length(steps, steps - round(steps * config.decay_share))


def plan_length(config: TrainConfig, step: int, clock: RunClock) -> Length | None:
    """The length of a run with a budget, once it is time to decay; None before that."""
    assert config.minutes is not None
    step_s = clock.step_seconds(step)
    budget = config.minutes * 60 - clock.evaluation_s  # the last evaluation is part of it
    elapsed = clock.elapsed()
    if elapsed + step_s < budget * (1 - config.decay_share):
        return None
    return Length(step + max(1, math.floor((budget - elapsed) / step_s)), step)


def learning_rate(config: TrainConfig, length: Length | None, step: int) -> float:
    """The rate of a step, counted from 0."""
    warmup = config.warmup_steps
    if length is not None and not config.has_budget:
        warmup = min(warmup, length.steps // 10)
    rate = config.learning_rate
    if step < warmup:
        rate *= (step + 1) / (warmup + 1)
    if length is not None and step >= length.decay_from:
        passed = (step - length.decay_from) / (length.steps - length.decay_from)
        rate *= 1 - math.sqrt(passed)  # falls faster than a line at first, and ends lower
    return rate


class RunClock:
    """What a run has taken, over all its resumptions, and what a step takes."""

    def __init__(self, seconds_before: float = 0.0, steps_before: int = 0) -> None:
        self._begin = time.perf_counter() - seconds_before
        self._mark = self._lap = (time.perf_counter(), steps_before)
        self._has_lapped = False
        self.evaluation_s = 0.0  # what the last one took

    def elapsed(self) -> float:
        """Seconds of the whole run."""
        return time.perf_counter() - self._begin

    def lap(self, steps: int) -> tuple[float, int]:
        """Seconds and steps since the last call."""
        before, self._lap = self._lap, (time.perf_counter(), steps)
        if not self._has_lapped:  # the first steps compile; they say nothing of the others
            self._mark, self._has_lapped = self._lap, True
        return self._lap[0] - before[0], steps - before[1]

    def exclude(self, seconds: float) -> None:
        """An evaluation took this long: no part of the lap, but of the run."""
        self.evaluation_s = seconds
        self._lap = (self._lap[0] + seconds, self._lap[1])

    def step_seconds(self, steps: int) -> float:
        """Mean time of a step so far, all things counted."""
        since, first = self._mark
        if steps == first:
            since, first = self._begin, 0
        return (time.perf_counter() - since) / max(1, steps - first)
