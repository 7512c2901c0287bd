"""The side by side with vLLM: the committed files agree, and docs/bench.md says what they say."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest

from benchmarks import vllm_lengths
from benchmarks.vllm_lengths import FOLDER, MOST_APART, Lengths, compare, pool
from flashdraft.bench.report.reading import read_document
from flashdraft.bench.report.table import Document

PAGE = (Path(__file__).parents[3] / "docs" / "bench.md").read_text(encoding="utf-8")
TASKS = ("gsm8k", "math500", "humaneval", "mbpp", "mt_bench")


@pytest.fixture(scope="module")
def documents() -> tuple[Document, Document]:
    ours, theirs = (read_document(FOLDER / f"vllm_lengths_{n}.json") for n in ("ours", "vllm"))
    return ours, theirs


@pytest.fixture(scope="module")
def rows(documents: tuple[Document, Document]) -> list[Lengths]:
    return list(compare(*documents))


def test_both_engines_accept_as_much(rows: list[Lengths]) -> None:
    assert len(rows) == 2 * len(TASKS)
    assert abs(pool(rows).ratio - 1) < MOST_APART
    assert all(abs(row.ratio - 1) < MOST_APART for row in rows)


def test_every_text_is_the_same_drafted_and_plain(documents: tuple[Document, Document]) -> None:
    for document in documents:
        counts = [one for task in document["identical"].values() for one in task.values()]
        assert sum(one["same"] for one in counts) == sum(one["total"] for one in counts) == 40
        assert not document["is_partial"]


def test_the_page_has_these_lengths(rows: list[Lengths]) -> None:
    of_tasks = [pool([row for row in rows if row.task == task]) for task in TASKS]
    columns = [*of_tasks, pool(rows)]
    for name, side in (("flashdraft", 0), ("vLLM", 1)):
        cells = [f"{one.tokens[side] / one.steps[side]:.2f}" for one in columns]
        assert f"| {name} | {' | '.join(cells)} |" in PAGE
    counted = " | ".join(f"{one.counted:.2f}" for one in columns)
    assert f"| vLLM, by its counters | {counted} |" in PAGE


def test_a_drafter_that_does_worse_is_noticed(
    documents: tuple[Document, Document],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ours, theirs = documents
    worse = copy.deepcopy(theirs)
    for row in worse["rows"]:
        if row["mode"] == "draft":
            row["accepted_histogram"]["1"] = row["accepted_histogram"].get("1", 0) + 20
    found = iter((ours, worse))
    monkeypatch.setattr(vllm_lengths, "read_document", lambda path: next(found))
    monkeypatch.setattr("sys.argv", ["vllm_lengths"])
    assert vllm_lengths.main() == 1
    assert "pooled" in capsys.readouterr().out
