"""The sweep: every task at every concurrency, plain and drafted in turns, in one run.

Which mode goes first changes from task to task, from concurrency to concurrency and from repeat to
repeat, so that a machine that grows slower or faster favours neither. It knows engines only as a
`MeasuredEngine`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from flashdraft.bench.results import Measurement, Reply, Results
from flashdraft.bench.tasks import BenchPrompt, Task, count_of
from flashdraft.errors import FlashdraftError

WARM_UP_TOKENS = 32
MAX_REASON = 300  # characters of another library's error
OnReply: TypeAlias = Callable[[Reply], None]


@dataclass(frozen=True)
class Run:
    """One cell of the sweep in one mode."""

    task: str
    prompts: Sequence[BenchPrompt]
    concurrency: int
    mode: str
    max_tokens: int
    is_warm_up: bool = False

    @property
    def label(self) -> str:
        return f"{self.task}, concurrency {self.concurrency}, {self.mode}"

    @property
    def num_requests(self) -> int:
        return sum(prompt.num_turns for prompt in self.prompts)


class MeasuredEngine(Protocol):
    """An engine to measure."""

    @property
    def modes(self) -> tuple[str, ...]:
        """What it can be measured in."""
        ...

    def run(self, run: Run, on_reply: OnReply) -> Measurement:
        """Answer all prompts. EngineLostError if there is no use in going on."""
        ...


@dataclass(frozen=True)
class Sweep:
    """What is to be measured."""

    tasks: Sequence[Task]
    concurrencies: Sequence[int]
    max_tokens: int
    repeats: int = 1

    def runs(self, modes: Sequence[str]) -> Iterator[Run]:
        """All of them, in order."""
        for repeat in range(self.repeats):
            for row, task in enumerate(self.tasks):
                for column, concurrency in enumerate(self.concurrencies):
                    is_even = (repeat + row + column) % 2 == 0
                    for mode in modes if is_even else reversed(modes):
                        yield Run(task.name, task.prompts, concurrency, mode, self.max_tokens)

    def warm_ups(self, modes: Sequence[str]) -> Iterator[Run]:
        """Short runs that fill every concurrency once in every mode; they are not counted."""
        every = [prompt for task in self.tasks for prompt in task.prompts]
        tokens = min(self.max_tokens, WARM_UP_TOKENS)
        for concurrency in self.concurrencies:
            for mode in modes:
                # more than there are would only repeat themselves
                prompts = [_opening(one, f"{mode} {concurrency}") for one in every[:concurrency]]
                yield Run("warm-up", prompts, concurrency, mode, tokens, is_warm_up=True)

    def problems(self) -> list[str]:
        """What cannot be had: more requests in flight than there are prompts."""
        return [
            f"{task.name} has {count_of(len(task.prompts), 'prompt')}: at concurrency "
            f"{concurrency} no more than {'that is' if len(task.prompts) == 1 else 'those are'} "
            "in flight."
            for task in self.tasks
            for concurrency in self.concurrencies
            if concurrency > len(task.prompts)
        ]

    def num_warm_ups(self) -> int:
        """Prompts of the warm-up, in each mode."""
        total = sum(len(task.prompts) for task in self.tasks)
        return sum(min(concurrency, total) for concurrency in self.concurrencies)


def _opening(prompt: BenchPrompt, mark: str) -> BenchPrompt:
    """A prompt's first turn, marked in front: no prefix cache may know it before it counts."""
    first, *others = prompt.messages
    marked = {**first, "content": f"({mark}) {first['content']}"}
    return BenchPrompt((marked, *others))


class SweepWatcher(Protocol):
    """Who wants to know how far the sweep is."""

    def show(self, text: str) -> None:
        """Say it."""
        ...


class SweepEstimate:
    """How much of a sweep is done, and when it will be."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self._total = sum(map(_weight, runs))
        self._done = 0.0
        self._begin = time.monotonic()

    def add(self, run: Run) -> None:
        """A run ended."""
        self._done += _weight(run)

    def describe(self, run: Run, num_replies: int) -> str:
        """Where the run is, in a line."""
        part = _weight(run) * num_replies / max(1, run.num_requests)
        share = min(1.0, (self._done + part) / self._total) if self._total else 1.0
        text = f"{100 * share:3.0f} %  {run.label}  {num_replies}/{run.num_requests}"
        if share <= 0.0:
            return text
        elapsed = time.monotonic() - self._begin
        return f"{text}  about {_duration(elapsed * (1 - share) / share)} left"


def _weight(run: Run) -> float:
    """What a run takes, roughly: a batch shares the reading of the weights, but not all else."""
    return run.num_requests / run.concurrency**0.5


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02} min"
    return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"


def run_sweep(
    runner: MeasuredEngine,
    sweep: Sweep,
    results: Results,
    progress: SweepWatcher,
    on_row: Callable[[], None],
) -> None:
    """Run the sweep into `results`; `on_row` is called after every row.

    What stops it early is said in the results, which keep every finished row: an interrupt, an
    engine that is lost, memory that runs out, a run in which nothing was answered.
    """
    runs = list(sweep.runs(runner.modes))
    run = runs[0]
    results.is_running = True
    try:
        for run in sweep.warm_ups(runner.modes):
            progress.show(f"warming up: concurrency {run.concurrency}, {run.mode}")
            runner.run(run, lambda reply: None)
        estimate = SweepEstimate(runs)
        for run in runs:
            _run_one(runner, run, results, estimate, progress)
            on_row()
    except KeyboardInterrupt:
        results.stop(f"Interrupted in {run.label}: that row is not in the results.")
        raise
    except Exception as error:  # of any kind: hours of finished rows must not go with it
        why = str(error) if isinstance(error, FlashdraftError) else _one_line(error)
        results.stop(f"Stopped in {run.label}, which is not in the results: {why}")
    finally:
        results.is_running = False
        on_row()


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:MAX_REASON].rstrip(": ")


def _run_one(
    runner: MeasuredEngine,
    run: Run,
    results: Results,
    estimate: SweepEstimate,
    progress: SweepWatcher,
) -> None:
    num_replies = 0

    def on_reply(_reply: Reply) -> None:
        nonlocal num_replies
        num_replies += 1
        progress.show(estimate.describe(run, num_replies))

    progress.show(estimate.describe(run, 0))
    measured = runner.run(run, on_reply)
    if not measured.replies:
        told = [problem.removeprefix(f"{run.label}: ") for problem in measured.problems]
        raise FlashdraftError(" ".join(told) or "No prompt was answered.")
    results.add((run.task, run.concurrency, run.mode), measured)
    estimate.add(run)
