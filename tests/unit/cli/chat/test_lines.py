"""What is typed over several lines, what a pipe may hold, and what is remembered."""

from __future__ import annotations

import io
import stat
from pathlib import Path

import pytest

from flashdraft.cli.chat.lines import MAX_LINE_BYTES, LineJoiner, Typed, line_editing, piped_lines
from flashdraft.errors import RequestError


@pytest.mark.parametrize(
    ("lines", "typed"),
    [
        (["hello"], Typed("hello")),
        (['"""one"""'], Typed("one", True)),
        (['"""', "one", "  two", '"""'], Typed("one\n  two", True)),
        (['"""one', 'two"""  '], Typed("one\ntwo", True)),
        (['"""/exit"""'], Typed("/exit", True)),
        (['/system """', "be", 'brief"""'], Typed("/system be\nbrief")),
        (["one \\", "two"], Typed("one \ntwo")),
        (["one \\", "two \\", ""], Typed("one \ntwo")),
        (["C:\\\\"], Typed("C:\\\\")),  # two of them are one that means itself
        (['say """hi"""'], Typed('say """hi"""')),
        (['""""""'], Typed("", True)),
    ],
)
def test_lines_are_put_together(lines: list[str], typed: Typed) -> None:
    joiner = LineJoiner()
    for line in lines[:-1]:
        assert joiner.push(line) is None and joiner.is_waiting
    assert joiner.push(lines[-1]) == typed
    assert not joiner.is_waiting and joiner.end() is None


def test_what_was_begun_can_be_dropped_or_taken_as_it_is() -> None:
    joiner = LineJoiner()
    joiner.push('"""one')
    joiner.drop()
    assert joiner.push("two") == Typed("two")
    joiner.push('"""one')
    joiner.push("two")
    assert joiner.end() == Typed("one\ntwo", True)


def pipe(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))


def test_a_pipes_lines_are_text(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe(monkeypatch, "\ufeffgrüße\r\nzwei\n\ndrei".encode())
    assert list(piped_lines()) == ["grüße", "zwei", "", "drei"]


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"fine\n\xff\xfe\n", "Line 2 on stdin is not UTF-8 text: byte 1 is 0xff"),
        (b"a\0b\n", "Line 1 on stdin holds zero bytes"),
        (b"x" * (MAX_LINE_BYTES + 1), "Line 1 on stdin has more than"),
    ],
)
def test_what_is_no_question_is_refused(
    monkeypatch: pytest.MonkeyPatch, data: bytes, said: str
) -> None:
    pipe(monkeypatch, data)
    with pytest.raises(RequestError, match=said):
        list(piped_lines())


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_what_is_typed_is_remembered_for_its_owner_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    readline = pytest.importorskip("readline")
    monkeypatch.setenv("FLASHDRAFT_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("sys.stdin", Terminal())
    monkeypatch.setattr("sys.stdout", Terminal())
    for word in ("first", "second"):
        with line_editing():
            readline.add_history(word)
    path = tmp_path / "home" / "chat_history"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with line_editing():
        found = [readline.get_history_item(n + 1) for n in range(2)]
    assert found == ["first", "second"]


def test_off_a_terminal_nothing_is_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHDRAFT_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("sys.stdin", io.StringIO())
    with line_editing():
        pass
    assert not (tmp_path / "home").exists()


def test_a_home_that_cannot_be_written_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    readline = pytest.importorskip("readline")
    (tmp_path / "home").write_text("a file")
    monkeypatch.setenv("FLASHDRAFT_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("sys.stdin", Terminal())
    monkeypatch.setattr("sys.stdout", Terminal())
    with line_editing():
        readline.add_history("word")
    assert "no history" in capsys.readouterr().err
