"""From committed tokens to visible text: incremental decoding and stop strings. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from flashdraft.errors import RequestError


class StreamDecoder(Protocol):
    """Turns tokens into text as they come; holds back incomplete characters."""

    def push(self, ids: Sequence[int]) -> str: ...

    def flush(self) -> str: ...


class TextOutput:
    """The text of one answer: ends before a stop string, never shows the start of one too early."""

    def __init__(self, decoder: StreamDecoder | None, stops: Sequence[str]) -> None:
        if decoder is None and stops:
            raise RequestError(
                f"stop is {list(stops)!r}, but without a tokenizer there is no text to find it in; "
                "use stop_token_ids."
            )
        self._decoder = decoder
        self._stops = tuple(stops)
        self._text = ""
        self._num_shown = 0
        self._ended = False

    @property
    def text(self) -> str:
        return self._text

    def push(self, token: int, may_stop: bool = True) -> bool:
        """Take one token; True if it completes a stop string, which ends the text before it."""
        if self._decoder is not None and not self._ended:
            self._append(self._decoder.push((token,)), may_stop)
        return self._ended

    def finish(self) -> None:
        """No more tokens: whatever was held back is text after all."""
        if self._decoder is not None and not self._ended:
            self._append(self._decoder.flush())
        self._ended = True

    def take(self) -> str:
        """The text that may be shown and was not yet."""
        end = len(self._text) if self._ended else len(self._text) - self._num_held()
        shown = self._text[self._num_shown : end]
        self._num_shown = max(self._num_shown, end)
        return shown

    def _append(self, piece: str, may_stop: bool = True) -> None:
        if not piece:
            return
        longest = max((len(stop) for stop in self._stops), default=0)
        begin = max(0, len(self._text) - longest + 1)  # a stop string may straddle the seam
        self._text += piece
        if not may_stop:
            return
        places = [self._text.find(stop, begin) for stop in self._stops]
        first = min((place for place in places if place >= 0), default=-1)
        if first >= 0:
            self._text = self._text[:first]
            self._ended = True

    def _num_held(self) -> int:
        """How much of the text's end could be the beginning of a stop string."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for size in range(min(longest, len(self._text)), 0, -1):
            tail = self._text[-size:]
            if any(stop.startswith(tail) for stop in self._stops):
                return size
        return 0
