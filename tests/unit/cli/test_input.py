"""Prompts that are typed, piped in, or both; and what is no prompt."""

from __future__ import annotations

import io
import os
import subprocess
import sys

import pytest

from flashdraft.cli.input import MAX_BYTES, read_prompt, require_prompt
from flashdraft.errors import RequestError


def pipe(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))


@pytest.mark.parametrize(
    ("typed", "piped", "raw", "prompt"),
    [
        (None, b"hello\n", False, "hello"),
        ("-", b"hello\n\n", False, "hello"),
        ("hi", b"", False, "hi"),
        ("hi", b" \n", False, "hi"),
        ("Summarise:", b"notes\nof tea\n", False, "notes\nof tea\n\nSummarise:"),
        (None, b"hello\n", True, "hello\n"),
        ("and so", b"hello\n", True, "hello\nand so"),
        (None, "\ufeffgrüße".encode(), False, "grüße"),
    ],
)
def test_what_is_piped_in_goes_before_what_is_typed(
    monkeypatch: pytest.MonkeyPatch, typed: str | None, piped: bytes, raw: bool, prompt: str
) -> None:
    pipe(monkeypatch, piped)
    assert read_prompt(typed, as_it_is=raw) == prompt


@pytest.mark.parametrize(
    ("typed", "piped", "said"),
    [
        (None, b"", "The prompt is empty"),
        ("  ", b"", "The prompt is empty"),
        ("-", b"\n", "The prompt is empty"),
        ("x", b"ab\xff", "not UTF-8 text: byte 3 is 0xff"),
        (None, b"\x7fELF\0\0", "zero bytes"),
        ("x", "text".encode("utf-16"), "not UTF-8"),
        ("x", b"y" * (MAX_BYTES + 1), "More than 8,388,608 bytes"),
        ("caf\udce9", b"", "not UTF-8 text; check the terminal"),
    ],
)
def test_what_is_no_prompt_is_refused_in_words(
    monkeypatch: pytest.MonkeyPatch, typed: str | None, piped: bytes, said: str
) -> None:
    pipe(monkeypatch, piped)
    with pytest.raises(RequestError, match=said):
        read_prompt(typed)


class Unreadable(io.StringIO):
    def read(self, *_: object) -> str:
        raise OSError(9, "Bad file descriptor")


def test_a_stdin_that_cannot_be_read_matters_only_where_it_is_the_prompt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for stdin in (Unreadable(), None):
        monkeypatch.setattr("sys.stdin", stdin)
        assert read_prompt("hi") == "hi"
        with pytest.raises(RequestError):
            read_prompt(None)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_is_asked_for_nothing_unless_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", Terminal("typed here\n"))
    assert read_prompt("hi") == "hi"
    with pytest.raises(RequestError, match="There is no prompt"):
        require_prompt(None, "flashdraft generate")
    require_prompt("-", "flashdraft generate")
    assert read_prompt("-") == "typed here"


def test_waiting_for_a_pipe_is_said() -> None:
    """A program that leaves stdin open and writes nothing is told what is waited for."""
    reader, writer = os.pipe()
    code = "from flashdraft.cli.input import read_prompt; print(read_prompt('hi'))"
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=reader,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        os.close(reader)
        assert process.stderr and process.stdout
        assert "Waiting for what is piped in" in process.stderr.readline()
        os.write(writer, b"notes")
        os.close(writer)
        assert process.stdout.read() == "notes\n\nhi\n"
