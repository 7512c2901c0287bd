"""Corrupted checkpoints: no error but ours, in seconds and within a gigabyte. 300 of the 10,000."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.corrupted_bases import build_bases
from benchmarks.corrupted_cases import make_case
from benchmarks.corrupted_checkpoints import run_cases, summarize

NUM_CASES = 300


@pytest.mark.timeout(900)  # a fault may take ten seconds, and a new process after it
def test_every_corrupted_checkpoint_is_refused_in_words_or_answers(tmp_path: Path) -> None:
    found = summarize(list(run_cases(range(NUM_CASES), tmp_path)))
    assert found["num_cases"] == NUM_CASES
    assert found["faults"] == []
    outcomes = {outcome for counts in found["by_kind"].values() for outcome in counts}
    assert {"loaded", "CheckpointError", "UnsupportedModelError"} <= outcomes
    assert len(found["by_kind"]) == 5 and len(found["by_base"]) == 12


def test_a_seed_is_a_case(tmp_path: Path) -> None:
    bases = build_bases(tmp_path / "whole")
    for seed in range(40):
        one, again = (make_case(seed, bases, tmp_path / f"{seed}-{i}") for i in range(2))
        assert one.edits == again.edits and one.edits
        folders = [case.draft or case.model for case in (one, again)]
        parts = [path.parent if path.suffix == ".gguf" else path for path in folders]
        left, right = (
            {
                path.name: path.read_bytes()
                for path in sorted(folder.iterdir())
                if path.is_file() and path.stat().st_size < 2**24 and not path.is_symlink()
            }
            for folder in parts
        )
        assert left == right
