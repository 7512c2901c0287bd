"""The house rules a machine can check: sizes, ignores, and no trace of the machine at hand."""

from __future__ import annotations

import ast
import fnmatch
import os
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
MAX_FUNCTION_LINES = 90  # the aim is 60; the signature does not count
MAX_FILE_BYTES = 1_000_000
MAX_IGNORES = 20
BIG_FILES = "flashdraft/drafters/"  # shipped checkpoints

# The patterns do not match themselves: each has a group or an escape where the text has none.
MACHINE_PATH = re.compile(r"(?<![\w./~-])/(?:work|tmp|root|home|opt|mnt|Users|private)/\w")
REGISTRY = re.compile(
    r"pypi\.org|python(?:hosted)\.org|download\.(?:pytorch)|(?:index)-url|(?:find)-links"
)


def repository_files() -> Iterator[tuple[str, Path]]:
    """Every file that belongs to the repository: all but what .gitignore names."""
    ignored = [".git", *(line.strip("/") for line in (ROOT / ".gitignore").read_text().split())]

    def kept(names: list[str]) -> list[str]:
        return sorted(n for n in names if not any(fnmatch.fnmatch(n, i) for i in ignored))

    for folder, folders, names in os.walk(ROOT):
        folders[:] = kept(folders)
        for name in kept(names):
            path = Path(folder, name)
            yield path.relative_to(ROOT).as_posix(), path


FILES = dict(repository_files())
PYTHON = {
    name: path.read_text(encoding="utf-8") for name, path in FILES.items() if name[-3:] == ".py"
}


def test_files_are_found() -> None:
    assert {"Makefile", "flashdraft/core.py", "tests/unit/test_house.py"} <= FILES.keys()


def test_functions_are_short() -> None:
    long = [
        f"{name}:{node.lineno} {node.name}"
        for name, text in PYTHON.items()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or 0) - node.body[0].lineno >= MAX_FUNCTION_LINES
    ]
    assert long == []


def test_a_class_name_says_one_thing() -> None:
    places: dict[str, list[str]] = {}
    for name, text in PYTHON.items():
        if name.startswith("flashdraft/"):
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    places.setdefault(node.name, []).append(f"{name}:{node.lineno}")
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_every_ignore_names_its_code_and_there_are_few() -> None:
    ignores = [
        (name, line.strip())
        for name, text in PYTHON.items()
        for line in text.splitlines()
        if re.search(r"#\s*(?:type: ignore|noqa)", line)
    ]
    assert [
        line for _, line in ignores if not re.search(r"ignore\[[\w, -]+\]|noqa: \w", line)
    ] == []
    assert len(ignores) <= MAX_IGNORES, ignores


def test_big_files_stay_out() -> None:
    sizes = {name: path.stat().st_size for name, path in FILES.items()}
    big = {n: s for n, s in sizes.items() if s > MAX_FILE_BYTES and not n.startswith(BIG_FILES)}
    assert big == {}, "keep data outside the repository, or name it in .gitignore"


def test_no_machine_paths_and_no_registries() -> None:
    found = []
    for name, path in FILES.items():
        text = path.read_bytes().decode("utf-8", errors="ignore")
        for pattern in (MACHINE_PATH, REGISTRY):
            found += [f"{name}: {match.group()}" for match in pattern.finditer(text)]
    assert found == []


def test_the_patterns_can_find() -> None:
    for part in ("work", "tmp", "home"):
        assert MACHINE_PATH.search(f'open("/{part}/x.txt")')
        assert not MACHINE_PATH.search(f"frame/{part}/x.txt")
    for host in ("pypi org", "files pythonhosted org", "download pytorch org"):
        assert REGISTRY.search(host.replace(" ", "."))
