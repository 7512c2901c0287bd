"""`flashdraft doctor` on the default pair: healthy as it is, and six faults planted on purpose.

Every fault must be the first cause named. The pair is loaded once where a fault leaves its target
alone; half the prompts are enough where a fault shows in any text.
"""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from flashdraft.bench.doctor import causes as doctor_causes
from flashdraft.bench.doctor import drafter as doctor_drafter
from flashdraft.bench.doctor import examination
from flashdraft.bench.doctor import probe as doctor_probe
from flashdraft.bench.doctor.causes import find_causes
from flashdraft.bench.doctor.examination import examine_patient
from flashdraft.bench.doctor.expected import expected_range
from flashdraft.bench.doctor.probe import PROMPTS, Accepted, Patient, Probe, drafter_for, greedy
from flashdraft.bench.doctor.replay import Trial, try_drafter
from flashdraft.bench.doctor.report import Measured, Report
from flashdraft.bench.doctor.settings import Mode, Settings
from flashdraft.cli import main
from flashdraft.core import FinishReason, Generation, GenerationStats, SamplingParams
from flashdraft.models.loading import open_checkpoint
from flashdraft.models.sources import DEFAULT_MODEL, default_drafter, resolve_source

pytestmark = [pytest.mark.weights, pytest.mark.timeout(600)]

FOREIGN_TURNS = (
    "{% for message in messages %}<start_of_turn>{{ message['role'] }}\n"
    "{{ message['content'] }}<end_of_turn>\n{% endfor %}<start_of_turn>model\n"
)
# the drafter saw no French: thinking in it is text of a kind that it was not trained on
THINKING_SWITCH = (
    "{% if enable_thinking %}<think>\nD'accord, réfléchissons. La question est{% endif %}"
)


@pytest.fixture(scope="module")
def pair() -> Patient:
    return Patient.load(Settings(DEFAULT_MODEL, "auto", "cpu", "auto", Mode()))


@pytest.fixture(scope="module")
def measured(pair: Patient) -> Measured:
    """The target's own answers, which no drafter changes, and what a healthy one accepts."""
    prompts, probe = pair.prompts(), Probe(pair.target, pair.drafter)
    plain = probe.answer(prompts, greedy(), drafted=False)
    accepted = Accepted.of(probe.answer(prompts, greedy()))
    assert pair.folder is not None
    expected = expected_range(str(pair.folder), pair.folder, 0.0)
    return Measured(prompts, accepted, None, plain, expected, expected)


@pytest.fixture
def few_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_probe, "PROMPTS", PROMPTS[:3])


def examine(patient: Patient, mode: Mode | None = None) -> Report:
    mode = patient.mode if mode is None else mode
    settings = Settings(patient.llm.model, mode=mode, seconds=400)
    return examine_patient(dataclasses.replace(patient, mode=mode), settings)


def law_holds(report: Report) -> bool:
    law = [finding for finding in report.findings if finding.area == "law"]
    return len(law) == 2 and all("identical" in finding.text for finding in law)


def planted(pair: Patient, folder: Path, known: bool, **changes: Any) -> Patient:
    """The pair with a changed drafter config; unless `known`, its weights' file is another."""
    shutil.copytree(str(default_drafter(DEFAULT_MODEL)), folder)
    config = json.loads((folder / "config.json").read_text())
    config["dflash_config"].update(changes)
    (folder / "config.json").write_text(json.dumps(config))
    if not known:
        tensors = load_file(folder / "model.safetensors")
        tensors["norm.weight"] = tensors["norm.weight"] * 1.0078125  # the same drafts
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    drafter = drafter_for(pair.llm, folder)
    return dataclasses.replace(pair, drafter=drafter, folder=folder)


def test_the_healthy_pair_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "report.json"
    arguments = ["doctor", "--device", "cpu", "--seconds", "400", "--json", str(path)]
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    assert shown.splitlines()[-1].startswith("healthy")
    report = json.loads(path.read_text())
    assert report["is_healthy"] and report["causes"] == []
    assert "GGUF Q4_1 (210 of 211 matrices, 2 kinds), kept as int8 on this CPU" in " ".join(
        shown.split()
    )
    weights = report["weights"]
    assert weights["target"]["kinds"] == {"Q4_1": 210, "Q8_0": 1}
    assert weights["drafter"]["kinds"].keys() == {"bfloat16"} and weights["kv_dtype"] == "float32"
    assert {finding["status"] for finding in report["findings"]} == {"ok"}
    assert report["expected"]["low"] < report["accepted"]["length"] < report["expected"]["high"]
    assert len(report["accepted"]["by_position"]) == 15


class SlowProbe:
    """Answers that are known already, given at the pace of a busy machine on a clock of its own."""

    verify = 15
    seconds, plain_step, drafted_step = 0.0, 0.08, 1.5

    def __init__(self, answers: Sequence[Generation], length: int) -> None:
        self.answers, self.length = answers, length

    def monotonic(self) -> float:
        return self.seconds

    def answer(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        *,
        drafted: bool = True,
        deadline: float = math.inf,
    ) -> list[Generation]:
        pace, length = (self.drafted_step, self.length) if drafted else (self.plain_step, 1)
        steps = 0
        while self.seconds <= deadline and steps * length < params.max_tokens:
            self.seconds += pace
            steps += 1
        given = [answer.token_ids[: steps * length] for answer in self.answers[: len(prompts)]]
        is_cut = steps * length < params.max_tokens
        reason = FinishReason.CANCELLED if is_cut else FinishReason.LENGTH
        stats = GenerationStats(histogram={length: steps} if drafted and steps else {})
        return [Generation("", ids, reason, stats, None) for ids in given]


@pytest.mark.parametrize(
    ("key", "value", "length", "trial_seconds", "name", "said"),
    [
        # some texts of eight are tried before time is up: such a fault shows in any
        ("input_embedding_scale", 576.0, 1, 0.6, "embedding scale", "trained with 1:"),
        # costs this pair next to nothing: the accepted length alone would not show it
        ("target_layer_ids", [2, 9, 15, 21, 28], 4, 0.25, "shifted taps", "[1, 8, 14, 20, 27]"),
    ],
)
def test_a_fault_is_found_by_drafting_in_the_default_time_of_a_slow_machine(
    pair: Patient,
    measured: Measured,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    key: str,
    value: Any,
    length: int,
    trial_seconds: float,
    name: str,
    said: str,
) -> None:
    patient = planted(pair, tmp_path / "drafter", False, **{key: value})
    slow = SlowProbe(measured.answers, length)

    def try_slowly(*arguments: Any) -> Trial:
        slow.seconds += trial_seconds
        return try_drafter(*arguments)

    monkeypatch.setattr(doctor_drafter, "try_drafter", try_slowly)
    monkeypatch.setattr(examination, "Probe", lambda *_, **__: slow)
    for module in (examination, doctor_causes, doctor_drafter):
        monkeypatch.setattr(module, "time", slow)
    settings = Settings(patient.llm.model)
    report = examine_patient(patient, settings)
    assert report.causes[0].name == name and said in report.causes[0].text
    assert report.not_judged is None and law_holds(report)
    assert report.seconds < settings.seconds + 2 * slow.drafted_step
    if name == "embedding scale":
        assert report.causes[0].gain > 2


@pytest.mark.parametrize(
    ("key", "value", "name"),
    [
        ("input_embedding_scale", 24.0, "embedding scale"),
        ("target_layer_ids", [0, 7, 13, 19, 26], "shifted taps"),
    ],
)
def test_a_config_that_is_not_its_weights_own_is_seen(
    pair: Patient, measured: Measured, tmp_path: Path, key: str, value: Any, name: str
) -> None:
    """Even where it does no harm: a scale of 24 costs this pair nothing."""
    patient = planted(pair, tmp_path / "drafter", True, **{key: value})
    (cause,) = find_causes(patient, measured, math.inf).causes
    assert cause.name == name and cause.is_certain


def test_a_wrong_template_is_found(pair: Patient, few_prompts: None) -> None:
    report = examine(pair, Mode(template=FOREIGN_TURNS))
    assert report.causes[0].name == "wrong template" and law_holds(report)
    assert "<|im_start|>" in report.causes[0].text


def test_the_models_own_template_given_by_hand_is_no_fault(pair: Patient) -> None:
    mode = Mode(template=pair.tokenizer.chat_template)
    assert pair.prompts(mode) == pair.prompts()


def test_a_thinking_mismatch_is_found(pair: Patient, few_prompts: None) -> None:
    template = str(pair.tokenizer.chat_template) + THINKING_SWITCH
    report = examine(pair, Mode(thinking=True, template=template))
    assert report.causes[0].name == "thinking mismatch" and law_holds(report)
    assert "without thinking" in report.causes[0].remedy


def test_a_high_temperature_is_found(pair: Patient, few_prompts: None) -> None:
    report = examine(pair, Mode(temperature=1.5))
    assert [cause.name for cause in report.causes] == ["temperature"] and law_holds(report)


def test_a_quantised_target_is_found(
    pair: Patient, tmp_path: Path, few_prompts: None, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = three_bits(pair, tmp_path / "target")
    drafter = str(default_drafter(DEFAULT_MODEL))
    arguments = ["doctor", "--device", "cpu", "--model", str(folder), "--draft", drafter]
    assert main([*arguments, "--seconds", "400", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["causes"][0]["name"] == "quantised target"
    assert "about 3.0 bits" in report["causes"][0]["text"]
    assert report["causes"][0]["after"] > 2 * report["causes"][0]["before"]


def three_bits(pair: Patient, folder: Path) -> Path:
    """The default target as a folder, its matrices in eight levels per 32 weights."""
    checkpoint = open_checkpoint(resolve_source(DEFAULT_MODEL).path)
    tensors = {}
    for name in checkpoint.source.names():
        weight = checkpoint.source.read(name).float()
        if weight.dim() == 2 and "embed" not in name:
            groups = weight.reshape(-1, 32)
            low, high = torch.aminmax(groups, dim=1, keepdim=True)
            step = (high - low).clamp(min=1e-9) / 7
            weight = (((groups - low) / step).round() * step + low).reshape(weight.shape)
        tensors[name] = weight.contiguous()
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer = pair.tokenizer
    special = {**tokenizer.special_tokens, "chat_template": tokenizer.chat_template}
    (folder / "config.json").write_text(json.dumps(checkpoint.raw_config))
    (folder / "tokenizer.json").write_text(tokenizer.to_json())
    (folder / "tokenizer_config.json").write_text(json.dumps(special))
    return folder
