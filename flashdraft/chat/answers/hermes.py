"""Answers of Qwen3 and other ChatML models: `<think>…</think>`, `<tool_call>{json}</tool_call>`.

Some tokenizers have these marks as special tokens, most have them as text.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from flashdraft.chat.answers.arguments import NULLS, JsonWriter, read_json
from flashdraft.chat.answers.loose_json import LooseScanner
from flashdraft.chat.answers.marks import AnswerMarks, MarkKind
from flashdraft.chat.schema.reading import Shape, is_tool_name
from flashdraft.models.tokenizer import Tokenizer

THINK_SPELLINGS = {MarkKind.THINK: "<think>", MarkKind.END_THINK: "</think>"}
CALL_SPELLINGS = {MarkKind.CALL: "<tool_call>", MarkKind.END_CALL: "</tool_call>"}
_NAMES, _ARGUMENTS = ("name", "function"), ("arguments", "parameters")
_TYPE = "function"  # what a call's key "type" says
_BARE_KEYS = (*_NAMES, *_ARGUMENTS, "type")
_BARE_HEADS = tuple(f'{bracket}{{"{key}"' for bracket in ("", "[") for key in _BARE_KEYS)


def _spellings(tokenizer: Tokenizer) -> dict[MarkKind, str]:
    """The marks that the model knows: tokens of its own, or words of its template."""
    known: dict[MarkKind, str] = {}
    for pair in (THINK_SPELLINGS, CALL_SPELLINGS):
        if all(
            tokenizer.token_id(text) is not None or text in (tokenizer.chat_template or "")
            for text in pair.values()
        ):
            known |= pair
    return known


def answer_marks(tokenizer: Tokenizer, is_told: bool = False) -> AnswerMarks:
    """How the model marks its answers; without spellings where it knows none of these marks.

    `is_told`: the prompt says how calls are marked, whatever the model knows.
    """
    known = _spellings(tokenizer) | (CALL_SPELLINGS if is_told else {})
    tokens = {
        index: mark
        for mark, text in known.items()
        if (index := tokenizer.token_id(text)) is not None and index in tokenizer.special_ids
    }
    return AnswerMarks(
        known,
        tokens,
        HermesCall,
        thinks_by_default=MarkKind.THINK in known,
        openings={
            text: mark
            for mark, text in known.items()
            if mark in THINK_SPELLINGS and mark not in tokens.values()
        },
        new_bare_call=bare_call if is_told else None,  # what a prompt tells of marks is forgotten
    )


def bare_call(functions: Mapping[str, Any]) -> HermesCall:
    """A reader of a call without marks, or of the first of a list of them.

    Nothing but its own keys tells it from an answer in JSON: one of them must come first, no other
    key before the arguments, and the name must be a function's that was offered.
    """
    return HermesCall(functions, is_bare=True)


class HermesCall:
    """Reads `{"name": …, "arguments": {…}}`."""

    def __init__(self, functions: Mapping[str, Any], is_bare: bool = False) -> None:
        self._is_bare = is_bare
        self._head = ""  # up to the first key, without white space
        self._envelope = _Envelope(functions, is_bare)
        self._scanner = LooseScanner(self._envelope)
        self._begun = False
        self.name: str | None = None
        self.failed = False
        self.done = False

    @property
    def in_string(self) -> bool:
        return self._scanner.in_string

    def feed(self, text: str, start: int) -> int:
        if self._is_bare and self.name is None:
            # where it fails must not depend on how much of it has come
            self._feed_undecided(text[start])
            return start + 1
        if not self._begun and text[start] != "{":
            self.failed = not text[start].isspace()
            return start + 1
        self._begun = True
        end = self._scanner.feed(text, start)
        self._settle(self._scanner.done)
        return end

    def quote(self) -> None:
        """There is no quote token in this format."""

    def close(self, is_complete: bool) -> None:
        if not self._begun or (self.name is None and not is_complete):
            self.failed = True
            return
        self._scanner.finish()
        self._settle(is_done=True)

    def take(self) -> str:
        writer = self._envelope.writer
        return "" if writer is None else writer.take()

    def _feed_undecided(self, character: str) -> None:
        """Take a character of what may be no call."""
        if self._head not in _BARE_HEADS and not (character.isspace() and '"' not in self._head):
            self._head += character
            if not any(head.startswith(self._head) for head in _BARE_HEADS):
                self.failed = True
                return
        if self._begun or character == "{":
            self._begun = True
            self._scanner.feed(character, 0)
            self._settle(self._scanner.done)

    def _settle(self, is_done: bool) -> None:
        """Decide whether this is a call, as soon as it can be told."""
        envelope = self._envelope
        if is_done and envelope.writer is None:
            envelope.write({})  # a call without arguments
        if envelope.writer is not None and not envelope.failed:
            self.name = envelope.name
        self.failed = envelope.failed or (is_done and self.name is None)
        self.done = is_done and not self.failed


class _Envelope:
    """The `Sink` of a call's object: finds the name, hands the arguments on to a writer.

    Arguments may come before the name, be called parameters, be null or missing (none), or be an
    object's JSON text in a string. Arguments of any other form fail; other keys are passed over.
    In a bare call other keys fail too, and a name as soon as it is no function's, until it is
    decided that it is a call.
    """

    def __init__(self, functions: Mapping[str, Any], is_bare: bool) -> None:
        self._functions = functions
        self._is_bare = is_bare
        self._names = _NAMES if is_bare else _NAMES[:1]
        self._key = ""
        self._string: list[str] | None = None  # the name or type, or arguments in a string
        self._depth = 0
        self._in_arguments = False
        self.name: str | None = None
        self.writer: JsonWriter | None = None  # once the arguments have begun
        self.failed = False

    def write(self, arguments: Mapping[str, Any]) -> None:
        """Take arguments that are known whole."""
        self.writer = JsonWriter(Shape.of(None))
        self.writer.whole(arguments)

    @property
    def _inner(self) -> JsonWriter | None:
        return self.writer if self._in_arguments else None

    @property
    def _is_at_arguments(self) -> bool:
        return self._depth == 1 and self._key in _ARGUMENTS and self.writer is None

    def open(self, bracket: str) -> None:
        if self._is_at_arguments:
            self.failed |= bracket != "{"
            self.writer = JsonWriter(Shape.of(self._functions.get(self.name or "")))
            self._in_arguments = True
        elif self._depth == 1 and self._is_word:
            self.failed |= self._is_in_doubt
        self._depth += 1
        if self._inner is not None:
            self._inner.open(bracket)

    def close(self) -> None:
        self._depth -= 1
        if self._inner is not None:
            self._inner.close()
            self._in_arguments = self._depth > 1

    def key(self, text: str) -> None:
        if self._inner is not None:
            self._inner.key(text)
        elif self._depth == 1:
            self._key = text
            self.failed |= self._is_in_doubt and text not in _BARE_KEYS

    def begin_string(self) -> None:
        if self._inner is not None:
            self._inner.begin_string()
        elif self._depth == 1 and (self._is_word or self._is_at_arguments):
            self._string = []

    def text(self, text: str) -> None:
        if self._inner is not None:
            self._inner.text(text)
        elif self._string is not None:
            self._string.append(text)
            if self._is_in_doubt and self._is_word:
                known, begun = self._known_words, "".join(self._string)
                self.failed |= not any(word.startswith(begun) for word in known)

    def end_string(self) -> None:
        if self._inner is not None:
            self._inner.end_string()
        elif self._string is not None:
            text, self._string = "".join(self._string), None
            if self._is_word:
                self._take_word(text if self._is_bare else text.strip())
            else:
                arguments = read_json(text)
                self.failed |= not isinstance(arguments, dict)
                self.write(arguments if isinstance(arguments, dict) else {})

    def bare(self, text: str) -> None:
        if self._inner is not None:
            self._inner.bare(text)
        elif self._is_at_arguments:
            self.failed |= text not in NULLS
            self.write({})
        elif self._depth == 1 and self._is_word:
            self._take_word(text)

    @property
    def _is_in_doubt(self) -> bool:
        """Whether it may still turn out to be no call."""
        return self._is_bare and (self.name is None or self.writer is None)

    @property
    def _is_word(self) -> bool:
        """Whether the value of this key is a word: a name, or what else a bare call must say."""
        return self._key in self._names or (self._is_in_doubt and self._key == "type")

    @property
    def _known_words(self) -> Collection[str]:
        return (_TYPE,) if self._key == "type" else self._functions.keys()

    def _take_word(self, text: str) -> None:
        if self._is_in_doubt:
            self.failed |= text not in self._known_words
        elif self.name is None:
            self.failed |= not is_tool_name(text, self._functions)
        if self.name is None and self._key in self._names:
            self.name = text
