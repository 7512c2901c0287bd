"""One writer at a time: the second is told who the first is, and a killed one blocks nobody."""

from __future__ import annotations

import errno
import fcntl
import logging
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from flashdraft.errors import TrainingError
from flashdraft.train.lock import make_folder, sole_writer

HOLDER = """
import sys
from pathlib import Path
from flashdraft.train.lock import sole_writer
with sole_writer(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@contextmanager
def holder(path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that has the lock until its input is closed."""
    command = [sys.executable, "-c", HOLDER, str(path)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "held\n"
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("name", ["folder", "prompts.jsonl"])
def test_the_second_process_is_refused_and_the_first_unharmed(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    if name == "folder":
        path.mkdir()
    with holder(path) as process:
        with pytest.raises(TrainingError) as refused, sole_writer(path):
            pytest.fail("both have it")
        assert str(path) in str(refused.value) and f"process {process.pid} " in str(refused.value)
        assert "another --out" in str(refused.value)
        with pytest.raises(TrainingError), sole_writer(path):  # it has it still
            pytest.fail("both have it")
        process.communicate("")
        assert process.returncode == 0
    with sole_writer(path):
        pass
    assert list(tmp_path.rglob("*lock")) == [], "nothing is left"


def test_a_killed_process_blocks_nobody(tmp_path: Path) -> None:
    with holder(tmp_path) as process:
        process.kill()
        process.wait()
        assert (tmp_path / "lock").read_text().startswith(f"process {process.pid} ")
        with sole_writer(tmp_path), pytest.raises(TrainingError), sole_writer(tmp_path):
            pytest.fail("both have it")


def test_a_file_system_without_locks_gives_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with caplog.at_level(logging.WARNING), sole_writer(tmp_path):
        (tmp_path / "written").touch()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert f"{tmp_path} cannot be locked (No locks available)" in caplog.text


def test_a_lock_removed_between_open_and_flock_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first holder ends, and takes its file with it, just before ours is locked."""
    flock, calls = fcntl.flock, []

    def late(descriptor: int, operation: int) -> None:
        calls.append(descriptor)
        if len(calls) == 1:
            (tmp_path / "lock").unlink()
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    with sole_writer(tmp_path):
        assert len(calls) == 2
        with pytest.raises(TrainingError), sole_writer(tmp_path):
            pytest.fail("both have it")


def test_another_ones_lock_is_not_removed(tmp_path: Path) -> None:
    """The folder was deleted under a run, and a second run began there."""
    first, second = sole_writer(tmp_path), sole_writer(tmp_path)
    with first:
        (tmp_path / "lock").unlink()
        second.__enter__()
    with pytest.raises(TrainingError), sole_writer(tmp_path):
        pytest.fail("both have it")
    second.__exit__(None, None, None)


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(TrainingError, match="cannot be made: Not a directory"):
        make_folder(tmp_path / "file" / "folder")
    with pytest.raises(TrainingError, match="cannot be written: No such file"):
        sole_writer(tmp_path / "nowhere" / "file").__enter__()
