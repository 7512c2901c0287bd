"""The documentation cannot drift: its code parses and runs, its commands and its files exist."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


def blocks(text: str, language: str) -> list[str]:
    """The fenced code blocks of one language; "" for those that name none."""
    fences = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [body for name, body in fences if name == language]


def mapped_files(text: str) -> set[str]:
    """The first word of every line of a file map; {a,b} stands for both."""
    maps = [block for block in blocks(text, "") if block.startswith("flashdraft/")]
    assert len(maps) == 1
    files = set()
    for word in (line.split()[0] for line in maps[0].splitlines()):
        head, _, rest = word.partition("{")
        names, _, tail = rest.partition("}")
        files |= {f"{head}{name}{tail}" for name in names.split(",")}
    return files


def commands(text: str) -> list[list[str]]:
    """The arguments of every line that calls flashdraft."""
    lines = re.findall(r"^\s*(?:\S*/)?flashdraft (.*)$", text, re.MULTILINE)
    return [shlex.split(re.split(r" [|<>] ", line)[0], comments=True) for line in lines]


def test_python_blocks_parse() -> None:
    assert blocks(README, "python")
    for block in blocks(README, "python"):
        ast.parse(block)


@pytest.mark.weights
def test_python_blocks_run(capsys: pytest.CaptureFixture[str]) -> None:
    namespace: dict[str, object] = {}
    for block in blocks(README, "python"):
        exec(block, namespace)
    assert capsys.readouterr().out.strip()


def test_commands_exist() -> None:
    from flashdraft.cli import build_parser

    parser = build_parser()
    text = README + COMMANDS
    found = [argv for block in blocks(text, "sh") for argv in commands(block)]
    assert {argv[0] for argv in found} == {
        "generate",
        "run",
        "serve",
        "connect",
        "models",
        "pull",
        "list",
        "rm",
        "bench",
        "plan",
        "doctor",
        "train",
        "synth",
        "export",
        "completion",
    }
    for argv in found + commands(MAKEFILE.replace("$(BIN)/", "")):
        parser.parse_args(argv)  # exits, and so fails, on what the command does not know


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^(\w+):", MAKEFILE, re.MULTILINE))
    text = README + (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert set(re.findall(r"(?:`|^)make (\w+)", text, re.MULTILINE)) <= targets


def test_architecture_has_a_line_for_every_folder_and_the_package_s_own_modules() -> None:
    package = ROOT / "flashdraft"
    folders = {
        f"{path.parent.relative_to(ROOT).as_posix()}/"
        for path in package.rglob("*.py")
        if path.parent != package
    }
    modules = {
        path.relative_to(ROOT).as_posix()
        for path in package.glob("*.py")
        if not path.name.startswith("__")
    }
    mapped = mapped_files(ARCHITECTURE)
    assert folders | modules <= mapped
    assert [name for name in mapped if not (ROOT / name).exists()] == []
