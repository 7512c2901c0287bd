"""The line that is redrawn in place: it fits, and leaves nothing behind."""

from __future__ import annotations

import io

import pytest

from flashdraft.models.files import meter
from flashdraft.status_line import StatusLine, bar, cell_width, fitted


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def width(text: str) -> int:
    return sum(map(cell_width, text))


@pytest.mark.parametrize("columns", [1, 5, 20, 49, 79, 200])
@pytest.mark.parametrize("head", ["Loading smollm2-135m ", "Loading " + "世" * 40, ""])
def test_a_line_never_wraps(head: str, columns: int) -> None:
    tail = f"{bar(0.45)}, 12 s left"
    text = fitted(head, tail, columns)
    assert width(text) <= columns
    if columns > width(tail) + 1:
        assert text.endswith(tail)


def test_a_bar_is_drawn_and_counted() -> None:
    assert [bar(share) for share in (-1, 0, 0.45, 1, 2)] == [
        "[----------] 0%",
        "[----------] 0%",
        "[####------] 45%",
        "[##########] 100%",
        "[##########] 100%",
    ]


def test_it_is_drawn_and_taken_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setattr("sys.stderr", stderr := Terminal())
    line = StatusLine()
    line.clear()
    with line.during("Loading something …"):
        line.show("Loading a model ", "[#-] 50%")
    line.clear()
    shown = ["Loading something …", "Loading a …[#-] 50%", ""]
    assert stderr.getvalue() == "".join(f"\r\x1b[K{text}" for text in shown)


@pytest.mark.parametrize("term", ["dumb", None])
def test_nothing_is_drawn_off_a_terminal(monkeypatch: pytest.MonkeyPatch, term: str | None) -> None:
    monkeypatch.setenv("TERM", term or "xterm")
    stderr = Terminal() if term else io.StringIO()
    monkeypatch.setattr("sys.stderr", stderr)
    with StatusLine().during("Loading …"):
        pass
    assert stderr.getvalue() == ""


def test_a_message_takes_the_line_away_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "50")
    monkeypatch.setattr("sys.stderr", stderr := Terminal())
    reading = meter.ReadMeter("tiny", 4)
    reading.add(2)
    meter.say("Fetched it.")
    reading.close()
    assert stderr.getvalue() == "\r\x1b[KLoading tiny [#####-----] 50%\r\x1b[KFetched it.\n"
