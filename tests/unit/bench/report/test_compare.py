"""Comparing two bench runs: ratios, the interval around them, and what is refused or told."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashdraft.bench.report.compare import bootstrap, compare, compare_files
from flashdraft.bench.report.page import render_report
from flashdraft.bench.report.plots import make_plots
from flashdraft.bench.report.reading import read_document
from flashdraft.bench.report.table import render_table
from flashdraft.errors import RequestError
from tests.bench_document import bench_document


@pytest.fixture
def document() -> dict[str, Any]:
    return bench_document(tasks=("gsm8k", "mbpp"), concurrency=(1, 4))


def faster(document: dict[str, Any], factor: float) -> dict[str, Any]:
    """The same run on a clock that is slower."""
    other = copy.deepcopy(document)
    for row in other["rows"]:
        row["tokens_per_s"] *= factor
        row["wall_s"] /= factor
        row["requests"] = [[s / factor, t / factor, *rest] for s, t, *rest in row["requests"]]
    return other


def save(document: dict[str, Any], path: Path) -> Path:
    path.write_text(json.dumps(document))
    return path


def refusal(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """The reasons of a refusal, one a line."""
    with pytest.raises(RequestError) as caught:
        compare(a, b)
    return [line for line in str(caught.value).splitlines() if line.startswith("- ")]


def test_the_same_file_twice_has_ratio_one(document: dict[str, Any], tmp_path: Path) -> None:
    compared = compare(document, document)
    assert len(compared.rows) == 8
    for row in compared.rows:
        assert row.ratio == row.first_token_ratio == 1 and row.interval == (1, 1)
    path = save(document, tmp_path / "a.json")
    text = compare_files(path, path)
    assert text.count("1.000 to 1.000") == 8
    assert "*" not in text and "Differences" not in text and "Note" not in text


def test_a_run_that_is_faster_throughout_is_so_for_certain(document: dict[str, Any]) -> None:
    for row in compare(document, faster(document, 1.5)).rows:
        assert row.ratio == pytest.approx(1.5)
        assert row.interval == pytest.approx((1.5, 1.5)), "the same prompts are drawn from both"
        assert row.interval is not None and row.interval.excludes_one


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    chance = np.random.default_rng(1)
    covered = 0
    for _ in range(200):
        a = [[s, 0.1, 100, 10] for s in chance.gamma(20, 0.05, size=40)]
        b = [[s / 1.2, 0.1, 100, 10] for s in chance.gamma(20, 0.05, size=30)]
        interval = bootstrap(a, b, chance)
        assert interval is not None
        measured = sum(r[0] for r in a) / 40 / (sum(r[0] for r in b) / 30)
        covered += interval.low * measured <= 1.2 <= interval.high * measured
    assert 178 <= covered <= 199


def test_one_slow_request_widens_the_interval(document: dict[str, Any]) -> None:
    other = copy.deepcopy(document)
    other["rows"][1]["requests"][0][0] *= 20
    intervals = [row.interval for row in compare(document, other).rows]
    assert intervals[1] is not None and intervals[1].high - intervals[1].low > 0.2
    assert intervals[0] == (1, 1)


def test_the_seed_fixes_the_interval(document: dict[str, Any]) -> None:
    other = bench_document(tasks=("gsm8k", "mbpp"), concurrency=(1, 4), seed=5)
    first = compare(document, other, seed=3).rows
    assert first == compare(document, other, seed=3).rows
    assert first != compare(document, other, seed=4).rows
    for row in first:
        assert row.interval is not None and row.ratio is not None
        assert row.interval.low < row.ratio < row.interval.high


@pytest.mark.parametrize("requests", [[], [[1.0, 0.1, 50, 10]], [[1.0, 0.1, 0, 0]] * 3])
def test_too_little_for_an_interval_leaves_the_ratio(
    document: dict[str, Any], requests: list[list[float]]
) -> None:
    document["rows"][0]["requests"] = requests
    compared = compare(document, document)
    assert compared.rows[0].interval is None and compared.rows[0].ratio == 1
    assert "–" in compared.render()


def test_every_reason_against_it_is_named_at_once(document: dict[str, Any]) -> None:
    other = copy.deepcopy(document)
    other["prompts_sha256"]["mbpp"] = "f" * 64
    other["settings"] |= {"max_tokens": 128, "thinking": True, "model": "another"}
    other["settings"] |= {"sampling": "recommended", "temperature": 0.7}
    other["environment"] |= {"device": "NVIDIA H200", "dtype": "bfloat16", "kernels": "triton"}
    reasons = "\n".join(refusal(document, other))
    for words in (
        "other prompts: those of mbpp",
        "limit of tokens: A 256, B 128",
        "thinking: A off, B on",
        "model: A smollm2-135m, B another",
        "sampling: A greedy, B recommended",
        "temperature: A 0.0, B 0.7",
        "hardware: A aarch64 CPU, 2 cores, B NVIDIA H200",
        "dtype: A int8, B bfloat16",
    ):
        assert words in reasons
    assert reasons.count("\n") == 7


@pytest.mark.parametrize(
    ("tasks", "concurrency"), [(("math500",), (1,)), (("gsm8k",), (8,)), ((), (1,))]
)
def test_nothing_in_common_is_refused(
    document: dict[str, Any], tasks: tuple[str, ...], concurrency: tuple[int, ...]
) -> None:
    (reason,) = refusal(document, bench_document(tasks=tasks, concurrency=concurrency))
    assert "nothing in common" in reason


def test_what_either_has_is_named_once_each_in_its_mode(document: dict[str, Any]) -> None:
    other = bench_document(tasks=("math500",), concurrency=(1,))
    document["rows"] = document["rows"][:3]
    (reason,) = refusal(document, other)
    assert "(A: gsm8k at 1 plain and drafted, gsm8k at 4 plain; B: math500 at 1" in reason


def test_prompts_of_a_task_that_one_run_lacks_do_not_matter(document: dict[str, Any]) -> None:
    other = bench_document(tasks=("gsm8k",), concurrency=(1,))
    compared = compare(document, other)
    assert [(row.a["task"], row.a["concurrency"]) for row in compared.rows] == [("gsm8k", 1)] * 2
    assert any("left out: 6" in note for note in compared.notes)


def test_partial_runs_and_other_differences_are_told(document: dict[str, Any]) -> None:
    other = copy.deepcopy(document)
    other["is_partial"], other["problems"] = True, ["Stopped by Ctrl-C."]
    other["settings"] |= {"draft": "ngram", "verify": 7}
    other["environment"]["commit"] = "fedcba9"
    text = compare(document, other).render()
    assert "B is partial: Stopped by Ctrl-C." in text
    assert "draft A auto, B ngram; verify A auto, B 7; commit A 0123abc, B fedcba9" in text


def test_an_endpoint_of_unknown_dtype_is_compared_with_a_note(document: dict[str, Any]) -> None:
    other = copy.deepcopy(document)
    other["settings"] |= {"engine": "http", "url": "http://127.0.0.1:8000"}
    other["environment"] |= {"device": "the client's", "dtype": None, "kernels": None}
    for row in other["rows"]:
        row["mean_accepted_length"] = None
        row["mean_accepted_length_pooled"] = 4.0 if row["mode"] == "draft" else None
    compared = compare(document, other)
    text = compared.render()
    assert "B does not say its hardware, dtype; that was not compared" in text
    drafted = compared.rows[1]
    assert drafted.accepted_a == document["rows"][1]["mean_accepted_length_pooled"]
    assert drafted.accepted_b == 4.0 and "pooled" in text
    assert compared.rows[0].accepted_a is None


def test_int8_is_not_float32(document: dict[str, Any]) -> None:
    other = copy.deepcopy(document)
    for one, kernels in ((document, "cpu-int8"), (other, "cpu-float32")):
        one["environment"] |= {"dtype": "float32", "kernels": kernels}
    assert refusal(document, other) == ["- other dtype: A int8, B float32"]


def test_rows_stand_in_the_order_of_the_table(document: dict[str, Any]) -> None:
    other = copy.deepcopy(document)
    document["rows"][2:6] = reversed(document["rows"][2:6])
    names = [(r.a["task"], r.a["concurrency"], r.a["mode"]) for r in compare(document, other).rows]
    assert names == [
        (task, c, mode) for task in ("gsm8k", "mbpp") for c in (1, 4) for mode in ("plain", "draft")
    ]


def test_accepted_lengths_stand_beside_each_other(document: dict[str, Any]) -> None:
    other = copy.deepcopy(document)
    other["rows"][1]["mean_accepted_length"] = document["rows"][1]["mean_accepted_length"] / 2
    text = compare(document, other).render()
    line = next(line for line in text.splitlines() if "drafted" in line)
    assert line.split()[-2] == "0.500"
    assert "mean over requests" in text


def test_files_from_before_vllms_answers_were_counted_are_read_as_they_would_be_now() -> None:
    folder = Path(__file__).parents[4] / "benchmarks" / "results"
    theirs, ours = (read_document(folder / f"vllm_lengths_{n}.json") for n in ("vllm", "ours"))
    rows = [row for row in compare(theirs, ours).rows if row.a["task"] == "mbpp"]
    drafted = [row for row in rows if row.a["mode"] == "draft"]
    assert len(drafted) == 2
    for row in drafted:
        assert row.accepted_a == pytest.approx(4.81, abs=0.01) == row.accepted_b
    theirs["is_partial"] = True  # perhaps not every prompt was answered
    rows = [row for row in compare(theirs, ours).rows if row.a["task"] == "mbpp"]
    assert rows[1].accepted_a == pytest.approx(5.16, abs=0.01)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "is no JSON file"),
        ("[1, 2]", "is no results file"),
        ('{"format": "something/2"}', "expected 'flashdraft-bench/1'"),
        ('{"format": "flashdraft-bench/1"}', "settings is missing"),
    ],
)
def test_files_of_another_kind_are_refused(
    document: dict[str, Any], tmp_path: Path, content: str, words: str
) -> None:
    good, bad = save(document, tmp_path / "good.json"), tmp_path / "bad.json"
    bad.write_text(content)
    with pytest.raises(RequestError, match="bad.json") as caught:
        compare_files(good, bad)
    assert words in str(caught.value)


def test_a_missing_file_is_named(document: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="absent.json cannot be read"):
        compare_files(save(document, tmp_path / "a.json"), tmp_path / "absent.json")


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("tokens_per_s", "fast", "rows 2 tokens_per_s is 'fast', expected a number"),
        ("tokens_per_s", float("nan"), "rows 2 tokens_per_s is nan"),
        ("output_tokens", 10**400, "rows 2 output_tokens is a number beyond all counting"),
        ("mode", "drafty", "rows 2 mode is 'drafty', expected 'plain' or 'draft'"),
        ("mode", "plain", "two rows are ('gsm8k', 1, 'plain')"),
        ("requests", [[0.0, 0.0, 1, 1]], "rows 2 requests 1 is [0.0, 0.0, 1, 1], expected [sec"),
        ("requests", None, "rows 2 requests is no list"),
        ("ttft_p50_s", "soon", "rows 2 ttft_p50_s is 'soon'"),
        ("accepted_histogram", {"many": 1}, "has the key 'many', expected a number"),
        ("buckets", {}, "rows 2 buckets queue_s is missing"),
    ],
)
def test_damaged_rows_are_named(
    document: dict[str, Any], tmp_path: Path, key: str, value: Any, words: str
) -> None:
    document["rows"][1][key] = value
    path = save(document, tmp_path / "a.json")
    with pytest.raises(RequestError, match="damaged results file") as caught:
        compare_files(path, path)
    assert words in str(caught.value) and "again with --json" in str(caught.value)


JUNK: list[Any] = [None, "x", [], {}, [None], {"a": None}, -1, True, 10**400, float("nan"), 0]


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every value in a document."""
    children = value.items() if isinstance(value, dict) else enumerate(value)
    for key, child in children:
        yield (*at, key)
        if isinstance(child, dict | list):
            yield from places(child, (*at, key))


@pytest.mark.parametrize("junk", JUNK, ids=[f"{value!r:.8}" for value in JUNK])
def test_what_is_read_can_be_shown(junk: Any, tmp_path: Path) -> None:
    good = bench_document(tasks=("gsm8k",), concurrency=(1,), num_prompts=2)
    path, num_refused = tmp_path / "a.json", 0
    for *way, last in places(good):
        bad = copy.deepcopy(good)
        place: Any = bad
        for key in way:
            place = place[key]
        place[last] = junk
        try:
            document = read_document(save(bad, path))
        except RequestError:
            num_refused += 1
            continue
        render_table(document)
        render_report(document, make_plots(document))
        if document["rows"]:
            compare(document, document).render()
    assert num_refused > 40
