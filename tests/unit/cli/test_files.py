"""Answers on disk: code without its fence, and whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from flashdraft.cli.files import part_for_file, write_text
from flashdraft.errors import RequestError

PAGE = "<!DOCTYPE html>\n<p>tea</p>"


@pytest.mark.parametrize(
    ("answer", "block"),
    [
        (f"```html\n{PAGE}\n```", PAGE),
        (f"\n\n```\n{PAGE}\n```  \n", PAGE),
        (f"~~~~html\n{PAGE}\n~~~~", PAGE),
        (f"````js\n```\n{PAGE}\n```\n````", f"```\n{PAGE}\n```"),  # nothing but one block
        (f"```html\n{PAGE}", PAGE),  # cut short by max_tokens
        (f"```js\n{PAGE}", PAGE),
        ("```python\n```", ""),
        (f"Here it is:\n```html\n{PAGE}\n```", PAGE),
        (f"```HTML\n{PAGE}\n```\nEnjoy!", PAGE),
        (f"Here it is:\n\n```\n{PAGE}\n```\nEnjoy!", PAGE),  # it names no language
        (f"First:\n```css\np {{}}\n```\nThen:\n```html\n{PAGE}\n```", PAGE),
        (f'```{{.html title="x"}}\n{PAGE}\n```\nso', PAGE),
        (f"1. Do it:\n\n   ```html\n   {PAGE[:15]}\n   <p>tea</p>\n   ```", PAGE),
        ("```a\n1\n```\n\n```b\n2\n```", None),
        ("```\n1\n```\n\n```\n2\n```", None),
        ("Run it:\n```sh\nls\n```\nDone.", None),
        ("`code`", None),
        ("", None),
    ],
)
def test_a_file_of_code_holds_the_block_of_its_language(answer: str, block: str | None) -> None:
    part = part_for_file(answer, Path("index.html"))
    whole = answer + "\n" * bool(answer and not answer.endswith("\n"))
    assert part.text == (whole if block is None else block + "\n" * bool(block))
    assert part.says.startswith("the whole answer" if block is None else "the code block")


@pytest.mark.parametrize(
    ("name", "language"),
    [
        ("index.html", "html"),
        ("a.py", "python"),
        ("a.py", "py"),
        ("a.js", "javascript"),
        ("a.css", "css"),
        ("a.json", "json"),
        ("a.svg", "svg"),
        ("a.svg", "xml"),
        ("a.md", "markdown"),
        ("a.yml", "yaml"),
        ("a.sh", "bash"),
        ("a.rs", "rust"),
        ("a.zig", "zig"),
        ("A.HTML", "html"),
    ],
)
def test_languages_go_by_several_names(name: str, language: str) -> None:
    answer = f"One way:\n```text\nno\n```\n```{language}\nyes\n```\nand so on."
    assert part_for_file(answer, Path(name)).text == "yes\n"


def test_the_first_of_several_blocks_is_taken_and_that_is_said() -> None:
    part = part_for_file("```py\n1\n2\n```\nor\n```python\n3\n```", Path("a.py"))
    assert part == ("1\n2\n", "the first of 2 code blocks of the answer, 2 lines")
    assert "no code block is rs" in part_for_file("```py\n1\n```\nx", Path("a.rs")).says


def test_markdown_in_a_block_keeps_its_own_blocks() -> None:
    inner = "# Tea\n```sh\nboil\n```\nServe."
    answer = f"Here:\n```markdown\n{inner}\n```\nEnjoy!"
    assert part_for_file(answer, Path("a.md")).text == inner + "\n"


@pytest.mark.parametrize("name", ["answer", "answer.txt", "answer.md"])
def test_prose_files_hold_the_answer_as_it_is(name: str) -> None:
    for answer in (f"```\n{PAGE}\n```", f"```html\n{PAGE}\n```", f"So:\n```py\n{PAGE}\n```"):
        assert part_for_file(answer, Path(name)) == (answer + "\n", "the whole answer")


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
