"""The tuner of quantised linears: what it tries, and a run of it in Triton's interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from tests.interpreted import UNABLE

pytest.importorskip("triton", reason="Triton is not installed")

from benchmarks import tune_quantized as tune
from flashdraft.kernels.cuda.quantized.linear import plan_quantized
from flashdraft.kernels.kinds import Scheme

CPU = torch.device("cpu")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    command = [sys.executable, "-m", "benchmarks.tune_quantized", "--tiny", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], dict[str, Any]]:
    """What a tiny run prints and writes."""
    path = tmp_path_factory.mktemp("tune") / "tune.json"
    finished = run("--schemes", "int4", "--rows", "1,3", "--output", str(path))
    if UNABLE in finished.stderr:
        pytest.skip("this Triton's interpreter does not run with this numpy")
    assert finished.returncode == 0, finished.stderr
    return finished.stdout.splitlines(), json.loads(path.read_text())


def test_every_case_is_a_line_and_a_result(found: tuple[list[str], dict[str, Any]]) -> None:
    lines, document = found
    assert document["complete"] and document["environment"]["tiny"] and document["read_gb_s"] > 0
    results = document["results"]
    assert len(results) == 2 * 5 == len(lines) - 2
    assert {one["name"] for one in results} == {
        "tiny", "tiny odd", "tiny gate_up", "tiny experts, degenerate", "tiny experts, uniform"
    }  # fmt: skip
    assert not any("WRONG" in line for line in lines)


def test_the_plan_is_among_what_was_timed(found: tuple[list[str], dict[str, Any]]) -> None:
    for one in found[1]["results"]:
        assert sum(entry["is_plan"] for entry in one["timed"]) == 1
        times = [entry["us"] for entry in one["timed"]]
        assert times == sorted(times) and times[0] > 0
    tiny = next(one for one in found[1]["results"] if one["name"] == "tiny")
    assert tiny["bytes"] == 128 * 768 * 4.5 / 8
    assert {entry["splits"] for entry in tiny["timed"]} == {1, 2}  # of 6 steps, three each


def test_a_mixture_reads_the_experts_that_were_chosen(
    found: tuple[list[str], dict[str, Any]],
) -> None:
    sizes = {one["name"]: one["bytes"] for one in found[1]["results"]}
    shapes = ((2 * 32, 64), (64, 32))
    each = sum(tune.random_weight(shape, Scheme.INT4, CPU).num_bytes for shape in shapes)
    assert sizes["tiny experts, degenerate"] == 2 * each  # two of four
    assert sizes["tiny experts, degenerate"] <= sizes["tiny experts, uniform"]


def test_time_that_is_up_stops_it_cleanly() -> None:
    finished = run("--seconds", "-1")
    assert finished.returncode == 0, finished.stderr
    assert "stopped after -1 s: 0 of 30 measured" in finished.stdout


@pytest.mark.parametrize("scheme", [Scheme.INT4, Scheme.INT8, Scheme.FP8])
@pytest.mark.parametrize("shape", [(2816, 4096), (1024, 5376), (64, 2816)])
def test_whatever_a_plan_chooses_is_a_candidate(shape: tuple[int, int], scheme: Scheme) -> None:
    weight = tune.random_weight(shape, scheme, CPU)
    assert weight.shape == shape
    for num_rows in (1, 16, 64):
        for processors in (20, 132, 170):
            plan = plan_quantized(num_rows, weight, processors)
            tried = list(tune.candidates(plan, weight, tune.STAGES))
            assert plan in tried and len(tried) == len(set(tried))
            assert {(one.num_warps, one.num_stages) for one in tried} == {
                (warps, stages) for warps in tune.WARPS for stages in tune.STAGES
            }


def test_the_line_says_how_far_the_plan_is_from_the_best() -> None:
    entries = [
        {"splits": 4, "warps": 2, "stages": 3, "us": 10.0, "is_plan": False, "is_wrong": False},
        {"splits": 6, "warps": 4, "stages": 4, "us": 12.5, "is_plan": True, "is_wrong": False},
        {"splits": 1, "warps": 2, "stages": 5, "us": 1.0, "is_plan": False, "is_wrong": True},
    ]
    plan = {"num_splits": 6, "num_warps": 4, "num_stages": 4}
    row = tune.line(
        "31B o", Scheme.INT4, 1, {"bytes": 20e6, "plan": plan, "timed": entries}, 4000.0
    )
    said = "31B o int4 1 10.00 2000 50% 4 x 2 x 3 6 x 4 x 4 12.50 25.0% 1 WRONG"
    assert " ".join(row.split()) == said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "there is no GPU to tune; --tiny tries this out on a CPU"),
        (["--tiny"], "set TRITON_INTERPRET=1"),
        (["--schemes", "int3"], "known are int4, int8, fp8"),
        (["--rows", "0"], "from 1 to 64"),
    ],
)
def test_what_cannot_be_tuned_is_refused(
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(SystemExit):
        tune.main(arguments)
    assert message in capsys.readouterr().err


def test_tiny_linears_are_left_out_and_drafters_are_in() -> None:
    assert "26B router" not in tune.LINEARS and "26B down" in tune.LINEARS
    assert "26B gate_up" in tune.LINEARS and "31B drafter taps" in tune.LINEARS
