"""From committed tokens to visible text: incremental decoding and stop strings. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from flashdraft.errors import RequestError


class TextDecoder(Protocol):
    """Turns tokens into text, and ids of special tokens, as they come.

    Incomplete characters are held back, and special tokens behind them.
    """

    def push_pieces(self, ids: Sequence[int]) -> Sequence[str | int]: ...

    def flush_pieces(self) -> Sequence[str | int]: ...


class Shown(NamedTuple):
    """What may be shown now: a text, and the same text with special tokens in their places."""

    text: str
    pieces: tuple[str | int, ...]


class TextOutput:
    """The text of one answer: ends before a stop string, never shows the start of one too early."""

    def __init__(self, decoder: TextDecoder | None, stops: Sequence[str]) -> None:
        if decoder is None and stops:
            raise RequestError(
                f"stop is {list(stops)!r}, but without a tokenizer there is no text to find it in; "
                "use stop_token_ids."
            )
        self._decoder = decoder
        self._stops = tuple(stops)
        self._text = ""
        self._special: list[tuple[int, int]] = []  # (where in the text, id), not yet shown
        self._num_shown = 0
        self._ended = False
        self.ends: list[int] = []  # per token: how long the text was with it

    @property
    def text(self) -> str:
        return self._text

    def push(self, token: int, may_stop: bool = True) -> bool:
        """Take one token; True if it completes a stop string, which ends the text before it."""
        if self._decoder is not None and not self._ended:
            self._append(self._decoder.push_pieces((token,)), may_stop)
        self.ends.append(len(self._text))
        return self._ended

    def finish(self) -> None:
        """No more tokens: whatever was held back is text after all."""
        if self._decoder is not None and not self._ended:
            self._append(self._decoder.flush_pieces())
        self._ended = True

    def take(self) -> Shown:
        """What may be shown and was not yet."""
        end = len(self._text) if self._ended else len(self._text) - self._num_held()
        begin, end = self._num_shown, max(self._num_shown, end)
        pieces: list[str | int] = []
        due = [mark for mark in self._special if mark[0] <= end]
        del self._special[: len(due)]
        place = begin
        for where, index in due:
            pieces += [self._text[place:where], index]
            place = where
        pieces.append(self._text[place:end])
        self._num_shown = end
        return Shown(self._text[begin:end], tuple(piece for piece in pieces if piece != ""))

    def _append(self, pieces: Sequence[str | int], may_stop: bool = True) -> None:
        before = len(self._text)
        for piece in pieces:
            if isinstance(piece, str):
                self._text += piece
            else:
                self._special.append((len(self._text), piece))
        if not may_stop or len(self._text) == before:
            return
        longest = max((len(stop) for stop in self._stops), default=0)
        begin = max(0, before - longest + 1)  # a stop string may straddle the seam
        places = [self._text.find(stop, begin) for stop in self._stops]
        first = min((place for place in places if place >= 0), default=-1)
        if first >= 0:
            self._text = self._text[:first]
            self._special = [mark for mark in self._special if mark[0] <= first]
            self._ended = True

    def _num_held(self) -> int:
        """How much of the text's end could be the beginning of a stop string."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for size in range(min(longest, len(self._text)), 0, -1):
            tail = self._text[-size:]
            if any(stop.startswith(tail) for stop in self._stops):
                return size
        return 0
