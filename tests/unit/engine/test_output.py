"""From tokens to visible text: stop strings wherever they fall, and nothing shown too early."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from flashdraft.engine.output import TextOutput
from flashdraft.errors import RequestError


class Words:
    """A decoder whose token i is pieces[i]; a number is the id of a special token."""

    def __init__(self, pieces: Sequence[str | int], held: str = "") -> None:
        self._pieces = pieces
        self._held = held

    def push_pieces(self, ids: Sequence[int]) -> list[str | int]:
        return [self._pieces[i] for i in ids]

    def flush_pieces(self) -> list[str | int]:
        return [self._held]


class Bytes:
    """A decoder whose tokens are UTF-8 bytes; it holds back incomplete characters."""

    def __init__(self) -> None:
        self._held = b""

    def push_pieces(self, ids: Sequence[int]) -> list[str | int]:
        self._held += bytes(ids)
        for end in range(len(self._held), -1, -1):
            try:
                text = self._held[:end].decode()
            except UnicodeDecodeError:
                continue
            self._held = self._held[end:]
            return [text]
        raise AssertionError

    def flush_pieces(self) -> list[str | int]:
        return [self._held.decode(errors="replace")]


def stream(pieces: Sequence[str], stops: Sequence[str], held: str = "") -> tuple[list[str], str]:
    """What is shown after every token and at the end, and the whole text."""
    output = TextOutput(Words(pieces, held), stops)
    shown = []
    for token in range(len(pieces)):
        ended = output.push(token)
        shown.append(output.take().text)
        if ended:
            break
    output.finish()
    shown.append(output.take().text)
    assert "".join(shown) == output.text
    return shown, output.text


def test_without_stops_everything_is_shown_at_once() -> None:
    assert stream(["Hel", "lo", "", "!"], []) == (["Hel", "lo", "", "!", ""], "Hello!")


def test_a_stop_inside_one_token_ends_the_text_before_it() -> None:
    assert stream(["one", " two END three", " four"], ["END"]) == (["one", " two ", ""], "one two ")


def test_a_stop_across_tokens_is_never_shown() -> None:
    assert stream(["ab", "cE", "N", "D", "more"], ["END"]) == (["ab", "c", "", "", ""], "abc")


def test_the_beginning_of_a_stop_is_released_when_it_goes_on_otherwise() -> None:
    shown, text = stream(["a", "E", "N", "x", "EN"], ["END"])
    assert shown == ["a", "", "", "ENx", "", "EN"]
    assert text == "aENxEN", "at the end, what was held back is text after all"


def test_a_stop_that_begins_inside_a_false_beginning() -> None:
    shown, text = stream(["a", "a", "a", "b", "x"], ["aab"])
    assert (shown, text) == (["", "", "a", "", ""], "a")


@pytest.mark.parametrize(
    ("pieces", "stops", "text"),
    [
        (["x", "abc"], ["abc", "b"], "x"),  # both in one token: the one that begins first
        (["xa", "b", "c"], ["abc", "b"], "xa"),  # token by token: the one complete first
        (["xab", "c"], ["abcd", "bc"], "xa"),
        (["xabc", "d"], ["abcde", "cd"], "xab"),
        (["END"], ["END"], ""),
        (["\n", "\n", "Q:"], ["\n\nQ:", "\nA:"], ""),
        (["aEN", "DEND"], ["END"], "a"),
    ],
)
def test_overlapping_stops(pieces: list[str], stops: list[str], text: str) -> None:
    assert stream(pieces, stops)[1] == text


def test_push_says_when_the_text_has_ended_and_takes_no_more() -> None:
    output = TextOutput(Words(["a", "ST", "OP", "b"]), ["STOP"])
    assert [output.push(i) for i in range(4)] == [False, False, True, True]
    output.finish()
    assert output.text == output.take().text == "a"
    assert output.take() == ("", ())


def test_flush_at_the_end_and_a_stop_within_it() -> None:
    assert stream(["ab"], [], held="\ufffd") == (["ab", "\ufffd"], "ab\ufffd")
    assert stream(["abS"], ["ST"], held="Txy")[1] == "ab"
    output = TextOutput(Words(["abSTx"], held="lost"), ["ST"])
    assert output.push(0)
    output.finish()
    assert output.text == "ab", "what the decoder holds lies behind the stop"


def test_characters_of_many_bytes() -> None:
    text = "naïve 日本語 👩‍🚀 — fin"
    output = TextOutput(Bytes(), ["👩"])
    shown = []
    for byte in text.encode():
        if output.push(byte):
            break
        shown.append(output.take().text)
    output.finish()
    assert "".join(shown) == output.text == "naïve 日本語 "
    assert output.take().text == ""
    cut = TextOutput(Bytes(), [])
    for byte in "é".encode()[:1]:
        assert not cut.push(byte)
    assert cut.take().text == ""
    cut.finish()
    assert cut.take().text == "\ufffd"


def test_without_a_decoder_there_are_token_ids_only() -> None:
    output = TextOutput(None, [])
    assert not output.push(5)
    output.finish()
    assert (output.text, output.take()) == ("", ("", ()))
    with pytest.raises(RequestError, match=r"stop is \['x'\].* stop_token_ids"):
        TextOutput(None, ["x"])


def test_random_streams_show_exactly_the_text_before_the_first_stop() -> None:
    num_stopped = 0
    for seed in range(2000):
        rng = random.Random(seed)
        pieces = ["".join(rng.choices("abc", k=rng.randint(0, 3))) for _ in range(8)]
        stops = ["".join(rng.choices("abc", k=rng.randint(2, 6))) for _ in range(rng.randint(0, 3))]
        shown, text = stream(pieces, stops)
        expected, ended = "", False
        for piece in pieces:
            expected += piece
            places = [expected.find(stop) for stop in stops if stop in expected]
            if places:
                expected, ended = expected[: min(places)], True
                break
        assert text == expected
        for count in range(len(shown)):  # what is shown is never taken back, nor held for nothing
            visible, so_far = "".join(shown[: count + 1]), "".join(pieces[: count + 1])
            assert expected.startswith(visible)
            if count < len(pieces) and not (ended and count >= len(shown) - 2):
                held = so_far[len(visible) :]
                assert held == "" or any(stop.startswith(held) for stop in stops)
        num_stopped += ended
    assert 200 < num_stopped < 1800


def test_a_stop_string_that_may_not_stop_yet_is_text() -> None:
    output = TextOutput(Words(["a", "END", "b", "EN", "D", "c"]), ["END"])
    assert not output.push(0, may_stop=False)
    assert not output.push(1, may_stop=False)
    assert not output.push(2)
    assert not output.push(3)
    assert output.push(4)
    assert output.text == "aENDb"
