"""`flashdraft doctor` on tiny random checkpoints: what it refuses, says, and exits with."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from flashdraft.bench.doctor import examination, replay
from flashdraft.bench.doctor.causes import find_causes
from flashdraft.bench.doctor.probe import Accepted, Patient, reconfigured
from flashdraft.bench.doctor.replay import agreement, read_text, seconds_per_row, try_drafter
from flashdraft.bench.doctor.settings import Mode, Settings
from flashdraft.bench.doctor.target import weight_bits
from flashdraft.bench.doctor.trees import check_trees
from flashdraft.cli import main
from flashdraft.core import FinishReason, Generation, GenerationStats
from tests.tiny import VOCAB_SIZE, make_tiny_checkpoint, make_tiny_drafter


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("target"), "llama")


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_drafter(tmp_path_factory.mktemp("drafter"))


def run_doctor(*arguments: str | Path) -> int:
    shown = ["doctor", "--device", "cpu", "--dtype", "float32", *map(str, arguments)]
    return main(shown)


def test_plain_decoding_is_healthy(target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_doctor("--model", target, "--draft", "none") == 0
    shown = capsys.readouterr().out
    assert "nothing drafted" in shown and shown.splitlines()[-1].startswith("healthy")


def test_lookup_keeps_the_law_and_has_no_range(target: Path, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    assert run_doctor("--model", target, "--draft", "ngram", "--json", path) == 0
    report = json.loads(path.read_text())
    law = [finding for finding in report["findings"] if finding["area"] == "law"]
    assert len(law) == 2 and all("identical" in finding["text"] for finding in law)
    assert report["accepted"] is None and report["causes"] == []


def test_an_untrained_drafter_is_a_problem_that_no_cause_explains(
    target: Path, drafter: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_doctor("--model", target, "--draft", drafter, "--json") == 1
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert report["format"] == "flashdraft-doctor/1" and report["is_healthy"] is False
    assert report["accepted"]["length"] < report["expected"]["low"]
    by_area = {finding["area"]: finding for finding in report["findings"]}
    assert by_area["cause"]["status"] == "warning" and "unfinished" in by_area["cause"]["text"]
    assert report["causes"] == []
    assert str(target) == report["settings"]["model"] and report["settings"]["template"] == "own"


@pytest.mark.parametrize("tree", ["auto", "15"])
def test_trees_keep_the_law_and_are_judged_where_they_are_on(
    target: Path, drafter: Path, tree: str, tmp_path: Path
) -> None:
    path = tmp_path / "report.json"
    flags = ("--draft", drafter, "--tree", tree, "--json", path)
    run_doctor("--model", target, *flags)
    findings = json.loads(path.read_text())["findings"]
    laws = [one["text"] for one in findings if one["area"] == "law"]
    assert any(text.startswith("greedy, with trees") and "identical" in text for text in laws)
    (found,) = [one for one in findings if one["area"] == "trees"]
    assert found["text"].startswith(f"{tree}: on")
    if tree != "auto":  # the policy may find that they do not pay
        assert "draft tokens a step are branches" in found["text"]
        assert "as plain" not in found["text"]


def test_trees_that_are_off_are_said_to_be(
    target: Path, drafter: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_doctor("--model", target, "--draft", drafter, "--seconds", "5")
    assert "off: drafts are chains" in capsys.readouterr().out


def stats_of(**counts: Any) -> Generation:
    return Generation("", [1], FinishReason.LENGTH, GenerationStats(**counts))


def test_what_trees_bring_is_put_beside_chains() -> None:
    chains = Accepted.of([stats_of(histogram={2: 10})])
    counts = {"drafted": 60, "branches": 40, "accepted": 20, "histogram": {3: 10}}
    promise = {"expected_tokens": 30.0, "expected_s": 1.0, "plain_tokens": 10.0, "plain_s": 0.5}
    (found,) = check_trees("auto", [stats_of(branches_accepted=6, **counts, **promise)], chains)
    assert found.status == "ok" and "6 of 20 accepted ones lie off the chain" in found.text
    assert "3.00 tokens a step (chains: 2.00)" in found.text and "1.50 times as fast" in found.text
    (found,) = check_trees(31, [stats_of(**{**counts, "histogram": {1: 10}})], chains)
    assert found.status == "warning" and "bring nothing" in found.text and found.remedy
    (found,) = check_trees("auto", [stats_of(drafted=20, histogram={2: 10})], chains)
    assert found.status == "ok" and "do not pay" in found.text
    (found,) = check_trees("auto", [stats_of()], chains)
    assert found.status == "warning" and "not enough time" in found.text


def test_time_that_runs_out_is_said(
    target: Path, drafter: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        examination, "find_causes", lambda who, what, _: find_causes(who, what, 0.0)
    )
    run_doctor("--model", target, "--draft", drafter)
    shown = " ".join(capsys.readouterr().out.split())
    assert "too little time to judge: temperature, thinking mismatch" in shown
    assert "--seconds" in shown


@pytest.mark.parametrize("draft", ["ngram", "drafter"])
@pytest.mark.parametrize("temperature", ["0", "0.7"])
def test_without_time_a_pair_is_neither_healthy_nor_ill(
    target: Path,
    drafter: Path,
    draft: str,
    temperature: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("_GREEDY_SHARES", "_SEEDED_SHARES"):
        monkeypatch.setattr(examination, name, (0.0, 0.0))
    path = tmp_path / "report.json"
    flags = ("--draft", drafter if draft == "drafter" else draft, "--temperature", temperature)
    assert run_doctor("--model", target, *flags, "--json", path) == 1
    shown = " ".join(capsys.readouterr().out.split())
    report = json.loads(path.read_text())
    assert "problem" not in {finding["status"] for finding in report["findings"]}
    assert report["is_healthy"] is False and report["not_judged"] == "no token was compared"
    assert "not judged: no token was compared; raise --seconds" in shown
    assert "ends its answers at once" not in shown and "unfinished" not in shown
    assert ("not enough time to judge" in shown) == (draft == "drafter")


def test_an_accepted_length_that_got_no_time_is_not_judged(
    target: Path, drafter: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(examination, "_SEEDED_SHARES", (0.0, 0.0))
    flags = ("--draft", drafter, "--temperature", "0.7")
    assert run_doctor("--model", target, *flags, "--json") == 1
    report = json.loads(capsys.readouterr().out)
    [accepted] = [one for one in report["findings"] if one["area"] == "accepted length"]
    assert accepted["status"] == "warning" and "not enough time to judge" in accepted["text"]
    assert report["not_judged"] == "no drafted step was counted"


def test_what_needs_a_figure_is_not_judged_without_one(
    target: Path, drafter: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Plain text alone is enough to try other drafter configs, and for nothing else."""
    monkeypatch.setattr(examination, "_GREEDY_SHARES", (0.4, 0.0))
    assert run_doctor("--model", target, "--draft", drafter, "--json") == 1
    report = json.loads(capsys.readouterr().out)
    [left] = [one["text"] for one in report["findings"] if one["area"] == "cause"]
    assert left.endswith(": temperature, thinking mismatch, wrong template, quantised target")
    assert report["causes"] == []


@pytest.mark.parametrize(("row", "asked"), [(0.06, 2), (0.2, 0)])
def test_slow_rows_are_given_fewer_prompts_so_that_the_time_is_kept(
    target: Path,
    drafter: Path,
    row: float,
    asked: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(examination, "seconds_per_row", lambda *_: row)
    assert run_doctor("--model", target, "--draft", drafter, "--seconds", "60", "--json") == 1
    report = json.loads(capsys.readouterr().out)
    [said] = [one for one in report["findings"] if "a token takes" in one["text"]]
    assert f"{asked} of 8 prompts" in said["text"] and said["status"] == "warning"
    wanted = int(said["remedy"].split()[2])
    law = [one["text"] for one in report["findings"] if one["area"] == "law"]
    if asked:
        assert "2 answers" in law[0] and 60 < wanted < 120 and report["not_judged"] is None
    else:
        assert not law and report["not_judged"] == "no prompt can be read in this time"
    run_doctor("--model", target, "--draft", drafter, "--seconds", str(wanted))
    assert f"{asked + 1} of 8 prompts" in capsys.readouterr().out


def test_rows_are_timed_together_only_where_that_is_cheap(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patient = Patient.load(Settings(str(target), "none", "cpu", "float32", Mode()))
    counts: list[int] = []
    forward = patient.target.forward

    def slow(ids: torch.Tensor, batch: Any) -> Any:
        counts.append(len(ids))
        time.sleep(0.05 * len(ids))
        return forward(ids, batch)

    monkeypatch.setattr(patient.target, "forward", slow)
    prompt = patient.prompts()[0]
    assert seconds_per_row(patient.target, prompt, 0.5) >= 0.05 and counts == [2, 2]
    counts.clear()
    assert seconds_per_row(patient.target, prompt, 60.0) >= 0.05 and counts == [2, 2, 16]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--seconds", "0"], "--seconds is 0"),
        (["--seconds", "nan"], "--seconds is nan"),
        (["--temperature", "-1"], "temperature is -1"),
        (["--template", "missing.jinja"], "missing.jinja cannot be read"),
        (["--model", "no-such-model"], "no-such-model"),
        (["--json", "no/such/folder/x.json"], "no folder"),
        (
            ["--quantize", "int4"],
            "--quantize is 'int4', which is for weights on a GPU; the device is the CPU",
        ),
        (["--quantize-head", "fp8"], "--quantize-head is 'fp8', which is for weights on a GPU"),
        (["--quantize", "int2"], "quantize is 'int2'; it must be one of int4, int8, fp8"),
        (["--kv-dtype", "fp8"], "--kv-dtype is 'fp8', but flashdraft's native CPU kernels"),
        (["--kv-dtype", "int3"], "int3"),
        (["--kv-keys", "rebuilt"], "--kv-keys is 'rebuilt', but flashdraft's native CPU kernels"),
    ],
)
def test_bad_input_is_refused_in_words(
    arguments: list[str], said: str, target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_doctor("--model", target, *arguments) == 2
    shown = capsys.readouterr()
    assert said in shown.err and "Traceback" not in shown.err and shown.out == ""


def test_a_template_that_is_no_template_is_refused(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken.jinja"
    broken.write_text("{% for message in messages %}")
    assert run_doctor("--model", target, "--template", broken) == 2
    assert "template" in capsys.readouterr().err


def test_replay_drafts_what_the_drafter_would(target: Path, drafter: Path) -> None:
    """A text made of the drafter's own first tokens agrees; with other taps it does not."""
    patient = Patient.load(Settings(str(target), str(drafter), "cpu", "float32", Mode()))
    assert patient.drafter is not None
    prompt = patient.prompts()[0]
    text = read_text(patient.target, prompt, list(range(40, 100)), [0, 1])
    trial = try_drafter(patient.target, patient.drafter, [text])
    swapped = reconfigured(patient.drafter, tap_layers=(1, 0))
    other = try_drafter(patient.target, swapped, [text])
    assert len(trial.scores) == len(other.scores) > 10
    assert not torch.equal(trial.scores, other.scores)
    again = try_drafter(patient.target, patient.drafter, [text])
    assert torch.equal(trial.scores, again.scores)


def test_a_target_agrees_with_its_own_greedy_answer(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patient = Patient.load(Settings(str(target), "none", "cpu", "float32", Mode()))
    prompt = patient.prompts()[0]
    long = patient.llm.engine.target
    answer: list[int] = []
    for _ in range(6):  # one token at a time: whatever the target finds likeliest
        for token in range(VOCAB_SIZE):
            if agreement(long, [*prompt, *answer], [token]) == (1, 1):
                answer.append(token)
                break
    assert len(answer) == 6 and agreement(long, prompt, answer) == (6, 6)
    assert agreement(long, prompt, [(token + 1) % VOCAB_SIZE for token in answer])[0] < 6
    assert agreement(long, prompt, []) == (0, 0)
    monkeypatch.setattr(replay, "_LOGITS_ROWS", 4)
    assert agreement(long, prompt, answer) == (6, 6)


def test_few_bits_are_seen_in_the_weights(target: Path, tmp_path: Path) -> None:
    assert weight_bits(str(target)) is None
    tensors = load_file(target / "model.safetensors")
    for name, weight in tensors.items():
        if weight.dim() == 2 and "embed" not in name:
            step = weight.abs().amax(1, keepdim=True) / 3.5
            tensors[name] = ((weight / step - 0.5).round() + 0.5) * step  # 8 levels
    for file in target.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert weight_bits(str(tmp_path)) == pytest.approx(3.0)
