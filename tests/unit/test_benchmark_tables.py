"""The pure parts of the drafting benchmarks: what is counted, compared and printed."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import accepted_length, cpu_draft
from benchmarks.cpu_draft import DRAFTED, LLAMA, PLAIN, RANDOM, TRANSFORMERS
from benchmarks.cpu_engines import Llama, Turn, random_drafter
from flashdraft.core import GenerationStats
from flashdraft.models.drafter.opening import read_drafter_config
from flashdraft.models.sources import default_drafter
from flashdraft.train.data.answers import Answer, AnswerSet
from flashdraft.train.evaluate import Evaluation, RequestResult


def evaluation(*histograms: dict[int, int], looped: int = 0) -> Evaluation:
    """Requests of one task; the last `looped` of them fell into a loop."""
    kept = len(histograms) - looped
    return Evaluation([RequestResult("t", h, i >= kept) for i, h in enumerate(histograms)])


def test_a_task_is_described_with_and_without_loops() -> None:
    found = accepted_length.describe(evaluation({1: 2, 4: 2}, {16: 3}, looped=1))
    assert found["num_looped"] == 1
    assert found["all"]["num_requests"] == 2
    assert found["all"]["mean"] == pytest.approx((2.5 + 16) / 2)
    assert found["all"]["pooled"] == pytest.approx(58 / 7, abs=1e-4)
    assert found["without_loops"] == {
        "num_requests": 1,
        "mean": 2.5,
        "pooled": 2.5,
        "acceptance": [0.5, 0.5, 0.5],
    }


def test_both_ways_agree_or_it_is_said() -> None:
    online = evaluation({4: 10}, {2: 10})
    equal = accepted_length.compare(online, evaluation({4: 10}, {2: 10}))
    assert equal == {"num_compared": 2, "num_same": 2, "difference_of_means": 0.0, "agree": True}
    near = accepted_length.compare(online, evaluation({4: 10}, {2: 9, 3: 1}))
    assert (near["num_same"], near["agree"]) == (1, True)
    far = accepted_length.compare(online, evaluation({4: 10}, {3: 10}))
    assert (far["difference_of_means"], far["agree"]) == (0.5, False)


def test_the_table_warns_of_disagreement() -> None:
    online, other = evaluation({4: 10}), evaluation({3: 10})
    offline = {
        **accepted_length.describe(other),
        **accepted_length.compare(online, other),
    }
    tasks = {
        "gsm8k_test": {"online": accepted_length.describe(online), "offline": offline},
        "math500": {"online": accepted_length.describe(evaluation({2: 5}))},
    }
    lines = accepted_length.table(tasks)
    assert lines[1].startswith("GSM8K") and "4.00" in lines[1] and "0/1" in lines[1]
    assert lines[1].endswith("DO NOT AGREE") and "AGREE" not in lines[2]
    assert lines[3].split()[-1] == "3.00"  # the mean of the tasks
    assert lines[5].split() == ["GSM8K", "1.00", "1.00", "1.00"]


def test_stored_answers_are_put_in_the_order_of_the_prompts() -> None:
    stored = AnswerSet.from_answers([Answer([7, 8, 9], [1]), Answer([5], [2, 3])])
    found = accepted_length.in_order(stored, [[5], [7, 8, 9]])
    assert [found.example(i)[1].tolist() for i in range(2)] == [[2, 3], [1]]


def test_commands_are_shown_without_folders() -> None:
    folder = "/".join(["", "somewhere", "bench"])
    arguments = [
        folder,
        "--batch",
        "64",
        f"--offline={folder}",
        "../data/answers",
        "a/b.json",
    ]
    shown = accepted_length.shown_command("benchmarks.x", arguments)
    expected = "bench --batch 64 --offline=bench answers a/b.json"
    assert shown == f"python -m benchmarks.x {expected}"


def test_finished_tasks_are_found_only_under_the_same_settings(tmp_path: Path) -> None:
    path = tmp_path / "new" / "results.json"
    result = {"settings": {"seed": 0}, "tasks": {"math500": {"online": {}}}}
    assert accepted_length.read_finished(path, {"seed": 0}) == {}
    accepted_length.write_results(path, result)
    assert json.loads(path.read_text()) == result
    assert accepted_length.read_finished(path, {"seed": 0}) == {"math500": {"online": {}}}
    assert accepted_length.read_finished(path, {"seed": 1}) == {}
    assert accepted_length.read_finished(None, {"seed": 0}) == {}


def test_a_task_is_drawn_by_its_seed_and_takes_the_first_turn(tmp_path: Path) -> None:
    rows = [{"prompt": f"p{i}", "turns": [f"p{i}", "then"]} for i in range(50)]
    (tmp_path / "mt_bench.jsonl").write_text("\n".join(map(json.dumps, rows)))
    first = accepted_length.read_task(tmp_path, "mt_bench", 5, seed=0)
    assert first == accepted_length.read_task(tmp_path, "mt_bench", 5, seed=0)
    assert first != accepted_length.read_task(tmp_path, "mt_bench", 5, seed=1)
    assert all(len(prompt.messages) == 1 and prompt.text in str(rows) for prompt in first)
    assert len(accepted_length.read_task(tmp_path, "mt_bench", 200, seed=0)) == 50


# -- cpu_draft -----------------------------------------------------------------------------------


def row(task: str, **seconds: list[float]) -> dict[str, Any]:
    """A prompt at which every engine needed one second for the first token."""
    engines: dict[str, Any] = {}
    for name, times in {PLAIN: [5.0], DRAFTED: [4.0], RANDOM: [5.0], **seconds}.items():
        engines[name] = {"seconds": times, "first_s": [1.0] * len(times)}
        if name in (PLAIN, DRAFTED, RANDOM):
            engines[name] |= {"accepted_length": 2.0, "verify_length": 3.0, "identical": True}
    return {"task": task, "num_tokens": 10, "engines": engines}


def test_every_engine_gets_every_turn_and_the_first_one_changes() -> None:
    played: list[str] = []

    class Fake:
        def __init__(self, name: str) -> None:
            self._name = name

        def answer(self, prompt_ids: list[int], num_tokens: int) -> Turn:
            assert (prompt_ids, num_tokens) == ([1, 2], 9)
            played.append(self._name)
            return Turn(float(len(played)), 0.0)

        def warm_up(self, prompt_ids: list[int]) -> None: ...

        def stop(self) -> None: ...

    fakes = {name: Fake(name) for name in "abc"}
    turns = cpu_draft.take_turns(fakes, [1, 2], 9, repeats=3, first=4)
    assert "".join(played) == "bcacababc"
    assert [turn.seconds for turn in turns["a"]] == [3.0, 5.0, 7.0]


def test_a_row_keeps_counts_and_whether_every_turn_was_identical() -> None:
    stats = GenerationStats(steps=4, drafted=8, decode_tokens=10)
    good, bad = Turn(2.0, 0.5, [1, 2], stats), Turn(2.0, 0.5, [1, 3], stats)
    found = cpu_draft.row_of(
        "math500", [1, 2], {PLAIN: [good], DRAFTED: [good, bad], LLAMA: [Turn(3.0, 1.0)]}
    )["engines"]
    assert (found[PLAIN]["identical"], found[DRAFTED]["identical"]) == (True, False)
    assert (found[DRAFTED]["accepted_length"], found[DRAFTED]["verify_length"]) == (2.5, 2.0)
    assert found[LLAMA] == {"seconds": [3.0], "first_s": [1.0]}


def test_the_median_turn_counts_and_totals_are_compared() -> None:
    rows = [
        row("math500", plain=[4.0, 99.0, 5.0], drafted=[2.0, 2.0, 50.0]),
        row("mt_bench", plain=[3.0], drafted=[8.0]),
    ]
    assert cpu_draft.seconds_of(rows[0], PLAIN) == 5.0
    assert cpu_draft.speed_ratio(rows, DRAFTED, PLAIN) == 0.8  # (5 + 3) / (2 + 8)
    assert cpu_draft.speed_ratio(rows, DRAFTED, PLAIN, decode_only=True) == 0.75
    summary = cpu_draft.summarise(rows)
    assert summary["by_task"]["math500"] == {"drafted / plain": 2.5, "random weights / plain": 1.0}
    assert summary["drafted / plain, slowest prompt"] == 0.375
    assert summary["drafted / plain, 5th percentile of prompts"] == pytest.approx(
        0.375 + 0.05 * (2.5 - 0.375), abs=1e-4
    )


def test_only_engines_that_ran_are_compared_and_printed() -> None:
    rows = [row("math500", transformers=[40.0], **{LLAMA: [8.0]}), row("mt_bench")]
    for one in rows[1:]:
        one["engines"] |= {name: rows[0]["engines"][name] for name in (TRANSFORMERS, LLAMA)}
    rows[1]["engines"][RANDOM]["identical"] = False
    summary = cpu_draft.summarise(rows)
    assert summary["total_time"] == {
        "drafted / plain": 1.25,
        "drafted / transformers": 10.0,
        "drafted / llama.cpp": 2.0,
        "random weights / plain": 1.0,
    }
    assert summary["identical_answers"] == {DRAFTED: 2, RANDOM: 1}
    text = "\n".join(cpu_draft.table(summary))
    assert "drafted / llama.cpp" in text and "random weights: 1 of 2 answers identical" in text
    for one in rows:
        del one["engines"][LLAMA]
    assert "llama" not in "\n".join(cpu_draft.table(cpu_draft.summarise(rows)))


def test_random_drafters_have_the_pair_s_shape_and_their_seed(tmp_path: Path) -> None:
    name = default_drafter("smollm2-135m")
    assert name is not None
    folders = [
        random_drafter(Path(name), tmp_path / str(i), seed) for i, seed in enumerate((3, 3, 4))
    ]
    assert read_drafter_config(folders[0]) == read_drafter_config(Path(name))
    weights = [(folder / "model.safetensors").read_bytes() for folder in folders]
    assert weights[0] == weights[1] != weights[2]
    assert weights[0] != (Path(name) / "model.safetensors").read_bytes()


@pytest.mark.weights
def test_an_interpreter_without_llama_cpp_is_said() -> None:
    assert "No such file" in str(Llama.start("no-such-python"))
    if importlib.util.find_spec("llama_cpp") is None:
        assert "llama_cpp" in str(Llama.start(sys.executable))
