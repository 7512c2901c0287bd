"""Answers on disk: code without its fence, and whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from flashdraft.cli.files import fenced_block, text_for_file, write_text
from flashdraft.errors import RequestError

PAGE = "<!DOCTYPE html>\n<p>tea</p>"


@pytest.mark.parametrize(
    ("answer", "block"),
    [
        (f"```html\n{PAGE}\n```", PAGE),
        (f"\n\n```\n{PAGE}\n```  \n", PAGE),
        (f"~~~~html\n{PAGE}\n~~~~", PAGE),
        (f"````md\n```\n{PAGE}\n```\n````", f"```\n{PAGE}\n```"),
        (f"```html\n{PAGE}", PAGE),  # cut short by max_tokens
        ("```python\n```", ""),
        (f"Here it is:\n```html\n{PAGE}\n```", None),
        (f"```html\n{PAGE}\n```\nEnjoy!", None),
        ("```a\n1\n```\n\n```b\n2\n```", None),
        ("`code`", None),
        ("", None),
    ],
)
def test_fenced_block(answer: str, block: str | None) -> None:
    assert fenced_block(answer) == block


@pytest.mark.parametrize("name", ["index.html", "a.py", "a.js", "a.css", "a.json", "A.HTML"])
def test_code_files_hold_the_block_alone(name: str) -> None:
    assert text_for_file(f"```\n{PAGE}\n```", Path(name)) == PAGE + "\n"


@pytest.mark.parametrize("name", ["answer", "answer.txt", "answer.md"])
def test_prose_files_hold_the_answer_as_it_is(name: str) -> None:
    assert text_for_file(f"```\n{PAGE}\n```", Path(name)) == f"```\n{PAGE}\n```\n"


def test_writing_replaces_the_file_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")
    write_text(path, "nöw\n")
    assert path.read_bytes() == "nöw\n".encode()
    assert os.listdir(tmp_path) == ["a.txt"]


def test_writing_goes_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "link.txt").symlink_to(tmp_path / "real.txt")
    write_text(tmp_path / "link.txt", "x")
    assert (tmp_path / "real.txt").read_text() == "x" and (tmp_path / "link.txt").is_symlink()


def test_a_failed_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(RequestError, match="No space left"):
        write_text(path, "new")
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["a.txt"]


def test_wrong_paths_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="is a folder"):
        write_text(tmp_path, "x")
    with pytest.raises(RequestError, match="no folder"):
        write_text(tmp_path / "none" / "a.txt", "x")


def test_a_device_takes_what_it_is_given() -> None:
    write_text(Path(os.devnull), "x")
    assert not Path(os.devnull).is_file()
