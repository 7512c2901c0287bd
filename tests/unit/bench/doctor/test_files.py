"""`flashdraft doctor --verify-files`: what was published, what is damaged, what nobody knows."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from flashdraft.cli import main
from flashdraft.models import sources
from flashdraft.models.files.packaged import PackagedModel
from tests.tiny import make_tiny_checkpoint, make_tiny_drafter

FIELDS = {"role", "file", "num_bytes", "digest", "expected", "is_sound"}
Verify = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def verify(capsys: pytest.CaptureFixture[str]) -> Verify:
    """Runs the command: exit code and report."""

    def run(*arguments: str | Path) -> tuple[int, dict[str, Any]]:
        code = main(["doctor", "--verify-files", "--json", "-", *map(str, arguments)])
        return code, json.loads(capsys.readouterr().out)

    return run


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def problems(report: dict[str, Any]) -> list[dict[str, Any]]:
    return [finding for finding in report["findings"] if finding["status"] == "problem"]


@pytest.fixture
def snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny checkpoint as the Hub's client stores it: large files by sha256, others as git."""
    made, place = make_tiny_checkpoint(tmp_path / "made"), tmp_path / "models--org--name"
    blobs, folder = place / "blobs", place / "snapshots" / ("c" * 40)
    blobs.mkdir(parents=True)
    folder.mkdir(parents=True)
    for path in sorted(made.iterdir()):
        content = path.read_bytes()
        digest = hashlib.sha256(content)
        if path.suffix != ".safetensors":
            digest = hashlib.sha1(b"blob %d\0" % len(content) + content)
        shutil.move(path, blobs / digest.hexdigest())
        (folder / path.name).symlink_to(Path("../../blobs") / digest.hexdigest())
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text("c" * 40)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return folder


def test_a_snapshot_of_the_hub_is_as_published(snapshot: Path, verify: Verify) -> None:
    code, report = verify("--model", "org/name", "--draft", "none")
    assert code == 0 and report["is_healthy"] and report["format"] == "flashdraft-doctor/1"
    files = {check["file"]: check for check in report["files"]}
    assert files.keys() == {path.name for path in snapshot.iterdir()}
    for check in files.values():
        assert check.keys() == FIELDS and check["role"] == "target" and check["is_sound"] is True
        assert check["digest"] == check["expected"]
        assert check["num_bytes"] == (snapshot / check["file"]).stat().st_size
    assert files["model.safetensors"]["digest"].startswith("sha256:")
    assert files["config.json"]["digest"].startswith("git:")
    assert "are as published" in report["findings"][0]["text"]
    assert "headers and sizes agree" in report["findings"][1]["text"]


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_a_flipped_bit_is_found_and_the_remedy_works(
    snapshot: Path, verify: Verify, name: str
) -> None:
    flip(snapshot / name)
    code, report = verify("--model", "org/name", "--draft", "none")
    assert code == 1 and not report["is_healthy"]
    assert [check["file"] for check in report["files"] if check["is_sound"] is False] == [name]
    found = problems(report)[0]
    assert f"{name} is damaged" in found["text"] and found["area"] == "files"
    assert str((snapshot / name).resolve()) in found["remedy"]


def test_a_folder_without_digests_is_judged_by_its_headers(tmp_path: Path, verify: Verify) -> None:
    target = make_tiny_checkpoint(tmp_path / "target")
    drafter = make_tiny_drafter(tmp_path / "drafter")
    code, report = verify("--model", target, "--draft", drafter)
    assert code == 0 and report["settings"]["drafter"] == str(drafter)
    assert {check["role"] for check in report["files"]} == {"target", "drafter"}
    weights = next(check for check in report["files"] if check["file"] == "model.safetensors")
    content = (target / "model.safetensors").read_bytes()
    assert weights["digest"] == "sha256:" + hashlib.sha256(content).hexdigest()
    assert weights["expected"] is None and weights["is_sound"] is None
    texts = [finding["text"] for finding in report["findings"]]
    assert any("no digest is known" in text and weights["digest"] in text for text in texts)
    assert sum("headers and sizes agree" in text for text in texts) == 2
    for folder, role in ((drafter, "drafter"), (target, "target")):
        path = folder / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-8])
        code, report = verify("--model", target, "--draft", drafter)
        assert code == 1 and any(one["text"].startswith(role) for one in problems(report))


def test_a_folder_that_the_hubs_client_filled(tmp_path: Path, verify: Verify) -> None:
    target = make_tiny_checkpoint(tmp_path)
    weights = target / "model.safetensors"
    digest = hashlib.sha256(weights.read_bytes()).hexdigest()
    notes = target / ".cache" / "huggingface" / "download"
    notes.mkdir(parents=True)
    (notes / "model.safetensors.metadata").write_text(f"abc\n{digest}\n1.0\n")
    code, report = verify("--model", target, "--draft", "none")
    assert code == 0 and [check["is_sound"] for check in report["files"]].count(True) == 1
    flip(weights)
    code, report = verify("--model", target, "--draft", "none")
    assert code == 1 and "fetch it again" in problems(report)[0]["remedy"]


def test_the_packaged_model_is_read_again_whatever_was_noted(
    tmp_path: Path, verify: Verify, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = b"GGUF no model"
    model = PackagedModel("p", "1", "p/m.gguf", hashlib.sha256(content).hexdigest(), 13, "Q4_1")
    monkeypatch.setenv("FLASHDRAFT_HOME", str(tmp_path))
    monkeypatch.setitem(sources._PACKAGED, "smollm2-135m", model)
    model.path.parent.mkdir()
    model.path.write_bytes(content)
    note = model.path.with_name(".m.gguf.checked.json")
    assert model.is_cached and note.exists()
    _, report = verify("--draft", "none")
    assert report["files"][0]["is_sound"] is True and note.exists()
    flip(model.path)
    code, report = verify("--draft", "none")
    assert code == 1 and report["files"][0]["is_sound"] is False
    assert "fetched anew at its next use" in problems(report)[0]["remedy"] and not note.exists()


def test_in_words(
    snapshot: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (snapshot / "a\x1b[31m.json").write_text("{}")
    asked = ["doctor", "--verify-files", "--model", "org/name", "--draft", "none"]
    assert main(asked) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out and "a\\x1b[31m.json" in out
    assert out.startswith("files\n") and out.splitlines()[-1].startswith("no damage was found (")
    flip(snapshot / "model.safetensors")
    assert main(asked) == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("damaged (1 problem")
