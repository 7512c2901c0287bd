"""Completion: bash really completes, and every shell's script has what the parser has."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from flashdraft.cli import COMMANDS, OTHER_NAMES, build_parser, main
from flashdraft.cli.completion import SHELLS, describe_commands
from flashdraft.models.sources import DEFAULT_MODEL, known_models

COMPLETE = """
source "$1"; shift
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
_flashdraft
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("completion")
    described = describe_commands(build_parser())
    for shell, script in SHELLS.items():
        (folder / shell).write_text(script(described))
    (folder / "work").mkdir()
    for name in ("notes one.txt", "notes.md"):
        (folder / "work" / name).touch()
    return {shell: folder / shell for shell in SHELLS}


def complete(script: Path, *words: str) -> list[str]:
    done = subprocess.run(
        ["bash", "--norc", "-c", COMPLETE, "bash", str(script), "flashdraft", *words],
        cwd=script.parent / "work",
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    return [line for line in done.stdout.splitlines() if line]


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["ch"], ["chat"]),
        (["chat", "--dev"], ["--device"]),
        (["chat", "--device", ""], ["auto", "cpu", "cuda"]),
        (["run", "--device", "c"], ["cpu", "cuda"]),
        (["chat", "--device", "="], ["auto", "cpu", "cuda"]),
        (["chat", "--device", "=", "cu"], ["cuda"]),
        (["serve", "--log-format", ""], ["auto", "text", "json"]),
        (["serve", "--engine", "v"], ["vllm"]),
        (["run", "smol"], [DEFAULT_MODEL]),
        (["chat", "notes"], ["notes one.txt", "notes.md"]),
        (["chat", '"notes o'], ["notes one.txt"]),
        (["chat", "'notes o"], ["notes one.txt"]),
        (["chat", "notes\\ o"], ["notes one.txt"]),
        (["chat", '"smol'], [DEFAULT_MODEL]),
        (["chat", "--model", "=", '"notes o'], ["notes one.txt"]),
        (["generate", "x", "-o", "notes."], ["notes.md"]),
        (["generate", "x", "--output", "notes."], ["notes.md"]),
        (["generate", "--draft", "n"], ["none", "ngram", "notes one.txt", "notes.md"]),
        (["plan", "--gpu", "h2"], ["h200"]),
        (["serve", "--max-queue", ""], []),
        (["serve", "--max-pictures", ""], []),
        (["bench", "com"], ["compare"]),
        (["completion", ""], ["bash", "zsh", "fish"]),
        (["models", ""], ["-h", "--help", "--json"]),
        (["$(touch hacked)"], []),
        (["chat", "--model", "`touch hacked`"], []),
    ],
)
def test_bash_completes(scripts: dict[str, Path], words: list[str], found: list[str]) -> None:
    assert sorted(complete(scripts["bash"], *words)) == sorted(found)
    assert not (scripts["bash"].parent / "work" / "hacked").exists()


def test_bash_knows_every_command_and_every_flag(scripts: dict[str, Path]) -> None:
    names = [*COMMANDS, *(name for others in OTHER_NAMES.values() for name in others)]
    assert sorted(complete(scripts["bash"], "")) == sorted(names)
    for command in describe_commands(build_parser()):
        options = [name for flag in command.flags for name in flag.names]
        for name in command.names:
            assert sorted(complete(scripts["bash"], name, "-")) == sorted(options)


@pytest.mark.parametrize("shell", SHELLS)
def test_a_script_has_what_the_parser_has(scripts: dict[str, Path], shell: str) -> None:
    script = scripts[shell].read_text()
    for command in describe_commands(build_parser()):
        assert all(name in script for name in command.names)
        for flag in command.flags:
            for name in flag.names:
                assert (f"-l {name[2:]}" if shell == "fish" and name[1] == "-" else name) in script
            assert all(word in script for word in (flag.values or command.rest).words)
    assert all(model.name in script for model in known_models())
    assert "\x1b" not in script


@pytest.mark.parametrize("shell", SHELLS)
def test_the_shell_can_read_its_script(scripts: dict[str, Path], shell: str) -> None:
    found = shutil.which(shell)
    if found is None:  # bash is everywhere; the others are read where they are installed
        assert shell != "bash"
        return
    done = subprocess.run([found, "-n", scripts[shell]], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_command_prints_a_script(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "fish"]) == 0
    assert capsys.readouterr().out.startswith("# fish completion for flashdraft")
