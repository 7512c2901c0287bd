"""Doctor on a pair whose cache only plain torch reads on a CPU: an fp8 one, or rebuilt keys."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from flashdraft.bench.doctor import examination
from flashdraft.bench.doctor import target as doctor_target
from flashdraft.bench.doctor.checks import check_environment
from flashdraft.bench.doctor.expected import Expected
from flashdraft.bench.doctor.probe import Accepted, Patient, Probe, greedy
from flashdraft.bench.doctor.report import Finding, Measured
from flashdraft.bench.doctor.settings import Mode, Settings
from flashdraft.bench.doctor.weights import schemes_in_use, stored_weights
from flashdraft.engine.config import CacheOptions
from flashdraft.kernels.kinds import Scheme
from flashdraft.kernels.torch_backend import TorchKernels
from tests.tiny import make_tiny_checkpoint, make_tiny_drafter
from tests.unit.bench.doctor.test_weights import KINDS, gpu, make_gguf

REBUILT = CacheOptions(kv_dtype="fp8", kv_keys="rebuilt")


@pytest.fixture(scope="module")
def patient(tmp_path_factory: pytest.TempPathFactory) -> Patient:
    target = make_tiny_checkpoint(tmp_path_factory.mktemp("target"), "gemma4")
    drafter = make_tiny_drafter(tmp_path_factory.mktemp("drafter"))
    return Patient.load(
        Settings(str(target), str(drafter), "cpu", "bfloat16", Mode(), cache=REBUILT)
    )


def test_a_faster_dtype_is_advised_without_the_flags_that_it_refuses() -> None:
    kernels = TorchKernels(torch.device("cpu"), torch.bfloat16)
    for flags, left_out in (
        (CacheOptions(), ""),
        (CacheOptions(kv_keys="rebuilt"), ", and leave --kv-keys rebuilt out"),
        (REBUILT, ", and leave --kv-dtype fp8 and --kv-keys rebuilt out"),
    ):
        [remedy] = [
            finding.remedy
            for finding in check_environment(kernels, flags)
            if "plain torch runs for bfloat16" in finding.text
        ]
        assert remedy == f"use --dtype auto (int8) or float32{left_out}"


def test_the_reference_reads_the_patients_cache(patient: Patient) -> None:
    probe = Probe(patient.target, patient.drafter, REBUILT)
    prompts = patient.prompts()[:2]
    answers = probe.answer(prompts, greedy(8))
    expected = Expected(3.0, 8.0, (), "", True)
    measured = Measured(prompts, Accepted.of(answers), None, answers, expected, expected)
    accepted, agreed = doctor_target._run_reference(patient, measured, patient.llm.model, 1e12)
    assert accepted is not None and accepted.num_steps > 0
    assert agreed > 0.5, "the same weights in the same dtype"


def test_the_kernels_are_checked_for_the_cache_and_the_formats_in_use(
    patient: Patient, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[Any, ...]] = []

    def check(*given: Any) -> list[Finding]:
        seen.append(given)
        return []

    monkeypatch.setattr(examination, "check_kernels", check)
    monkeypatch.setattr(examination, "schemes_in_use", lambda *_: {Scheme.INT4})
    settings = Settings(patient.llm.model, dtype="bfloat16", seconds=5, cache=REBUILT)
    report = examination.examine_patient(patient, settings)
    assert seen == [(patient.llm.kernels, {Scheme.INT4}, REBUILT)]
    assert "--kv-dtype fp8 and --kv-keys rebuilt out" in json.dumps(report.to_json())


def test_schemes_in_use_are_what_was_asked_for_and_what_the_file_holds(
    patient: Patient, tmp_path: Path
) -> None:
    floats = stored_weights(Path(patient.llm.model))
    assert schemes_in_use(gpu(), floats) == set()
    assert schemes_in_use(gpu(Scheme.INT4), floats) == {Scheme.INT4, Scheme.INT8}
    assert schemes_in_use(gpu(Scheme.INT4, least_values=1 << 40), floats) == set()
    mixed = stored_weights(make_gguf(tmp_path / "mixed.gguf", KINDS))
    assert schemes_in_use(gpu(), mixed) == {Scheme.INT4}
    assert schemes_in_use(gpu(Scheme.FP8), mixed) == {Scheme.INT4, Scheme.FP8}
    eights = stored_weights(make_gguf(tmp_path / "eights.gguf", KINDS[3:4]))
    assert schemes_in_use(gpu(), eights) == {Scheme.INT8, Scheme.FP8}
    assert schemes_in_use(patient.llm.kernels, mixed) == set()
