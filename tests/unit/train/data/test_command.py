"""`flashdraft synth` and `flashdraft export` on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flashdraft.cli import main
from flashdraft.models.drafter.loading import save_drafter
from flashdraft.train.data import synth
from tests.tiny import make_tiny_checkpoint
from tests.unit.train.test_export import CONFIG, Drafter


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return make_tiny_checkpoint(tmp_path / "target")


def test_synth_as_json_and_in_words(
    target: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(synth, "is_message", lambda text, any_language: len(text) > 3)
    monkeypatch.setattr(synth.SynthSettings.__init__, "__defaults__", ((3.0,), 4, 512, False, 0))
    out = tmp_path / "p.jsonl"
    command = ["synth", "--model", str(target), "--out", str(out), "--slots", "8", "--seed", "3"]
    command += ["--max-tokens", "100", "--device", "cpu", "--dtype", "float32"]
    assert main([*command, "--count", "2", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["kept"] == 2 and report["found"] == 0 and report["tokens_per_s"] > 0
    assert report["quantize"] is None and report["quantize_head"] is None
    assert report["drawn"] == 2 + sum(report["dropped"].values())
    assert main([*command, "--count", "3"]) == 0
    assert "1 prompts in" in capsys.readouterr().err
    assert len(out.read_text().splitlines()) == 3


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--count", "0"], "--count is 0"),
        (["--count", "1", "--slots", "-1"], "--slots"),
        (["--count", "1", "--max-tokens", "2"], "--max-tokens 2"),
        (["--count", "1", "--exclude", "nowhere.jsonl"], "no file or folder"),
        (["--count", "1", "--quantize", "int4"], "--quantize is 'int4', which is for weights on a"),
        (["--count", "1", "--quantize-head", "int9"], "--quantize-head is 'int9'; it must be"),
    ],
)
def test_synth_refuses(
    target: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    message: str,
) -> None:
    out = tmp_path / "p.jsonl"
    command = ["synth", "--model", str(target), "--out", str(out), "--device", "cpu", *flags]
    assert main(command) == 2
    assert message in capsys.readouterr().err
    assert not out.exists()


def test_export(target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_drafter(Drafter(CONFIG), tmp_path / "drafter")
    command = ["export", str(tmp_path / "drafter"), "--out", str(tmp_path / "out")]
    command += ["--layout", "speculators", "--model", str(target), "--json"]
    assert main(command) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["files"] == ["config.json", "flashdraft.json", "model.safetensors"]
    assert report["provenance"]["exported"]["layout"] == "speculators"
    assert main(command) == 2
    assert "already holds a checkpoint" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--out", "out", "--quantize", "int5"], "quantize is 'int5'; it must be one of int4"),
        (["--out", "out", "--quantize", "int4"], "no target is named; give it with --model"),
        (["--check", "--quantize", "int4"], "--quantize int4 would not be used with --check"),
    ],
)
def test_formats_that_say_nothing_of_an_export_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    save_drafter(Drafter(CONFIG), tmp_path / "drafter")
    flags = [str(tmp_path / flag) if flag == "out" else flag for flag in flags]
    assert main(["export", str(tmp_path / "drafter"), *flags]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
