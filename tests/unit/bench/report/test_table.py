"""The table of a bench run: its cells, what is missing, and how a partial run is marked."""

from __future__ import annotations

from typing import Any

import pytest

from flashdraft.bench.report.page import render_report
from flashdraft.bench.report.table import mean_speedups, render_table, table_lines
from tests.bench_document import TASKS, bench_document


@pytest.fixture
def document() -> dict[str, Any]:
    return bench_document()


def cells(text: str, start: str) -> list[str]:
    """The words of the first line that begins so."""
    return next(line for line in text.splitlines() if line.startswith(start)).split()


def test_every_task_has_a_line_for_each_concurrency(document: dict[str, Any]) -> None:
    lines = table_lines(document)
    assert [(line.task, line.concurrency) for line in lines] == [
        (task, c) for task in TASKS for c in (1, 4, 8)
    ]
    first = lines[0]
    assert first.plain is not None and first.drafted is not None
    assert first.speedup == first.drafted["tokens_per_s"] / first.plain["tokens_per_s"]


def test_a_line_says_speed_speedup_length_and_identical_texts(document: dict[str, Any]) -> None:
    plain, drafted = document["rows"][:2]
    plain["tokens_per_s"], drafted["tokens_per_s"] = 31.25, 112.6
    document["speedup"]["gsm8k"]["1"] = 3.6
    drafted["mean_accepted_length"] = 5.805
    document["identical"]["gsm8k"]["1"] = {"same": 19, "total": 20}
    text = render_table(document)
    assert cells(text, "GSM8K") == ["GSM8K", "1", "31.2", "113", "3.60×", "5.80", "19", "of", "20"]
    assert "mean over requests" in text
    assert "drafter: auto" in text and "aarch64 CPU, 2 cores" in text and "greedy" in text
    assert "PARTIAL" not in text and "Problems" not in text
    assert max(map(len, text.splitlines())) <= 100


def test_rows_may_come_in_any_order_and_stay_with_their_task(document: dict[str, Any]) -> None:
    expected = render_table(document)
    first = [row for row in document["rows"] if row["task"] == "gsm8k"]
    others = [row for row in document["rows"] if row["task"] != "gsm8k"]
    document["rows"] = [*reversed(first), *others]
    assert render_table(document) == expected


def test_what_was_not_measured_is_a_dash(document: dict[str, Any]) -> None:
    document["rows"] = [row for row in document["rows"] if row["mode"] == "draft"]
    document["speedup"], document["identical"] = {}, {}
    for row in document["rows"]:
        row["mean_accepted_length"] = None
    document["rows"][0]["mean_accepted_length_pooled"] = None
    document["rows"][1]["mean_accepted_length_pooled"] = 4.321
    text = render_table(document)
    assert cells(text, "GSM8K")[2] == "–" and cells(text, "GSM8K")[4:] == ["–"] * 3
    assert "4.32 pooled" in text
    assert "geometric mean" not in text


def test_the_mean_of_the_tasks_is_geometric_and_needs_them_all(document: dict[str, Any]) -> None:
    document["speedup"] = {
        task: {"1": ratio} for task, ratio in zip(TASKS, (1, 2, 4, 8, 16), strict=True)
    }
    assert mean_speedups(table_lines(document)) == {1: pytest.approx(4)}
    del document["speedup"]["mbpp"]
    assert mean_speedups(table_lines(document)) == {}


def test_a_partial_run_is_marked_and_says_why(document: dict[str, Any]) -> None:
    document["is_partial"] = True
    document["problems"] = ["The server stopped answering."]
    text = render_table(document)
    assert text.startswith("PARTIAL")
    assert "- The server stopped answering." in text


def test_nothing_measured_is_said() -> None:
    assert "Nothing was measured." in render_table(bench_document(tasks=()))


def test_accuracy_is_shown_where_answers_were_checked(document: dict[str, Any]) -> None:
    assert "right" not in render_table(document)
    document["rows"][1]["accuracy"] = {"correct": 3, "total": 20}
    text = render_table(document)
    assert "drafted right" in text
    assert cells(text, "GSM8K")[-4:] == ["–", "3", "of", "20"]


def test_branches_are_shown_where_trees_ran(document: dict[str, Any]) -> None:
    assert "chain" not in render_table(document) + render_report(document, [])
    row = next(row for row in document["rows"] if row["mode"] == "draft")
    row["trees"] = {"drafted": 60, "accepted": 20, "branches": 40, "branches_accepted": 5}
    text = render_table(document)
    assert "off the chain" in text and "25%" in text and "those on branches" in text
    page = render_report(document, [])
    assert "off the chain" in page and "25%" in page


def test_endpoint_and_sampling_are_named(document: dict[str, Any]) -> None:
    document["settings"] |= {"engine": "http", "url": "http://localhost:8000", "draft": "dflash"}
    document["environment"] |= {"server": "vllm", "dtype": None, "kernels": None}
    document["settings"] |= {"sampling": "recommended", "temperature": 0.7, "top_p": 0.9}
    text = render_table(document)
    assert "vllm at http://localhost:8000, asked from aarch64 CPU" in " ".join(text.split())
    assert "recommended sampling, temperature 0.7, top-p 0.9" in text


def test_one_prompt_is_no_prompts(document: dict[str, Any]) -> None:
    document["settings"] |= {"prompts_per_task": 1, "warm_up_prompts": 1}
    text = " ".join(render_table(document).split())
    assert "1 prompt a task" in text and "1 prompt to warm up" in text
    document["settings"]["prompts_per_task"] = None
    assert "all prompts a task" in " ".join(render_table(document).split())


def test_tasks_of_ones_own_keep_their_names() -> None:
    document = bench_document(tasks=("gsm8k",))
    for row in document["rows"]:
        row["task"] = "my prompts"
    assert "my prompts" in render_table(document)


def test_int8_kernels_are_named_by_what_they_compute_in(document: dict[str, Any]) -> None:
    document["environment"] |= {"dtype": "float32", "kernels": "cpu-int8"}
    assert ", int8, greedy" in render_table(document)
    document["environment"]["kernels"] = "cpu-float32"
    assert ", float32, greedy" in render_table(document)
