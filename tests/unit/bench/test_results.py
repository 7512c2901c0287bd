"""From replies to rows to the document; and the document's file."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from flashdraft.bench.report.reading import read_document
from flashdraft.bench.results import (
    DRAFT,
    FORMAT,
    PLAIN,
    Measurement,
    Reply,
    Results,
    RowAcceptance,
    acceptance_of,
    load_results,
    percentile,
    save_results,
    to_json,
)
from flashdraft.bench.tasks import BenchPrompt, Task
from flashdraft.errors import RequestError
from tests.bench_document import bench_document

PROMPTS = tuple(
    BenchPrompt(({"role": "user", "content": text},), row={"answer": text}) for text in "ab"
)
TASK = Task("gsm8k", PROMPTS, "gsm8k", ("One line is broken.",))
BUCKETS = {"queue_s": 0.1, "prefill_s": 0.2, "drafter_prefill_s": 0.05, "decode_s": 0.65}


def reply(text: str, tokens: int = 8, histogram: Mapping[int, int] | None = None) -> Reply:
    histogram = {1: 7} if histogram is None else histogram
    return Reply(
        text=text,
        content=text,
        seconds=1.0,
        ttft_s=0.3,
        prompt_tokens=5,
        output_tokens=tokens,
        token_gaps=[0.1] * (tokens - 1),
        steps=sum(histogram.values()),
        histogram=histogram,
        buckets=BUCKETS,
    )


def measured(*texts: str, wall_s: float = 2.0, histogram: Mapping[int, int] | None = None):
    replies = {place: [reply(text, histogram=histogram)] for place, text in enumerate(texts)}
    every = [one for many in replies.values() for one in many]
    return Measurement(replies, wall_s, acceptance_of(every, [4, 2], [2, 2]))


def make_results(**settings: Any) -> Results:
    return Results([TASK], {"device": "here"}, {"engine": "in-process", **settings})


def test_a_row_has_the_documented_fields() -> None:
    results = make_results()
    results.add(("gsm8k", 1, PLAIN), measured("a", "b"))
    document = results.document()
    expected = bench_document()
    assert set(document) == set(expected)
    assert set(document["rows"][0]) - {"cached_tokens", "mean_accepted_length_counted"} == set(
        expected["rows"][0]
    )


def test_a_row_with_trees_counts_their_branches() -> None:
    results, chains = make_results(), measured("a", "b")
    drafts = {"drafted": 30, "accepted": 8, "branches": 16, "branches_accepted": 2}
    grown = {
        place: [dataclasses.replace(one, drafts=drafts) for one in many]
        for place, many in chains.replies.items()
    }
    results.add(("gsm8k", 1, PLAIN), chains)
    results.add(("gsm8k", 1, DRAFT), dataclasses.replace(chains, replies=grown))
    plain, drafted = results.document()["rows"]
    assert plain["trees"] is None
    assert drafted["trees"] == {name: 2 * count for name, count in drafts.items()}


def test_a_rows_figures() -> None:
    results = make_results()
    results.add(("gsm8k", 4, DRAFT), measured("a", "b", histogram={1: 1, 3: 2}))
    [row] = results.document()["rows"]
    assert row["tokens_per_s"] == 16 / 2.0 and row["output_tokens"] == 16
    assert row["num_prompts"] == 2 and row["prompt_tokens"] == 10
    assert row["itl_p50_s"] == row["itl_p95_s"] == pytest.approx(0.1)
    assert row["mean_accepted_length"] == row["mean_accepted_length_pooled"] == pytest.approx(7 / 3)
    assert row["accepted_histogram"] == {"1": 2, "3": 4}
    assert row["accepted_by_position"] == [0.5, 1.0]
    assert row["buckets"] == pytest.approx({name: 2 * part for name, part in BUCKETS.items()})
    assert row["requests"] == [[1.0, 0.3, 8, 3]] * 2 and row["accuracy"] is None


def test_the_mean_over_requests_is_not_the_pooled_one() -> None:
    replies = {0: [reply("a", histogram={1: 9})], 1: [reply("b", histogram={5: 1})]}
    every = [one for many in replies.values() for one in many]
    results = make_results()
    results.add(("gsm8k", 1, DRAFT), Measurement(replies, 1.0, acceptance_of(every)))
    [row] = results.document()["rows"]
    assert row["mean_accepted_length"] == 3.0 and row["mean_accepted_length_pooled"] == 1.4


def test_speedup_and_identical_texts() -> None:
    results = make_results()
    results.add(("gsm8k", 1, PLAIN), measured("same", "one", wall_s=4.0))
    assert results.document()["speedup"] == {} == results.document()["identical"]
    results.add(("gsm8k", 1, DRAFT), measured("same", "other", wall_s=2.0))
    assert results.document()["speedup"] == {"gsm8k": {"1": 2.0}}
    assert results.document()["identical"] == {"gsm8k": {"1": {"same": 1, "total": 2}}}


def test_only_prompts_that_both_modes_answered_are_compared() -> None:
    results = make_results()
    results.add(("gsm8k", 1, PLAIN), measured("same"))
    results.add(("gsm8k", 1, DRAFT), measured("same", "more"))
    assert results.document()["identical"]["gsm8k"]["1"] == {"same": 1, "total": 1}


def test_repeats_are_one_row() -> None:
    results = make_results()
    for wall_s in (2.0, 6.0):
        results.add(("gsm8k", 1, PLAIN), measured("a", "b", wall_s=wall_s))
    [row] = results.document()["rows"]
    assert row["wall_s"] == 8.0 and row["tokens_per_s"] == 32 / 8.0 and len(row["requests"]) == 4
    assert row["accepted_by_position"] == [0.5, 1.0]


def test_an_unknown_accepted_length_is_null_and_a_gauge_is_pooled() -> None:
    unknown = Reply("t", "t", 1.0, 0.5, 5, 8)
    results = make_results()
    results.add(("gsm8k", 1, DRAFT), Measurement({0: [unknown]}, 1.0, RowAcceptance()))
    results.add(("gsm8k", 4, DRAFT), Measurement({0: [unknown]}, 1.0, RowAcceptance(pooled=3.5)))
    first, second = results.document()["rows"]
    assert first["mean_accepted_length"] is None is first["mean_accepted_length_pooled"]
    assert second["mean_accepted_length"] is None
    assert second["mean_accepted_length_pooled"] == 3.5
    assert first["requests"] == [[1.0, 0.5, 8, None]] and first["itl_p50_s"] is None
    assert set(first["buckets"].values()) == {None}


def test_the_counters_length_stands_beside_the_pooled_one() -> None:
    results = make_results()
    answered = {0: [Reply("t", "t", 1.0, 0.5, 5, 8)]}
    for steps, pooled, counted in ((30, 3.0, 4.0), (10, 5.0, 6.0)):
        found = RowAcceptance({4: steps}, [steps], [steps], pooled, counted)
        results.add(("gsm8k", 1, DRAFT), Measurement(answered, 1.0, found))
    results.add(("gsm8k", 1, PLAIN), measured("a"))
    drafted, plain = results.document()["rows"]
    # repeats count by their steps
    assert drafted["mean_accepted_length_pooled"] == 3.5
    assert drafted["mean_accepted_length_counted"] == 4.5
    assert drafted["accepted_histogram"] == {"4": 40}
    assert plain["mean_accepted_length_counted"] is None


def test_accuracy_counts_what_can_be_judged_once() -> None:
    asked: list[tuple[str, str]] = []

    def check(task: str, row: Mapping[str, Any], text: str) -> bool | None:
        asked.append((task, text))
        return None if text == "?" else text == row["answer"]

    results = Results([TASK], {}, {}, check)
    results.add(("gsm8k", 1, PLAIN), measured("a", "wrong"))
    results.add(("gsm8k", 1, DRAFT), measured("?", "b"))
    rows = results.document()["rows"] and results.document()["rows"]
    assert [row["accuracy"] for row in rows] == [
        {"correct": 1, "total": 2},
        {"correct": 1, "total": 1},
    ]
    assert len(asked) == 4  # however often the document is made


def test_problems_and_partial_results() -> None:
    results = make_results()
    assert results.document()["problems"] == ["One line is broken."]
    assert not results.document()["is_partial"]
    failed = Measurement({}, 1.0, RowAcceptance(), ["prompt 1 failed"], num_failed=1)
    results.add(("gsm8k", 1, PLAIN), failed)
    document = results.document()
    assert document["is_partial"] and document["rows"] == []
    results.stop("The server is gone.")
    assert results.document()["problems"][1:] == ["prompt 1 failed", "The server is gone."]


def test_a_servers_prefix_cache_is_told() -> None:
    known = Reply("t", "t", 1.0, 0.5, prompt_tokens=100, output_tokens=8, cached_tokens=60)
    for engine, is_told in (("http", True), ("in-process", False)):
        results = make_results(engine=engine)
        results.add(("gsm8k", 1, DRAFT), Measurement({0: [known]}, 1.0, RowAcceptance()))
        document = results.document()
        assert document["rows"][0]["cached_tokens"] == 60
        assert any("60 % of the prompts' tokens" in one for one in document["problems"]) == is_told


def test_percentiles_lie_between_neighbours() -> None:
    assert percentile([], 50) is None
    assert percentile([3.0], 95) == 3.0
    assert percentile([4.0, 1.0, 2.0, 3.0], 50) == 2.5
    assert percentile(list(map(float, range(101))), 95) == 95.0


def test_a_saved_document_is_the_same_when_loaded(tmp_path: Path) -> None:
    document = bench_document()
    path = tmp_path / "results.json"
    save_results(path, document)
    assert load_results(path) == document == read_document(path)
    assert [one.name for one in tmp_path.iterdir()] == ["results.json"]
    text = to_json({"a": [[1, 2.5], [None, 3]], "b": ["x [ 1 ]", "y"], "c": []})
    assert "[1, 2.5]" in text and json.loads(text)["b"] == ["x [ 1 ]", "y"]


def test_a_file_that_is_no_document_is_refused(tmp_path: Path) -> None:
    for content, message in (("[]", "format is None"), ("{", "no JSON"), ('{"format": 1}', FORMAT)):
        path = tmp_path / "other.json"
        path.write_text(content)
        with pytest.raises(RequestError, match=message):
            load_results(path)
    with pytest.raises(RequestError, match="cannot be read"):
        load_results(tmp_path / "absent.json")
    with pytest.raises(RequestError, match="cannot be written"):
        save_results(tmp_path / "no" / "folder.json", bench_document())
