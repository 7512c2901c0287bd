"""The whole command as a process, ended from outside before its engine is ready."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from flashdraft.cli import main
from flashdraft.external import launch
from tests.tiny import make_tiny_checkpoint
from tests.unit.external.fake_engine import are_gone, make_engine, read_record

PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("signals") / "target")


@contextmanager
def serving(target: Path, python: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "flashdraft", "serve", str(target), "--engine", "vllm"),
            *("--engine-python", str(python), "--port", "0", *words),
        ],
        env={**os.environ, "FAKE_RECORD": str(python.parent / "record.json")},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_for(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_true():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_the_engine_loads(tmp_path: Path, target: Path, number: int) -> None:
    python = make_engine(tmp_path)
    with serving(target, python, "--", "--fake", "slow") as process:
        pids = read_record(python.parent / "record.json", PATIENCE_S)["pids"]
        process.send_signal(number)
        _, said = process.communicate(timeout=PATIENCE_S)
    assert process.returncode != 0
    assert "Ending vLLM 0.32.0" in said
    assert "Traceback" not in said.partition("Ending vLLM")[0]
    assert "before it was ready" not in said  # it was asked to, and did not crash
    assert are_gone(pids)


def test_an_interrupt_while_the_interpreter_is_asked(tmp_path: Path, target: Path) -> None:
    """Before there is an engine; the interpreter that does not answer is not left behind."""
    python, note = tmp_path / "python", tmp_path / "pid"
    python.write_text(f'#!/bin/sh\necho $$ > "{note}"\nexec sleep 100\n')
    python.chmod(0o755)
    with serving(target, python) as process:
        wait_for(lambda: note.exists() and note.read_text().strip() != "")
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    assert "Traceback" not in said
    assert are_gone([int(note.read_text())])


def test_a_newer_engine_is_told_and_started(
    tmp_path: Path,
    target: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    record = tmp_path / "record.json"
    monkeypatch.setenv("FAKE_RECORD", str(record))
    monkeypatch.setattr(launch, "TERMINATE_S", 0.5)
    python = str(make_engine(tmp_path, version="0.40.0"))
    words = ["serve", str(target), "--engine", "vllm", "--engine-python", python, "--port", "0"]
    assert main([*words, "--", "--fake", "crash"]) == 3
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("vLLM 0.40.0 has not been tried; the flags are those of 0.32.0")
    assert lines[-1].startswith("vLLM 0.40.0 ended with status 3 before it was ready: ValueError")
    assert are_gone(read_record(record)["pids"])
