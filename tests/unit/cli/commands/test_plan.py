"""`flashdraft plan`: what it prints, its JSON, and that it asks nobody."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from flashdraft.bench.plan.pairs import TARGETS
from flashdraft.cli import build_parser
from flashdraft.errors import FlashdraftError, ModelNotFoundError, RequestError
from tests.seeing_checkpoint import make_seeing_checkpoint
from tests.seeing_gguf import make_seeing_gguf
from tests.unit.models.vision.towers import published

DENSE, MOE = "google/gemma-4-31B-it", "google/gemma-4-26B-A4B-it"


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("plan asked the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", refuse)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", refuse)


def run(*words: str) -> int:
    arguments = build_parser().parse_args(["plan", *words])
    code: int = arguments.run(arguments)
    return code


def test_a_plan_that_fits(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(DENSE, "--gpu", "h200", "--context", "32768") == 0
    out = capsys.readouterr().out
    assert "drafted by z-lab/gemma-4-31B-it-DFlash" in out
    assert "32,768 × 86,016 B + 1,024 × 819,200 B (window) + 2,048 × 16,384 B (window)" in out
    assert "GB ÷ (0.91 × 4.8 TB/s)" in out and "624 × 3.2 µs" in out
    assert "accepted length: 8.6 at 15 draft tokens" in out and "measured on this card" in out
    assert out.count("--quantize") == 5 and "was not measured" not in out
    assert f"Run: flashdraft serve {DENSE} --max-context 32768 --max-batch 1" in out


def test_a_tower_for_pictures_is_a_part_of_the_weights(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(published("31B")))
    assert run(str(tmp_path), "--gpu", "h200", "--draft", "none") == 0
    assert "WEIGHTS: 1.15 GB of them is the tower for pictures" in capsys.readouterr().out
    assert run(DENSE, "--gpu", "h200") == 0
    assert "1.15 GB of them is the tower" in capsys.readouterr().out
    assert run("Qwen/Qwen3-8B", "--gpu", "h200") == 0
    assert "tower" not in capsys.readouterr().out


def test_a_plan_that_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(DENSE, "--gpu", "rtx3090", "--context", "131072") == 0
    out = capsys.readouterr().out
    assert "Run:" not in out and "It fits in no format. What would:" in out
    assert "expected in format" not in out


def test_a_plan_in_few_bits(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(DENSE, "--gpu", "rtx5090", "--kv-dtype", "fp8") == 0
    out = capsys.readouterr().out
    assert "expected in format 'int4, int8 head'" in out and "≈ " in out
    assert "this format was not measured" in out and "assumed here" in out
    assert "÷ (0.6 × 1.792 TB/s) + " in out and "÷ (0.78 × 1.792 TB/s) + " in out
    assert "8,192 × 43,008 B" in out
    assert f"Run: flashdraft serve {DENSE} --quantize int4 --kv-dtype fp8 --max-context" in out


def test_a_plan_without_stored_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(DENSE, "--gpu", "h200", "--context", "32768", "--kv-keys", "rebuilt") == 0
    out = capsys.readouterr().out
    assert (
        "32,768 × 45,056 B + 1,024 × 819,200 B (window)" in out
    )  # of 86,016 the drafter's is 4096
    assert "this format was not measured" in out
    assert f"Run: flashdraft serve {DENSE} --kv-keys rebuilt --max-context 32768" in out


def test_experts_and_partial_loads(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(MOE, "--gpu", "h200", "--concurrency", "2") == 0
    assert "128 × (1 − (1 − 8/128)^rows) = 15.5 for 2 rows" in capsys.readouterr().out
    assert run(DENSE, "--gpu", "rtx5090", "--concurrency", "8") == 0
    out = capsys.readouterr().out
    assert "of 8 at once" in out and "For the whole load:" in out


def test_json_holds_the_same(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    words = (DENSE, "--gpu", "h200", "--concurrency", "4")
    assert run(*words, "--json", str(path)) == 0 and run(*words, "--json") == 0
    found = json.loads(path.read_text())
    assert found == json.loads(capsys.readouterr().out)
    assert found["parameters"] == {"target": 31273088876, "drafter": 1535967488}
    assert found["fits"] and found["format"] == "bf16" and found["advice"] == []
    assert found["card"]["is_measured"] and found["card"]["bandwidth_tb_s"] == 4.8
    first = found["formats"][0]
    assert first["weights_gb"] == pytest.approx(62.546, abs=0.001)
    assert first["cache_gb"] <= first["reserved_gb"] <= first["room_gb"]
    assert first["drafted"]["verify"] == 15 and "GB ÷" in first["drafted"]["formula"]
    assert first["plain"]["step_ms"] > first["plain"]["floor_ms"]
    assert first["flags"] == [] and first["speed_note"] is None
    assert all(one["flags"][0] == "--quantize" for one in found["formats"][1:])
    notes = {one["name"]: one["speed_note"] for one in found["formats"]}
    assert notes["fp8"] is None and notes["int4, int8 head"] is None
    assert "not measured" in notes["int8"] and "not measured" in notes["int4, fp8 head"]


def test_drafters_without_a_known_length(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(DENSE, "--gpu", "h200", "--draft", "none") == 0
    out = capsys.readouterr().out
    assert "plain decoding" in out and "--draft none" in out and "drafted:" not in out
    assert run("smollm2-135m", "--gpu", "h200") == 0
    out = capsys.readouterr().out
    assert "its included drafter" in out and "/drafters/" not in out


def test_this_machine_is_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("smollm2-135m") == 0
    assert "Run: flashdraft serve smollm2-135m" in capsys.readouterr().out


def test_without_a_model_all_known_ones_stand_beside_each_other(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run("--gpu", "rtx5090") == 0
    out = capsys.readouterr().out
    assert "Models for RTX 5090 (32 GB): 33.5 of 34.2 GB usable, 1.792 TB/s" in out
    assert all(name in out for name in TARGETS) and "\x1b" not in out
    # in a pipe a command is one line, to be copied or read by another program
    assert f"  $ flashdraft serve {DENSE} --quantize int4 --max-context 8192 --max-batch 8" in out
    path = tmp_path / "choices.json"
    words = ("--gpu", "rtx5090", "--context", "4096", "--concurrency", "4")
    assert run(*words, "--json", str(path)) == 0
    found = json.loads(path.read_text())
    assert (found["context"], found["requests"], found["tokens_each"]) == (4096, 4, 1024)
    assert found["recommended"] == DENSE


def test_what_is_for_one_model_is_refused_without_one() -> None:
    for words in (("--draft", "none"), ("--kv-keys", "rebuilt"), ("--mmproj", "m.gguf")):
        with pytest.raises(RequestError, match=f"{words[0]} is '{words[1]}', which is for one"):
            run("--gpu", "h200", *words)
    with pytest.raises(RequestError, match="--no-vision is for one model; name it"):
        run("--gpu", "h200", "--no-vision")
    assert run("--gpu", "h200", "--kv-dtype", "fp8") == 0
    with pytest.raises(RequestError, match="--kv-dtype is fp8"):
        run("--gpu", "rtx3090", "--kv-dtype", "fp8")


def test_a_cache_as_large_as_serve_would_make_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(DENSE, "--gpu", "h200", "--cache-gb", "4") == 0
    out = capsys.readouterr().out
    assert "--cache-gb 4 --max-context 8192" in out and "ROOM: what --cache-gb says" in out
    assert run(DENSE, "--gpu", "h200", "--cache-gb", "0.5") == 0
    assert "It fits in no format" in capsys.readouterr().out
    with pytest.raises(RequestError, match="cache_gb is -1"):
        run(DENSE, "--gpu", "h200", "--cache-gb", "-1")


def test_a_tower_of_its_own_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_seeing_checkpoint(tmp_path / "tiny")
    model = str(make_seeing_gguf(folder, tmp_path / "gguf"))
    tower = str(tmp_path / "gguf" / "mmproj-tiny-f32.gguf")
    says = "of them is the tower for pictures, in floats; --no-vision leaves it out."
    assert run(model, "--gpu", "h200") == 0
    out = capsys.readouterr().out
    assert says in out and "--mmproj" not in out
    assert run(model, "--gpu", "h200", "--mmproj", tower) == 0
    out = capsys.readouterr().out
    assert says in out and f"flashdraft serve {model} --mmproj {tower}" in out
    assert run(model, "--gpu", "h200", "--no-vision", "--mmproj", "none.gguf") == 0
    out = capsys.readouterr().out
    assert says not in out and f"flashdraft serve {model} --no-vision" in out
    with pytest.raises(ModelNotFoundError, match="There is no mmproj file 'none.gguf'"):
        run(model, "--gpu", "h200", "--mmproj", "none.gguf")
    with pytest.raises(RequestError, match="takes no mmproj file: only Gemma 4 in a .gguf file"):
        run(DENSE, "--gpu", "h200", "--mmproj", tower)


def test_a_card_by_its_figures(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("Qwen/Qwen3-8B", "--memory", "24") == 0
    assert "give --bandwidth" in capsys.readouterr().out
    assert run("Qwen/Qwen3-8B", "--memory", "24", "--bandwidth", "1.0") == 0
    assert "÷ (0.91 × 1 TB/s)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("no/such",), "known are smollm2-135m"),
        ((DENSE, "--gpu", "voodoo2"), "'voodoo2' is not known; known are rtx3090"),
        ((DENSE, "--gpu", "h200", "--context", "300000"), "takes 2 to 262144"),
        ((DENSE, "--gpu", "h200", "--concurrency", "0"), "--concurrency is 0; it must be 1 to"),
        ((DENSE, "--memory", "-4"), "--memory is -4; it must be above 0"),
        ((DENSE, "--memory", "4", "--bandwidth", "0"), "--bandwidth is 0"),
        (("--gpu", "h20O"), "Did you mean"),
        (("--gpu", "h200", "--context", "1"), "--context is 1"),
        (("--gpu", "h200", "--concurrency", "0"), "--concurrency is 0"),
        (("--gpu", "h200", "--concurrency", "5000"), "--concurrency is 5000"),
    ],
)
def test_bad_input_is_refused(words: tuple[str, ...], reason: str) -> None:
    with pytest.raises(FlashdraftError) as caught:
        run(*words)
    assert reason in str(caught.value)


def test_a_result_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="no folder"):
        run("--json", str(tmp_path / "none" / "plan.json"))
