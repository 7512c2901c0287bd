"""What `flashdraft train` takes from its flags and shows of a run."""

from __future__ import annotations

import argparse
import importlib
import io
from pathlib import Path
from typing import Any

import pytest

from flashdraft.cli import build_parser
from flashdraft.cli.commands import train
from flashdraft.cli.display import Screen
from flashdraft.errors import RequestError
from flashdraft.kernels.kinds import WeightOptions
from flashdraft.train.job import TrainingJob

ROW = {
    "step": 40,
    "steps": 100,
    "epoch": 0.5,
    "loss": 3.25,
    "slot_accuracy": [0.5, 0.25],
    "learning_rate": 6e-4,
    "tokens_per_s": 250000.0,
    "remaining_s": 125.0,
}


def parse(*arguments: str) -> argparse.Namespace:
    return build_parser().parse_args(["train", "target", "--out", "folder", *arguments])


def job_of(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Any:
    """The job that the command hands to the pipeline."""
    seen = []
    pipeline = importlib.import_module("flashdraft.train.pipeline")
    monkeypatch.setattr(pipeline, "train_drafter", lambda job, **_: seen.append(job) or {})
    parsed = parse(*arguments)
    assert parsed.run(parsed) == 0
    return seen[0]


def test_without_flags_every_default_is_the_settings_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert job_of(monkeypatch) == TrainingJob("target", Path("folder"))


def test_flags_reach_their_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = (
        "--lr 0.001 --minutes 5 --layers 3 --taps 1,2 --max-tokens 99 --seed 4 --thinking on,off "
        "--answers-per-prompt 2 --quantize int4 --quantize-head fp8"
    )
    job = job_of(monkeypatch, *flags.split(), "--prompts", "a", "--prompts", "b")
    assert (job.train.learning_rate, job.train.minutes, job.train.seed) == (0.001, 5.0, 4)
    assert (job.layers, job.taps) == (3, (1, 2))
    assert job.weights == WeightOptions("int4", "fp8")
    assert (job.answering.max_tokens, job.prompts) == (99, ("a", "b"))
    assert (job.answering.thinking, job.answering.answers_per_prompt) == (("on", "off"), 2)


@pytest.mark.parametrize("two", ["--epochs 1 --minutes 1", "--minutes 1 --steps 1"])
def test_a_run_has_one_length(capsys: pytest.CaptureFixture[str], two: str) -> None:
    with pytest.raises(SystemExit):
        parse(*two.split())
    assert "do not go together" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--answers a --max-tokens 9", "--max-tokens would not be used with --answers"),
        ("--answers a --greedy-share 1", "--greedy-share would not"),
        ("--answers a --max-prompt-tokens 9", "--max-prompt-tokens would not"),
        ("--answers a --synth-count 9", "--synth-count would not be used with --answers"),
        ("--prompts a --synth-count 9", "--synth-count would not be used with --prompts"),
    ],
)
def test_flags_without_an_effect_are_refused(
    monkeypatch: pytest.MonkeyPatch, flags: str, message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        job_of(monkeypatch, *flags.split())


def test_a_json_file_that_cannot_be_written_is_refused_before_the_work(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(RequestError, match="there is no folder"):
        job_of(monkeypatch, "--json", str(tmp_path / "nowhere" / "result.json"))
    assert job_of(monkeypatch, "--json", "folder/result.json").out == Path("folder")


def test_a_row_in_words() -> None:
    text = train.describe_row(ROW)
    assert "step 40/100" in text and "first slot 50.0%" in text and "2:05 left" in text
    assert "step 40 ·" in train.describe_row(ROW | {"steps": None})


def test_off_a_terminal_every_row_is_a_line() -> None:
    error = io.StringIO()
    view = train.ProgressView(Screen(io.StringIO(), error))
    view.show({"step": 20, "accepted_length": 1.5})
    view.show(ROW)
    view.close()
    lines = error.getvalue().splitlines()
    assert lines[0] == "step 20 · accepted length 1.500"
    assert lines[1].endswith("left · accepted length 1.500")
