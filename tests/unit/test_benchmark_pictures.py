"""The benchmark of pictures, in miniature: it runs, and what it says adds up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import h200_pictures
from benchmarks.h200_models import MODELS, seeing, target_shapes
from flashdraft.bench.plan.pairs import find_pair
from flashdraft.bench.plan.sizes import count_target


def test_a_run_in_miniature(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "pictures.json"
    assert h200_pictures.main(["--tiny", "--rounds", "4", str(path)]) == 0
    found = json.loads(path.read_text())
    assert found["weights"] == "random" and found["environment"]["command"]
    assert [row["tokens"] for row in found["tower"]] == [63]
    first = found["first_token"]
    assert first["picture_tokens"] == 2 * 264  # as 16:9 has
    assert first["pictures"]["ms"] > first["opening"]["ms"] > 0
    assert "two pictures of 528 tokens" in capsys.readouterr().out


@pytest.mark.parametrize("name", MODELS)
def test_the_random_tower_is_the_published_one(name: str) -> None:
    long_name = {"31b": "google/gemma-4-31B-it", "26b": "google/gemma-4-26B-A4B-it"}[name]
    ours = seeing(MODELS[name]).target_config()
    published = find_pair(long_name).target
    assert count_target(ours) == count_target(published)
    towers = [n for n in target_shapes(ours) if "vision" in n]
    assert len(towers) == 356
