"""docs/clients.md names the versions that are installed, and what cannot be installed is told."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

from tests.clients import make_environment
from tests.clients.client_processes import HERE, ROOT, environments
from tests.unit.test_readme import blocks

PAGE = (ROOT / "docs" / "clients.md").read_text(encoding="utf-8")


def pinned() -> set[tuple[str, str]]:
    """Names and versions of everything that the clients are installed from."""
    found = set()
    for path in (HERE / "requirements").glob("*.txt"):
        found |= set(re.findall(r"^([\w.-]+)==(\S+)", path.read_text(encoding="utf-8"), re.M))
    packages = json.loads(environments()["js"].read_text(encoding="utf-8"))
    return found | set(packages["dependencies"].items())


def test_versions_are_those_that_are_installed() -> None:
    rows = re.findall(r"^\| (.*?`.*?`.*?) \| ([\d., ]+) \|", PAGE, re.MULTILINE)
    assert len(rows) == 16
    for names, versions in rows:
        listed = zip(re.findall(r"`(.+?)`", names), versions.split(", "), strict=True)
        assert set(listed) <= pinned()


def test_python_blocks_parse() -> None:
    assert len(blocks(PAGE, "python")) > 5
    for block in blocks(PAGE, "python"):
        ast.parse(block)


def test_the_lock_file_names_no_host() -> None:
    lock = json.loads((HERE / "js" / "package-lock.json").read_text(encoding="utf-8"))
    assert not [name for name, entry in lock["packages"].items() if "resolved" in entry]


def test_what_cannot_be_installed_is_told_and_leaves_nothing_to_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = tmp_path / "wanted.txt"
    wanted.write_text("no-such-client==1.0\n", encoding="utf-8")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setattr("tests.clients.client_processes.FOLDER", tmp_path / "made")
    for module in ("client_processes", "make_environment"):
        monkeypatch.setattr(f"tests.clients.{module}.environments", lambda: {"wanted": wanted})
    assert make_environment.main() == 1
    error = capsys.readouterr().err
    assert "cannot run" in error and "no-such-client" in error
    assert not (tmp_path / "made" / "wanted" / make_environment.STAMP).exists()


def test_node_is_asked_for_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(make_environment.CannotBeMade, match="node 20 or newer and npm"):
        make_environment.make_node(tmp_path)
