"""Token ids to text as they come, nothing shown that a later token could change."""

from __future__ import annotations

from collections.abc import Iterable

from flashdraft.models.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
_MAX_SPLIT_TOKENS = 3  # a character is at most 4 bytes, so at most 3 tokens can wait for its end


class StreamDecoder:
    """Decodes a growing sequence of tokens; the pieces joined equal `decode` of the whole.

    A piece is held back while a later token could still change it: a character whose last bytes are
    missing, and a run of byte tokens (which the tokenizer decodes as one). Each call decodes only
    the tokens since the last piece and, as their left context, that piece. Special tokens are no
    text, but `push_pieces` and `flush_pieces` have their ids where they stood: behind all text of
    the tokens before them, and behind a character that they interrupt.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special else frozenset()
        self._ids: list[int] = []  # the last piece's tokens, then those not yet shown
        self._shown = 0  # how many of _ids have been shown
        self._complete = 0  # how many of _ids stand before a trailing run of byte tokens
        self._special: list[tuple[int, int]] = []  # (how many of _ids stand before it, its id)

    def push(self, ids: Iterable[int]) -> str:
        """Take the next tokens; return the text that is now certain."""
        return _text_of(self.push_pieces(ids))

    def flush(self) -> str:
        """The rest, as it is; incomplete characters become U+FFFD."""
        return _text_of(self.flush_pieces())

    def push_pieces(self, ids: Iterable[int]) -> list[str | int]:
        """As `push`, with the ids of special tokens in their places."""
        for index in ids:
            if index in self._skipped:
                self._special.append((len(self._ids), index))
                continue
            self._ids.append(index)
            if index not in self._tokenizer.byte_ids:
                self._complete = len(self._ids)
        return self._show(self._safe_end())

    def flush_pieces(self) -> list[str | int]:
        """As `flush`, with the ids of special tokens in their places."""
        return self._show(len(self._ids))

    def _decode(self, start: int, end: int) -> str:
        return self._tokenizer.decode(self._ids[start:end], skip_special=False)

    def _safe_end(self) -> int:
        """Up to where the text cannot change any more."""
        start, end = self._shown, self._complete
        if end <= start:
            return start
        whole = self._decode(start, end)
        if not whole.endswith(_REPLACEMENT):
            return end
        # cut before a character that may be incomplete: a cut inside it would change the text
        for cut in range(end - 1, max(start, end - 1 - _MAX_SPLIT_TOKENS), -1):
            if self._decode(start, cut) + self._decode(cut, end) == whole:
                return cut
        return start

    def _show(self, end: int) -> list[str | int]:
        """Text and special tokens up to `end`."""
        due = [mark for mark in self._special if mark[0] <= end]
        del self._special[: len(due)]
        pieces: list[str | int] = []
        if end > self._shown:
            known = len(self._decode(0, self._shown))
            whole = self._decode(0, end)
            for place, index in due:
                cut = self._cut(place, end, whole)
                pieces += [whole[known:cut], index]
                known = max(known, cut)
            pieces.append(whole[known:])
            del self._ids[: self._shown]
            self._complete -= self._shown
            self._special = [(place - self._shown, index) for place, index in self._special]
            self._shown = end - self._shown
        else:
            pieces += [index for _, index in due]
        return [piece for piece in pieces if piece != ""]

    def _cut(self, place: int, end: int, whole: str) -> int:
        """Where the text of the tokens before `place`, with its last character, ends in `whole`."""
        for later in range(place, end):
            before = self._decode(0, later)
            is_whole = whole.startswith(before) and not before.endswith(_REPLACEMENT)
            if is_whole or before + self._decode(later, end) == whole:
                return len(before)
        return len(whole)


def _text_of(pieces: Iterable[str | int]) -> str:
    return "".join(piece for piece in pieces if isinstance(piece, str))
