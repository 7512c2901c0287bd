"""Reads a model's arguments as they stream: JSON, Gemma's syntax, and what is nearly either.

One loose syntax covers all: keys quoted or bare, strings between `"` (with JSON's escapes) or
between quote tokens (without), bare values, commas and closing brackets that may be missing. The
scanner tells a sink what it reads, in an order that is always well-formed; it never fails once the
outermost object has begun.
"""

from __future__ import annotations

import re
from enum import Enum, auto
from typing import Protocol

MAX_DEPTH = 64  # of brackets; one more is text: readers of JSON have limits of their own
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", '"': '"', "\\": "\\", "/": "/"}
_PLAIN = re.compile(r'[^"\\]+')
_OPENER = {"}": "{", "]": "["}


class Sink(Protocol):
    """What a scanner reports: one value, its parts in order."""

    def open(self, bracket: str) -> None: ...

    def close(self) -> None: ...

    def key(self, text: str) -> None: ...

    def begin_string(self) -> None: ...

    def text(self, text: str) -> None: ...

    def end_string(self) -> None: ...

    def bare(self, text: str) -> None: ...


class _Expect(Enum):
    KEY = auto()
    COLON = auto()
    VALUE = auto()
    NEXT = auto()  # a comma or a closing bracket


class _Quote(Enum):
    CHARACTER = auto()
    TOKEN = auto()


class LooseScanner:
    """Reads one object, character by character; `done` after its closing bracket."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._stack: list[str] = []
        self._expect = _Expect.VALUE
        self._word: list[str] | None = None  # a bare key or value under way
        self._quote: _Quote | None = None  # what ends the string under way
        self._is_key = False  # of the string under way
        self._key: list[str] = []
        self._escape = ""  # an escape sequence under way
        self._surrogate = ""  # the first half of a character that JSON writes as two escapes
        self.done = False

    @property
    def in_string(self) -> bool:
        return self._quote is not None

    def feed(self, text: str, start: int) -> int:
        """Take at least one character from `start` on; return where it stopped."""
        if self._quote is _Quote.TOKEN:
            self._add(text[start:])
            return len(text)
        if self._quote is _Quote.CHARACTER:
            plain = None if self._escape else _PLAIN.match(text, start)
            if plain:
                self._add(plain.group())
                return plain.end()
            self._string_character(text[start])
            return start + 1
        self._structure(text[start])
        return start + 1

    def quote(self) -> None:
        """Take a quote token."""
        if self._quote is not None:
            self._end_string()
        elif self._word is not None:
            self._word.append('"')  # in the midst of a bare value: it belongs to it
        else:
            self._begin_string(_Quote.TOKEN)

    def finish(self) -> None:
        """No more is coming: end what is open; a key that has no value yet is dropped."""
        if self._quote is not None:
            if self._is_key:
                self._quote = None
            else:
                self._end_string()
        elif self._word is not None and self._expect is _Expect.VALUE:
            self._end_word()
        while self._stack:
            self._pop()

    # Strings

    def _begin_string(self, quote: _Quote) -> None:
        if self._expect is _Expect.NEXT:  # a comma is missing
            self._expect = self._first()
        self._is_key = self._expect is _Expect.KEY
        self._quote = quote
        if self._is_key:
            self._key = []
        else:
            self._sink.begin_string()

    def _end_string(self) -> None:
        self._add(self._escape)
        self._quote, self._escape = None, ""
        self._flush_surrogate()
        if self._is_key:
            self._sink.key("".join(self._key))
            self._expect = _Expect.COLON
        else:
            self._sink.end_string()
            self._expect = _Expect.NEXT

    def _add(self, text: str) -> None:
        if not text:
            return
        self._flush_surrogate()
        if self._is_key:
            self._key.append(text)
        else:
            self._sink.text(text)

    def _flush_surrogate(self) -> None:
        if self._surrogate:
            self._surrogate = ""
            self._add("\ufffd")  # half a character

    def _string_character(self, character: str) -> None:
        if not self._escape:
            if character == '"':
                self._end_string()
            else:  # a backslash: the rest is plain
                self._escape = character
        elif len(self._escape) == 1 and character != "u":
            # an escape that JSON does not know is text as it stands: C:\data
            decoded = _ESCAPES.get(character, "\\" + character)
            self._escape = ""
            self._add(decoded)
        elif len(self._escape) > 1 and character not in "0123456789abcdefABCDEF":
            broken, self._escape = self._escape, ""
            self._add(broken)
            if character in '"\\':
                self._string_character(character)
            else:
                self._add(character)
        else:
            self._escape += character
            if len(self._escape) == 6:
                code, self._escape = int(self._escape[2:], 16), ""
                self._add_code(code)

    def _add_code(self, code: int) -> None:
        if 0xD800 <= code < 0xDC00:
            self._flush_surrogate()
            self._surrogate = chr(code)
        elif 0xDC00 <= code < 0xE000:
            first, self._surrogate = self._surrogate, ""
            if first:
                self._add(chr(0x10000 + ((ord(first) - 0xD800) << 10) + (code - 0xDC00)))
            else:
                self._add("\ufffd")
        else:
            self._add(chr(code))

    # Everything else

    def _first(self) -> _Expect:
        return _Expect.KEY if self._stack[-1] == "{" else _Expect.VALUE

    def _structure(self, character: str) -> None:
        if self._word is not None:
            ends = ",}]:" if self._expect is _Expect.KEY else ",}]"
            if character not in ends:
                self._word.append(character)
                return
            self._end_word()
        if character.isspace():
            return
        if character in "}]":
            self._close(character)
        elif character == "," and self._stack:
            self._fill_value()
            self._expect = self._first()
        else:
            self._begin(character)

    def _begin(self, character: str) -> None:
        """A character that begins something, or a colon."""
        if self._expect is _Expect.NEXT:  # a comma is missing
            self._expect = self._first()
        if character == ":":
            if self._expect is _Expect.KEY:
                self._sink.key("")
            self._expect = _Expect.VALUE
            return
        if self._expect is _Expect.COLON:  # it is missing
            self._expect = _Expect.VALUE
        if character == '"':
            self._begin_string(_Quote.CHARACTER)
        elif character in "{[" and self._expect is _Expect.KEY:
            return  # one bracket too many
        elif character in "{[" and len(self._stack) < MAX_DEPTH:
            self._stack.append(character)
            self._sink.open(character)
            self._expect = self._first()
        else:
            self._word = [character]

    def _end_word(self) -> None:
        assert self._word is not None
        text, self._word = "".join(self._word).strip(), None
        if self._expect is _Expect.KEY:
            self._sink.key(text)
            self._expect = _Expect.COLON
        else:
            self._sink.bare(text)
            self._expect = _Expect.NEXT

    def _fill_value(self) -> None:
        """A key whose value was left out has null."""
        if self._expect is _Expect.COLON or (
            self._expect is _Expect.VALUE and self._stack[-1] == "{"
        ):
            self._sink.bare("null")
            self._expect = _Expect.NEXT

    def _close(self, bracket: str) -> None:
        if _OPENER[bracket] not in self._stack:
            return  # closes nothing
        self._fill_value()
        while self._stack[-1] != _OPENER[bracket]:
            self._pop()
        self._pop()

    def _pop(self) -> None:
        self._stack.pop()
        self._sink.close()
        self._expect = _Expect.NEXT
        self.done = not self._stack
