"""The benchmark of trees in miniature, and traffic over trees."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import h200_trees
from benchmarks.h200_trees import CONDITIONS, REQUESTS, ROWS, TREES, Sizes, cases_of
from benchmarks.traffic.__main__ import main as traffic_main
from benchmarks.traffic.__main__ import make_settings, parse_arguments
from benchmarks.traffic.engines import EngineSpec
from benchmarks.walks import Walks

QUICK = Sizes(context=40, long=96, prompt=16, answer=24, repeats=1, steady=2)


@pytest.fixture(scope="module", autouse=True)
def few_threads() -> Iterator[None]:
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(count)


@pytest.fixture
def walks_file(tmp_path: Path) -> Path:
    """Walks of chains up to 15 tokens, and trees that bring a little more."""
    pairs = {(d, d + more): 4.0**-more * 0.8**d for d in range(16) for more in range(4)}
    counts = {f"{d},{min(n, 15)}": round(1e4 * share) for (d, n), share in pairs.items()}
    sizes = {str(size): counts for size in TREES}
    path = tmp_path / "walks.json"
    path.write_text(json.dumps({"walks": {"greedy": {"a": sizes}, "sampled": {"a": sizes}}}))
    return path


def run(path: Path, walks: Path, *more: str) -> dict[str, Any]:
    command = [str(path), "--model", "tiny", "--walks", str(walks), *more]
    assert h200_trees.main(command) == 0
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_every_number_of_rows_is_timed_as_often_as_it_can_be() -> None:
    chains, trees = (
        list(cases_of(None, REQUESTS)),
        [case for tree in TREES for case in cases_of(tree, REQUESTS)],
    )
    assert chains == [(1, 16), (4, 16), (4, 32), (4, 64), (8, 16), (8, 32), (8, 64), (8, 128)]
    assert len({*trees}) == len(trees) == len(REQUESTS) * len(ROWS) - 1  # 127 nodes are none
    assert list(cases_of(63, (1,))) == [(1, 64)]


def test_steps_are_timed_as_chains_and_as_trees(
    tmp_path: Path, walks_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(h200_trees, "TINY", QUICK)
    monkeypatch.setattr(h200_trees, "REQUESTS", (1, 4))
    monkeypatch.setattr(h200_trees, "WARM_STEPS", 2)
    found = run(tmp_path / "trees.json", walks_file, "--sections", "steps", "--long")
    rows = found["steps"]
    cases = [(row["drafts"], row["columns"], row["requests"], row["rows"]) for row in rows]
    assert ("tree", 63, 1, 64) in cases and ("tree", 31, 4, 128) in cases
    assert ("chain", None, 4, 32) in cases and ("tree", 15, 4, 32) in cases
    for row in (*rows, *found["long"]):
        assert row["conditions"] == CONDITIONS and row["steps"] == 2
        assert row["step_ms"] > row["draft_ms"] > 0 and row["rest_ms"] > 0
        assert row["rows"] == row["requests"] * (1 + row["draft_tokens_each"])
        assert row["accepted_length"] >= row["on_chain"] >= 1.0
        assert row["drafts"] == "tree" or row["accepted_length"] == row["on_chain"]
    assert {row["columns"] for row in found["long"]} == {None, *TREES}
    assert all(row["context"] > 96 for row in found["long"])
    assert (
        found["settings"]["walks"]["greedy"]["63"] > found["settings"]["walks"]["greedy"]["chain"]
    )
    assert str(tmp_path) not in json.dumps(found)


def test_speed_is_told_beside_the_chain_s(
    tmp_path: Path, walks_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(h200_trees, "TINY", QUICK)
    monkeypatch.setattr(h200_trees, "SPEED_TREES", (None, 31))
    monkeypatch.setattr(h200_trees, "MEANS", (4.2,))
    monkeypatch.setattr("benchmarks.h200_measure.MAX_WARM_UPS", 3)
    found = run(tmp_path / "trees.json", walks_file, "--sections", "speed,profile")
    rows = {(row["tree"], row["kind"]): row for row in found["speed"]}
    assert {*rows} == {(tree, kind) for tree in (None, 31) for kind in ("greedy", "sampled")}
    for (tree, _), row in rows.items():
        assert row["by_chain"] == 1.0 if tree is None else row["by_chain"] > 0
        assert row["median"]["tok_s"] > 0
        assert tree is None or row["median"]["accepted_length"] > 1.0  # chains need not pay here
        assert row["prescribed"]["31"] > row["prescribed"]["chain"] == 4.2
    assert [row["mean_verify_width"] for row in found["profile"]] == [15.0, 63.0]
    assert all(row["kernels"] for row in found["profile"])


def test_what_there_is_no_time_for_is_told(tmp_path: Path, walks_file: Path) -> None:
    found = run(tmp_path / "trees.json", walks_file, "--budget", "0")
    assert "steps" not in found and "speed" not in found
    assert found["skipped"][0] == "steps, drafted walks 4.2: the time was up"
    assert len(found["skipped"]) == 4 + 5


def test_traffic_has_trees_and_walks(tmp_path: Path, walks_file: Path) -> None:
    path = tmp_path / "traffic.json"
    command = ["--model", "tiny", "--draft", "--clients", "2", "--kinds", "sampled", "--seconds"]
    command += ["20", "--requests", "3", "--prompt-tokens", "8-24", "--answer-tokens", "12-20"]
    command += ["--tree", "15", "--walks", str(walks_file), "--walk-mean", "4.2"]
    assert traffic_main([*command, "--output", str(path)]) == 0
    (row,) = json.loads(path.read_text())["rows"]
    assert row["engine"] == "drafted walks 4.2, tree 15" and row["tree"] == 15
    assert row["acceptance"]["chain"] == 4.2 and row["acceptance"]["63"] > 4.2
    assert row["tokens_per_s"] > 0


def test_trees_of_traffic_need_walks(walks_file: Path) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(["--model", "tiny", "--tree", "auto"])
    found = parse_arguments(["--model", "tiny", "--tree", "auto", "--walks", str(walks_file)])
    settings = make_settings(found)
    assert settings.tree == "auto" and settings.acceptances[1] is None
    walks = settings.acceptances[0]
    assert isinstance(walks, Walks) and walks.chain_mean == pytest.approx(8.6)
    spec = EngineSpec(walks, "uniform", 8, 1024, tree="auto")
    assert spec.label == "drafted walks 8.6, tree auto, uniform routing"
