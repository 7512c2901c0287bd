"""Building from source where no compiler is, and what the wheel then holds; the version's place."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from flashdraft.core import VERSION
from tests import wheel as contents

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built in a copy of the sources, with a compiler that fails."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    built = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(ROOT / "flashdraft", source / "flashdraft", ignore=built)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run(
        [*command, "--wheel-dir", str(folder), str(source)],
        check=True,
        env={**os.environ, "CC": "false"},
    )
    (made,) = folder.glob("*.whl")
    return made


def test_without_a_compiler_the_wheel_holds_everything_but_the_kernels(wheel: Path) -> None:
    assert contents.problems(wheel, with_kernels=False) == []
    assert sorted(contents.problems(wheel)) == sorted(
        f"{name} is missing" for name in contents.kernel_files()
    )


def test_the_metadata(wheel: Path) -> None:
    assert wheel.name.startswith(f"flashdraft-{VERSION}-cp311-abi3-")
    with zipfile.ZipFile(wheel) as archive:
        metadata = archive.read(f"flashdraft-{VERSION}.dist-info/METADATA").decode()
    for line in (
        f"Version: {VERSION}",
        "Classifier: Typing :: Typed",
        "Project-URL: Homepage, https://github.com/flashdraft/flashdraft",
        "License-Expression: Apache-2.0",
    ):
        assert line in metadata.splitlines()


def test_the_version_stands_in_one_place() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)
    assert "version" in project["project"]["dynamic"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {
        "attr": "flashdraft.core.VERSION"
    }
