"""Gemma 4's answers: the thought channel, and calls of the form `call:name{key:value,…}`.

All of its marks are special tokens. Inside a call, strings stand between quote tokens; keys and
all other values are bare.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flashdraft.chat.answers.arguments import JsonWriter
from flashdraft.chat.answers.loose_json import LooseScanner
from flashdraft.chat.answers.marks import AnswerMarks, MarkKind
from flashdraft.chat.schema.reading import Shape, is_tool_name
from flashdraft.models.tokenizer import Tokenizer

SPELLINGS = {
    MarkKind.THINK: "<|channel>",
    MarkKind.END_THINK: "<channel|>",
    MarkKind.CALL: "<|tool_call>",
    MarkKind.END_CALL: "<tool_call|>",
    MarkKind.QUOTE: '<|"|>',
}
TOOL_RESPONSE = "<|tool_response>"  # the model asks for its calls' results: a stop token
_LABEL = "thought\n"
_HEAD = "call:"
_MAX_HEAD = 256  # characters before the bracket; more are no name


def knows(tokenizer: Tokenizer) -> bool:
    """Whether the tokenizer has all of Gemma 4's marks as special tokens."""
    return all(tokenizer.token_id(name) in tokenizer.special_ids for name in SPELLINGS.values())


def answer_marks(tokenizer: Tokenizer) -> AnswerMarks:
    """How Gemma 4 marks its answers."""
    tokens = {
        index: mark
        for mark, spelling in SPELLINGS.items()
        if (index := tokenizer.token_id(spelling)) is not None
    }
    return AnswerMarks(
        SPELLINGS,
        tokens,
        GemmaCall,
        thinks_by_default=False,
        openings={_LABEL: MarkKind.THINK},  # small models forget the channel's mark
        label=_LABEL,
    )


class GemmaCall:
    """Reads `call:name{…}`; a missing `call:`, and a name without brackets, are forgiven."""

    def __init__(self, functions: Mapping[str, Any]) -> None:
        self._functions = functions
        self._head: list[str] = []
        self._scanner: LooseScanner | None = None
        self._writer = JsonWriter(Shape.of(None))
        self.name: str | None = None
        self.failed = False
        self.done = False

    @property
    def in_string(self) -> bool:
        return self._scanner is not None and self._scanner.in_string

    def feed(self, text: str, start: int) -> int:
        if self._scanner is not None:
            end = self._scanner.feed(text, start)
            self.done = self._scanner.done
            return end
        if text[start] == "{":
            self._begin()
        else:
            self._head.append(text[start])
            self.failed = len(self._head) > _MAX_HEAD
        return start + 1

    def quote(self) -> None:
        if self._scanner is not None:  # around a name it means nothing
            self._scanner.quote()

    def close(self, is_complete: bool) -> None:
        if self._scanner is None:
            if not is_complete:  # the name itself may be cut off
                self.failed = True
                return
            self._begin()
        if self._scanner is not None:
            self._scanner.finish()
            self.done = True

    def take(self) -> str:
        return self._writer.take()

    def _begin(self) -> None:
        name = "".join(self._head).strip().removeprefix(_HEAD).strip()
        if not is_tool_name(name, self._functions):
            self.failed = True
            return
        self.name = name
        self._writer = JsonWriter(Shape.of(self._functions.get(name)))
        self._scanner = LooseScanner(self._writer)
        self._scanner.feed("{", 0)
