"""The sweep: its order, its warm-up, its progress, and what stops it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from flashdraft.bench.results import DRAFT, PLAIN, Measurement, Reply, Results, RowAcceptance
from flashdraft.bench.run.measure import (
    WARM_UP_TOKENS,
    OnReply,
    Run,
    Sweep,
    SweepEstimate,
    run_sweep,
)
from flashdraft.bench.tasks import BenchPrompt, Task
from flashdraft.errors import EngineLostError

MODES = (PLAIN, DRAFT)


def make_task(name: str, count: int = 3) -> Task:
    messages = [({"role": "user", "content": f"{name} {n}"},) for n in range(count)]
    return Task(name, tuple(BenchPrompt(one) for one in messages), name)


class ScriptedRunner:
    """Answers at once; `at` says what happens in a run instead, by its place among all."""

    def __init__(self, at: dict[int, Callable[[], None]] | None = None) -> None:
        self.modes: tuple[str, ...] = MODES
        self.runs: list[Run] = []
        self._at = at or {}

    def run(self, run: Run, on_reply: OnReply) -> Measurement:
        self.runs.append(run)
        self._at.get(len(self.runs) - 1, lambda: None)()
        replies = {}
        for place in range(len(run.prompts)):
            reply = Reply("text", "text", 1.0, 0.5, 4, 8)
            on_reply(reply)
            replies[place] = [reply]
        return Measurement(replies, 1.0, RowAcceptance())


class Lines:
    """Progress that is kept."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def show(self, text: str) -> None:
        self.lines.append(text)


def sweep_with(runner: ScriptedRunner, sweep: Sweep) -> tuple[Results, list[int], list[str]]:
    results, saved, progress = Results(sweep.tasks, {}, {}), list[int](), Lines()
    run_sweep(runner, sweep, results, progress, lambda: saved.append(num_rows(results)))
    return results, saved, progress.lines


def num_rows(results: Results) -> int:
    return len(results.document()["rows"])


def raising(error: BaseException) -> Callable[[], None]:
    def throw() -> None:
        raise error

    return throw


def test_modes_take_turns_and_so_does_who_begins() -> None:
    sweep = Sweep([make_task("a"), make_task("b")], (1, 4), 16, repeats=2)
    order = [(run.task, run.concurrency, run.mode) for run in sweep.runs(MODES)]
    first = [(PLAIN, DRAFT), (DRAFT, PLAIN)]
    cells = {("a", 1): 0, ("a", 4): 1, ("b", 1): 1, ("b", 4): 0}  # no concurrency has one beginner
    expected = [
        (*cell, mode)
        for repeat in range(2)
        for cell, number in cells.items()
        for mode in first[(number + repeat) % 2]
    ]
    assert order == expected


def test_the_warm_up_fills_every_concurrency_in_every_mode_with_marked_prompts() -> None:
    sweep = Sweep([make_task("a", 2), make_task("b", 2)], (1, 3, 8), 256)
    runs = list(sweep.warm_ups(MODES))
    assert [(run.concurrency, run.mode, len(run.prompts)) for run in runs] == [
        (1, PLAIN, 1),
        (1, DRAFT, 1),
        (3, PLAIN, 3),
        (3, DRAFT, 3),
        (8, PLAIN, 4),
        (8, DRAFT, 4),
    ]
    assert sweep.num_warm_ups() == 8
    assert {run.max_tokens for run in runs} == {WARM_UP_TOKENS}
    texts = [prompt.messages[0]["content"] for run in runs for prompt in run.prompts]
    assert len(set(texts)) == len(texts)  # a prefix cache knows none of them
    assert not any(text.startswith(("a ", "b ")) for text in texts)


def test_more_requests_in_flight_than_prompts_is_said() -> None:
    assert Sweep([make_task("a", 3)], (1, 3), 16).problems() == []
    [problem] = Sweep([make_task("a", 3)], (1, 8), 16).problems()
    assert problem.startswith("a has 3 prompts: at concurrency 8 no more")
    [problem] = Sweep([make_task("a", 1)], (8,), 16).problems()
    assert problem == "a has 1 prompt: at concurrency 8 no more than that is in flight."


def test_every_row_is_saved_as_soon_as_it_is_measured() -> None:
    runner = ScriptedRunner()
    results, saved, lines = sweep_with(runner, Sweep([make_task("a")], (1, 2), 16))
    assert saved == [1, 2, 3, 4, 4] and not results.is_partial
    assert lines[0].startswith("warming up") and lines[-1].startswith("100 %")


def test_what_is_saved_before_the_end_says_that_it_is_partial() -> None:
    sweep = Sweep([make_task("a")], (1,), 16)
    results, saved = Results(sweep.tasks, {}, {}), list[tuple[bool, list[str]]]()

    def save() -> None:
        document = results.document()
        saved.append((document["is_partial"], document["problems"]))

    run_sweep(ScriptedRunner(), sweep, results, Lines(), save)
    assert saved == [(True, ["The run has not ended."])] * 2 + [(False, [])]


@pytest.mark.parametrize(
    "error", [RuntimeError("CUDA out of memory.\nTried to allocate 2 GiB"), MemoryError()]
)
def test_any_failure_keeps_the_finished_rows_and_is_said_in_a_line(error: Exception) -> None:
    runner = ScriptedRunner({4: raising(error)})
    results, saved, _ = sweep_with(runner, Sweep([make_task("a")], (1, 2), 16))
    assert saved == [0] and results.document()["is_partial"]
    runner = ScriptedRunner({6: raising(error)})
    results, saved, _ = sweep_with(runner, Sweep([make_task("a")], (1, 2), 16))
    [problem] = results.document()["problems"]
    assert saved == [1, 2, 2] and results.document()["is_partial"]
    assert problem.startswith("Stopped in a, concurrency 2, draft, which is not in the results: ")
    assert type(error).__name__ in problem and "\n" not in problem


@pytest.mark.parametrize("place", [4, 6])
def test_an_engine_that_is_lost_leaves_what_was_measured(place: int) -> None:
    runner = ScriptedRunner({place: raising(EngineLostError("The server is gone."))})
    results, saved, _ = sweep_with(runner, Sweep([make_task("a")], (1, 2), 16))
    document = results.document()
    assert len(document["rows"]) == place - 4 == saved[-1] and document["is_partial"]
    assert "The server is gone." in document["problems"][-1]
    assert "which is not in the results" in document["problems"][-1]
    assert len(runner.runs) == place + 1


def test_an_interrupt_keeps_the_finished_rows_and_goes_on_up() -> None:
    runner = ScriptedRunner({5: raising(KeyboardInterrupt())})
    sweep = Sweep([make_task("a")], (1, 2), 16)
    results, saved = Results(sweep.tasks, {}, {}), list[int]()
    with pytest.raises(KeyboardInterrupt):
        run_sweep(runner, sweep, results, Lines(), lambda: saved.append(num_rows(results)))
    document = results.document()
    assert document["is_partial"] and saved == [1, 1]
    assert document["problems"] == [
        "Interrupted in a, concurrency 1, draft: that row is not in the results."
    ]


def test_a_row_without_an_answer_ends_the_sweep_in_words() -> None:
    class Silent(ScriptedRunner):
        def run(self, run: Run, on_reply: OnReply) -> Measurement:
            super().run(run, lambda reply: None)
            problem = f"{run.label}: 3 of 3 prompts got no answer; prompt 1: HTTP 500."
            return Measurement({}, 1.0, RowAcceptance(), [problem], len(run.prompts))

    results, _, _ = sweep_with(Silent(), Sweep([make_task("a")], (1,), 16))
    assert results.is_partial and num_rows(results) == 0
    assert results.problems == [
        "Stopped in a, concurrency 1, plain, which is not in the results: "
        "3 of 3 prompts got no answer; prompt 1: HTTP 500."
    ]


def test_the_estimate_grows_with_what_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    runs = list(Sweep([make_task("a", 4)], (1,), 16).runs(MODES))
    estimate = SweepEstimate(runs)
    assert estimate.describe(runs[0], 0) == "  0 %  a, concurrency 1, plain  0/4"
    now += 30
    assert estimate.describe(runs[0], 2).endswith(" 2/4  about 1 min 30 s left")
    estimate.add(runs[0])
    now += 30
    assert estimate.describe(runs[1], 0).startswith(" 50 %")
    assert estimate.describe(runs[1], 4).endswith("about 0 s left")
