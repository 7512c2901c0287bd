"""Trials of the full-size benchmark: models cut short, constants set, and what is kept of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import h200
from benchmarks.h200_models import MODELS, first_layers
from benchmarks.h200_table import markdown, read_results
from benchmarks.h200_trial import Setting, describe_trial, read_setting, summarize
from flashdraft.kernels import quantized, torch_backend
from flashdraft.models.drafter.model import Drafter

TINY = ["--tiny", "--device", "cpu", "--dtype", "float32", "--concurrency", "1", "--repeats", "1"]
TINY += ["--new-tokens-alone", "48", "--cache-gb", "0.05", "--sections", "plain"]
TINY += ["--step-tokens", "256", "--prefill-chunk", "128", "--contexts", "48"]


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_cut_to_whole_patterns_and_keeps_its_drafter(name: str) -> None:
    cut = first_layers(MODELS[name], 12)
    config, drafter = cut.target_config(), cut.drafter_config()
    assert [layer.window is None for layer in config.layers] == ([False] * 5 + [True]) * 2
    assert len(drafter.tap_layers) == 6 == len(set(drafter.tap_layers))
    assert max(drafter.tap_layers) < 12 and drafter.num_target_layers == 12
    with torch.device("meta"):
        shapes = [
            {key: one.shape for key, one in Drafter(which).state_dict().items()}
            for which in (drafter, MODELS[name].drafter_config())
        ]
    assert shapes[0] == shapes[1]
    whole = len(MODELS[name].target["layer_types"])
    assert first_layers(MODELS[name], whole) == MODELS[name]
    for wrong in (0, 7, -6, whole + 6):
        with pytest.raises(ValueError, match=f"is {wrong}; .* multiple of 6 .* at most {whole}"):
            first_layers(MODELS[name], wrong)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("LARGEST_FP8=1.0", "is not MODULE.NAME=VALUE"),
        ("quantized.LARGEST_FP8", "is not MODULE.NAME=VALUE"),
        ("nothing.SIZE=1", "flashdraft.kernels.nothing cannot be imported"),
        ("quantized.SIZE=1", "quantized has no constant SIZE; it has SUPER_GROUP"),
        ("quantized.quantize=1", "no constant quantize"),
        ("quantized.__name__='x'", "no constant __name__"),
        ("quantized.SUPER_GROUP=many", "'many' is not a Python literal"),
        ("quantized.SUPER_GROUP=2.0", "SUPER_GROUP is 256, of type int; 2.0 is of type float"),
        ("quantized.SUPER_GROUP=True", "of type int; True is of type bool"),
        ("torch_backend.LARGEST_FP8=2.0", "from quantized: set quantized.LARGEST_FP8"),
    ],
)
def test_settings_that_set_nothing_are_refused(
    text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        h200.parse_arguments(["--model", "31b", "--set", text])
    assert message in capsys.readouterr().err


def test_a_constant_is_set_where_it_is_and_where_it_was_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in (quantized, torch_backend):
        monkeypatch.setattr(module, "LARGEST_FP8", quantized.LARGEST_FP8)  # and put back
    other = SimpleNamespace(**vars(quantized))
    setting = read_setting("quantized.LARGEST_FP8=240.0")
    assert setting == Setting("quantized", "LARGEST_FP8", 240.0)
    setting.apply()
    assert quantized.LARGEST_FP8 == torch_backend.LARGEST_FP8 == 240.0
    assert other.LARGEST_FP8 == 448.0 and str(setting) == "quantized.LARGEST_FP8=240.0"


def test_of_two_constants_of_one_name_and_value_only_the_named_one_is_set() -> None:
    """In another process: Triton's modules are not to be changed for other tests."""
    pytest.importorskip("triton", reason="Triton is not installed")
    code = """
import triton.language as tl
from benchmarks.h200_trial import read_setting
from flashdraft.kernels.cuda import overlap, quantized_backend
from flashdraft.kernels.cuda.experts import quantized as experts
from flashdraft.kernels.cuda.quantized import linear, tiles
overlap.MAX_ROWS = experts.MAX_ROWS  # one object, two constants
read_setting("cuda.experts.quantized.MAX_ROWS=32").apply()
assert experts.MAX_ROWS == quantized_backend.MAX_ROWS == 32
assert overlap.MAX_ROWS == 64
before = tiles.BLOCK_N.value
read_setting(f"cuda.quantized.tiles.BLOCK_N={before // 2}").apply()
assert isinstance(tiles.BLOCK_N, tl.constexpr)
assert tiles.BLOCK_N.value == before // 2
assert tiles.BLOCK_N is linear.BLOCK_N
"""
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr


def test_a_trial_prints_a_line_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert h200.main(["--model", "31b", "--layers", "6", *TINY]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "31b load: ok"
    assert lines[1].startswith("31b plain: c=1: ") and len(lines) == 3
    assert "tok/s, " in lines[1] and lines[1].endswith("µs a layer and step")
    assert lines[2].startswith("31b contexts plain: context ")
    assert list(tmp_path.iterdir()) == []


def test_what_a_trial_writes_says_so_and_is_no_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantized, "SUPER_GROUP", 256)
    path = tmp_path / "trial.json"
    command = ["--model", "26b", "--layers", "6", "--set", "quantized.SUPER_GROUP=256", *TINY]
    assert h200.main([*command, "--output", str(path)]) == 0
    sections = read_results(path)["sections"]
    assert set(sections) == {f"26b {name}, trial" for name in ("load", *PLAIN)}
    said = "a trial: the first 6 layers only, quantized.SUPER_GROUP=256 set"
    assert sections["26b load, trial"]["conditions"] == said
    plain = sections["26b plain uniform, trial"]
    assert plain["conditions"] == f"random weights, plain decoding, uniform routing; {said}"
    assert plain["load"]["c=1"]["conditions"] == plain["conditions"]
    assert "tok/s |" in markdown(read_results(path))
    assert "not measured" in markdown(read_results(path))


PLAIN = ("plain degenerate", "plain uniform")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--table", "--layers", "6"], "the --table only reads a file"),
        (["--model", "real", "--bench", ".", "--layers", "6"], "for the random-weight models"),
        (["--model", "31b", "--layers", "66"], "a multiple of 6 layers, at most 60"),
        (["--model", "31b", "--layers", "12", "--tiny"], "at most 6"),
        (
            ["--model", "31b", "--layers", "6", "--output", "benchmarks/results/h200.json"],
            "has the real results; name another file",
        ),
    ],
)
def test_trials_that_make_no_sense_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        h200.parse_arguments(arguments)
    assert message in " ".join(capsys.readouterr().err.split())


def test_summaries_are_by_the_layer_and_say_what_failed() -> None:
    row = {"median": {"tok_s": 64.0, "step_ms": 15.6}}
    line = summarize("31b plain", {"status": "ok", "load": {"c=1": row}}, 60)
    assert line == "31b plain: c=1: 64 tok/s, 15.6 ms a step, 260.0 µs a layer and step"
    contexts = {"1024": {"tok_s": 9.5}, "8192": {"tok_s": 8.0, "step_ms": 6.0}}
    line = summarize("31b contexts", {"status": "ok", "contexts": contexts}, 6)
    assert line.endswith(
        "context 1024: 9.5 tok/s; context 8192: 8 tok/s, 6 ms a step, 1000.0 µs a layer and step"
    )
    failed = {"status": "failed", "error": "RuntimeError: out of luck"}
    assert summarize("31b plain", failed, 6) == "31b plain: RuntimeError: out of luck"
    assert describe_trial(None, []) == ""
