"""What a terminal gets to see: tokens in colour, a live line, no control codes of the answer."""

from __future__ import annotations

import io
import random
import re

import pytest

from flashdraft.cli.display import AnswerView, DraftColours, LiveLine, Screen
from flashdraft.cli.statistics import Progress, Totals, describe_briefly, describe_fully
from flashdraft.core import FinishReason, Generation, GenerationStats, TokenEvent
from flashdraft.models.tokenizer import Tokenizer
from tests.tiny import END_OF_TURN, make_tiny_tokenizer

TEXT = "Grüße, 世界 🦊! the fox thinks"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(make_tiny_tokenizer())


def event(
    ids: list[int], text: str, drafted: list[bool] | None = None, last: bool = False
) -> TokenEvent:
    generation = Generation("", ids, FinishReason.STOP, GenerationStats()) if last else None
    flags = tuple(drafted or [False] * len(ids))
    return TokenEvent("1", tuple(ids), text, flags, generation=generation)


def terminal(colours: bool = False, err_too: bool = True) -> Screen:
    return Screen(io.StringIO(), io.StringIO(), True, err_too, colours)


def shown(stream: object) -> str:
    assert isinstance(stream, io.StringIO)
    return stream.getvalue()


def test_every_character_has_the_colour_of_its_last_token(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("aé") + tokenizer.encode("b")  # é is two tokens
    assert len(ids) == 4
    colours = DraftColours(tokenizer)
    assert colours.split(event(ids[:2], "a", [False, False])) == [("a", False)]
    assert colours.split(event(ids[2:], "éb", [True, False])) == [("é", True), ("b", False)]


def test_pieces_join_to_the_events_text_however_it_is_cut(tokenizer: Tokenizer) -> None:
    chance = random.Random(0)
    ids = tokenizer.encode(TEXT)
    for _ in range(20):
        colours = DraftColours(tokenizer)
        whole, done = "", 0
        while done < len(ids):
            count = chance.randint(1, 6)
            part = ids[done : done + count]
            done += len(part)
            full = tokenizer.decode(ids[:done]).rstrip("\ufffd") if done < len(ids) else TEXT
            text = full[len(whole) :]
            flags = [chance.random() < 0.5 for _ in part]
            pieces = colours.split(event(part, text, flags, last=done == len(ids)))
            assert "".join(piece for piece, _ in pieces) == text
            whole += text
        assert whole == TEXT


def test_a_stop_string_and_a_stop_token_are_not_shown(tokenizer: Tokenizer) -> None:
    ids = [*tokenizer.encode("ab STOP"), END_OF_TURN]
    pieces = DraftColours(tokenizer).split(event(ids, "ab ", [True] * len(ids), last=True))
    assert pieces == [("ab ", True)]


def test_bytes_that_never_become_a_character_are_shown_at_the_end(tokenizer: Tokenizer) -> None:
    half = tokenizer.encode("é")[:1]
    colours = DraftColours(tokenizer)
    assert colours.split(event(half, "", [True])) == []
    assert colours.split(event([END_OF_TURN], "\ufffd", last=True)) == [("\ufffd", False)]


def test_coloured_view_shows_the_same_text(tokenizer: Tokenizer) -> None:
    screen = terminal(colours=True)
    view = AnswerView(screen, colours=DraftColours(tokenizer))
    ids = tokenizer.encode("abc")
    view.show(event(ids[:1], "a", [False]))
    view.show(event(ids[1:], "bc", [True, False]))
    view.close()
    assert shown(screen.out) == "\x1b[33ma\x1b[0m\x1b[36mb\x1b[0m\x1b[33mc\x1b[0m\n"


def test_control_characters_are_pictures_on_a_terminal_only() -> None:
    for screen, text in (
        (terminal(), "\u241b]0;title\u2407\ufffd\tx\n"),
        (Screen(io.StringIO(), io.StringIO()), "\x1b]0;title\x07\x9b\tx\n"),
    ):
        AnswerView(screen).show(event([1], "\x1b]0;title\x07\x9b\tx\n"))
        assert shown(screen.out) == text


def test_nothing_but_the_answer_off_a_terminal() -> None:
    screen = Screen(io.StringIO(), io.StringIO())
    view = AnswerView(screen)
    for part in ("one ", "two"):
        view.show(event([1], part))
    view.close()
    assert shown(screen.out) == "one two\n" and shown(screen.err) == ""


def test_the_live_line_is_drawn_and_taken_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashdraft.cli.display.REFRESH_S", 0.0)
    screen = terminal()
    view = AnswerView(screen)
    view.show(event([1], "one "))
    view.show(event([2, 3], "two"))
    view.close()
    written = shown(screen.err)
    assert "1 token" in written and "3 tokens · " in written and "accepted length 2.00" in written
    assert written.endswith("\x1b[J") and written.count("\x1b7") == written.count("\x1b8") == 2


def test_the_live_line_has_a_line_of_its_own_where_the_answer_is_elsewhere() -> None:
    screen = Screen(io.StringIO(), io.StringIO(), out_is_terminal=False, err_is_terminal=True)
    view = AnswerView(screen, echo=False)
    view.show(event([1], "one"))
    view.close()
    assert re.fullmatch(r"\r\x1b\[K1 token\r\x1b\[K", shown(screen.err))
    assert shown(screen.out) == ""


def test_no_live_line_right_after_the_last_column(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashdraft.cli.display.REFRESH_S", 0.0)
    monkeypatch.setenv("COLUMNS", "20")
    screen = terminal()
    line = LiveLine(screen, below_answer=True)
    line.wrote("世" * 10)  # 20 columns
    line.show("status")
    assert shown(screen.err) == ""
    line.wrote("x")
    line.show("status " * 10)
    assert "status status statu\x1b[0m" in shown(screen.err)


def test_colours_are_off_without_a_terminal_or_with_no_color(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert not Screen.detect().has_colours
    monkeypatch.setattr("sys.stdout", Terminal())
    assert Screen.detect().has_colours
    monkeypatch.setenv("NO_COLOR", "1")
    assert not Screen.detect().has_colours and Screen.detect().out_is_terminal
    monkeypatch.setenv("TERM", "dumb")
    assert not Screen.detect().out_is_terminal


def test_progress_counts_the_prefills_token_apart() -> None:
    progress = Progress()
    progress.add(event([1], "a"))
    assert progress.stats.steps == 0 and describe_briefly(1, progress.stats) == "1 token"
    progress.add(event([2, 3, 4], "bcd", [True, True, False]))
    progress.add(event([5], "e"))
    progress.add(event([], "", last=True))
    stats = progress.stats
    assert (progress.num_tokens, stats.steps, stats.decode_tokens, stats.accepted) == (5, 2, 4, 2)
    assert stats.histogram == {1: 1, 3: 1} and stats.mean_accepted_length == 2.0


def test_full_statistics_name_every_figure() -> None:
    stats = GenerationStats(
        prompt_tokens=9, steps=4, drafted=12, accepted=6, decode_tokens=10, ttft_s=0.25, decode_s=2
    )
    text = describe_fully(11, stats)
    for part in (
        "11 tokens",
        "5.0 tok/s",
        "time to first token 0.250 s",
        "4 steps",
        "12 drafted",
        "6 accepted",
        "mean accepted length 2.50",
    ):
        assert part in text


def test_branches_are_named_where_there_were_some() -> None:
    stats = GenerationStats(steps=4, drafted=60, accepted=9, branches=40, branches_accepted=3)
    assert "9 accepted, 3 of them off the chain ·" in describe_fully(11, stats)
    assert "chain" not in describe_fully(11, GenerationStats(steps=4, drafted=60, accepted=9))


def test_totals_pool_the_answers() -> None:
    totals = Totals()
    totals.add(5, GenerationStats(steps=2, decode_tokens=4, decode_s=1.0, histogram={2: 2}), False)
    totals.add(7, GenerationStats(steps=1, decode_tokens=6, decode_s=1.0, histogram={6: 1}), True)
    assert totals.describe() == (
        "2 answers (1 interrupted) · 12 tokens · 5.0 tok/s · accepted length 3.33"
    )
    assert totals.stats.histogram == {2: 2, 6: 1}
