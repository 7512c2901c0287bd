"""`flashdraft serve --engine`: rehearsals, refusals, and a whole run with an engine that obeys."""

from __future__ import annotations

import os
import shlex
import signal
import socket
from pathlib import Path
from typing import Any

import pytest

from flashdraft.cli import arguments, main
from flashdraft.cli.serving import external
from flashdraft.external import command, launch
from tests.tiny import make_tiny_checkpoint
from tests.unit.external.fake_engine import are_gone, gpu, make_engine, read_record

DENSE = "google/gemma-4-31B-it"


def rehearse(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[list[str], str]:
    """The command's words, and what was said about it."""
    assert main(["serve", *words[: _cut(words)], "--dry-run", *words[_cut(words) :]]) == 0
    out, err = capsys.readouterr()
    return shlex.split(out), err


def _cut(words: tuple[str, ...]) -> int:
    return words.index("--") if "--" in words else len(words)


def refuse(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line that ends a command."""
    assert main(["serve", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_a_rehearsal_prints_the_command_and_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    python = str(make_engine(tmp_path, gpus=[gpu(139, 141)] * 2))
    words, _ = rehearse(
        capsys, DENSE, "--engine", "vllm", "--engine-python", python, "--tensor-parallel", "2",
        "--", "--max-num-seqs", "4", "--dry-run-like",
    )  # fmt: skip
    assert words[:5] == [python, "-m", "vllm.entrypoints.cli.main", "serve", DENSE]
    assert words[words.index("--tensor-parallel-size") + 1] == "2"
    assert words[-3:] == ["--max-num-seqs", "4", "--dry-run-like"]


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_trees_are_ours_and_others_say_so(engine: str, capsys: pytest.CaptureFixture[str]) -> None:
    words, said = rehearse(capsys, DENSE, "--engine", engine, "--tree", "31")
    assert "drafts chains: --tree 31 is flashdraft's alone." in said and "31" not in words
    _, said = rehearse(capsys, DENSE, "--engine", engine, "--tree", "off")
    assert "chains" not in said


def test_a_rehearsal_needs_no_engine(capsys: pytest.CaptureFixture[str]) -> None:
    words, said = rehearse(capsys, DENSE, "--engine", "sglang", "--api-key", "hidden-key")
    assert words[:3] == ["python", "-m", "sglang.launch_server"]
    assert "SGLang is not installed here; the flags are those of 0.5.23." in said
    assert words[words.index("--api-key") + 1] == "$FLASHDRAFT_API_KEY"


def test_the_default_pair_is_rehearsed_without_fetching_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHDRAFT_HOME", str(tmp_path))
    words, said = rehearse(capsys, "--engine", "vllm", "--device", "cpu")
    folder = tmp_path / "models" / "exported" / "smollm2-135m-float32"
    assert words[:3] == ["vllm", "serve", str(folder)]
    assert not folder.exists()
    assert f"would be written to {folder} first" in said


def test_without_a_known_drafter_it_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_tiny_checkpoint(tmp_path / "target")
    words, said = rehearse(capsys, str(folder), "--engine", "vllm")
    assert "--speculative-config" not in words
    assert "decodes plainly. Name one with --draft." in said
    assert words[words.index("--served-model-name") + 1] == "target"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tensor-parallel", "2"], "--tensor-parallel is for an outside engine"),
        (["--dry-run"], "--dry-run is for an outside engine"),
        (["--", "--flag"], "-- is for an outside engine"),
        (["--engine", "vllm", "--log-prompts"], "--log-prompts is the native engine's"),
        (["--engine", "vllm", "--open-objects"], "--open-objects is the native engine's"),
        (["--engine", "vllm", "--max-queue", "3"], "--max-queue is the native engine's"),
        (["--engine", "vllm", "--max-pictures", "3"], "--max-pictures is the native engine's"),
        (["--engine", "vllm", "--quantize", "int4"], "--quantize is the native engine's"),
        (["--engine", "vllm", "--kv-dtype", "fp8"], "--kv-dtype is the native engine's"),
        (["--engine", "vllm", "--kv-keys", "rebuilt"], "--kv-keys is the native engine's"),
        (["--engine", "vllm", "--max-pictures", "3"], "--max-pictures is the native engine's"),
        (
            ["--engine", "sglang", "--dry-run", "--no-vision"],
            "--no-vision has no counterpart in SGLang",
        ),
        (
            ["--engine", "sglang", "--dry-run", "--allow-media-domain", "a.example"],
            "--allow-media-domain has no counterpart in SGLang",
        ),
        (["--engine", "vllm", "--mmproj", "m.gguf"], "--mmproj is the native engine's"),
        (["--quantize", "int5"], "quantize is 'int5'; it must be one of int4, int8, fp8"),
        (["--quantize-head", "4"], "--quantize-head is '4'; it must be one of"),
        (["--kv-dtype", "int8"], "--kv-dtype is 'int8'"),
        (["--kv-keys", "none"], "--kv-keys is 'none'; it must be one of stored, rebuilt"),
        (["--engine", "vllm", "--draft", "ngram"], "--draft ngram is the native engine's lookup"),
        (["--engine", "vllm", "--nodes", "2"], "--nodes needs --head"),
        (["--engine", "vllm", "--head", "a:1"], "go with --nodes"),
        (["--engine", "vllm", "--host", "0.0.0.0"], "there is no API key"),
        (["--engine", "vllm", "--dtype", "int8"], "with an outside engine it must be one of"),
        (["--engine", "vllm", "--engine-python", "nowhere/python"], "cannot be run"),
    ],
)
def test_what_cannot_be_is_one_line(
    capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert message in refuse(capsys, *words)


@pytest.mark.parametrize(
    ("version", "message"),
    [(None, "vLLM is not installed in"), ("0.20.0", "vLLM 0.20.0 is too old")],
)
def test_a_missing_or_old_engine_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], version: str | None, message: str
) -> None:
    python = make_engine(tmp_path, version=version)
    assert message in refuse(capsys, "--engine", "vllm", "--engine-python", str(python))


def test_a_port_in_use_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        python = str(make_engine(tmp_path))
        said = refuse(capsys, "--engine", "vllm", "--engine-python", python, "--port", port)
    assert f"Cannot listen on 127.0.0.1:{port}" in said


class Served:
    """Whole runs of `serve` with the fake engine and a tiny target."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.record_path = folder / "record.json"
        monkeypatch.setenv("FAKE_RECORD", str(self.record_path))
        monkeypatch.setattr(launch, "POLL_S", 0.02)
        monkeypatch.setattr(launch, "TERMINATE_S", 0.5)
        self.words = ["serve", str(make_tiny_checkpoint(folder / "target")), "--engine", "vllm"]
        self.words += ["--engine-python", str(make_engine(folder)), "--port", "0"]

    def run(self, *words: str) -> int:
        return main([*self.words, *words])


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Served:
    return Served(tmp_path, monkeypatch)


def test_a_whole_run_ends_with_the_engines_status(
    served: Served, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def ready(*words: Any) -> str:
        os.kill(os.getpid(), signal.SIGTERM)
        return "it is ready"

    monkeypatch.setattr(external, "_ready", ready)
    assert served.run("--api-key", "hidden-key", "--", "--fake", "serve") == 0
    said = capsys.readouterr().err
    assert "it is ready" in said and "Ending vLLM 0.32.0" in said
    assert "hidden-key" not in said
    record = read_record(served.record_path)
    assert record["VLLM_API_KEY"] == "hidden-key"
    assert record["argv"][-2:] == ["--fake", "serve"]
    assert are_gone(record["pids"])


def test_a_crash_at_the_start_is_the_last_line(
    served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    assert served.run("--", "--fake", "crash") == 3
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == (
        "vLLM 0.32.0 ended with status 3 before it was ready: ValueError: no room for the cache"
    )
    assert are_gone(read_record(served.record_path)["pids"])


def test_the_key_variable_is_one() -> None:
    assert command.KEY_VARIABLE == arguments.KEY_VARIABLE
