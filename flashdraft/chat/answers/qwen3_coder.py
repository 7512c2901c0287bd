"""Calls of Qwen3-Coder, Qwen3.5 and later Qwen models: tags, and values between them as they are.

    <tool_call>
    <function=name>
    <parameter=key>
    value
    </parameter>
    </function>
    </tool_call>

Nothing is escaped, so a value may hold what looks like a tag. An end tag ends a value only where
the call goes on behind it as a call does; any other is text. Thoughts and marks are Hermes'.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from enum import Enum, auto
from functools import partial
from typing import Any

from flashdraft.chat.answers import hermes
from flashdraft.chat.answers.arguments import JsonWriter
from flashdraft.chat.answers.marks import AnswerMarks
from flashdraft.chat.answers.parameter import ParameterValue
from flashdraft.chat.schema.reading import Shape, is_tool_name
from flashdraft.models.tokenizer import Tokenizer

FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"
SPACE = " \t\r\n"  # what may stand between tags
_ENDS = (END_PARAMETER, END_FUNCTION, "</tool_call>")  # what may be a value's end
_MAX_NAME = 256  # characters; more are no name
_MAY_END = re.compile(r"[\n<]")


def knows(tokenizer: Tokenizer) -> bool:
    """Whether the model's template writes calls like this."""
    template = tokenizer.chat_template or ""
    return FUNCTION in template and PARAMETER in template


def answer_marks(tokenizer: Tokenizer) -> AnswerMarks:
    """How these models mark their answers; the mark before a call they often forget."""
    return replace(
        hermes.answer_marks(tokenizer, is_told=True),
        new_call=QwenCall,
        unmarked_calls={FUNCTION: partial(QwenCall, is_marked=False)},
    )


class _State(Enum):
    OPEN = auto()  # before the function's tag
    FUNCTION = auto()  # in the function's name
    BODY = auto()  # before the first parameter
    PARAMETER = auto()  # in a parameter's name
    VALUE = auto()
    ENDING = auto()  # behind a tag that may have ended the value


class QwenCall:
    """Reads `<function=…>…</function>`. Of a parameter that comes twice, the first counts."""

    def __init__(self, functions: Mapping[str, Any], is_marked: bool = True) -> None:
        """A call that is not marked as one must be of a function that there is."""
        self._functions = functions
        self._is_marked = is_marked
        self._state = _State.OPEN
        self._tag = ""  # under way
        self._word: list[str] = []  # a name under way
        self._function = ""
        self._shape = Shape.of(None)
        self._writer = JsonWriter(self._shape)
        self._given: set[str] = set()
        self._value: ParameterValue | None = None  # None: it came before
        self._is_first = False  # of the value's characters
        self._held = ""  # at the value's end: what a tag may begin with
        self._gap: list[str] = []  # the space behind it
        self.name: str | None = None
        self.failed = False
        self.done = False

    @property
    def in_string(self) -> bool:
        return self._state is _State.VALUE

    def feed(self, text: str, start: int) -> int:
        if self._state is _State.VALUE:
            return self._feed_value(text, start)
        character = text[start]
        match self._state:
            case _State.OPEN | _State.BODY:
                self._expect(character)
            case _State.FUNCTION | _State.PARAMETER:
                self._name(character)
            case _:
                self._follow(character)
        return start + 1

    def quote(self) -> None:
        """There is no quote token in this format."""

    def close(self, is_complete: bool) -> None:
        if self.name is None:
            if self._state is not _State.BODY or self._tag or not is_complete:
                self.failed = True
                return
            self._begin()
        elif self._state in (_State.VALUE, _State.ENDING):
            self._end_value()
        self._finish()

    def take(self) -> str:
        return self._writer.take()

    # Tags and names

    def _expect(self, character: str) -> None:
        """Before the arguments: tags and space, or there is no call."""
        if not self._tag and character in SPACE:
            return
        self._tag += character
        tags = (FUNCTION,) if self._state is _State.OPEN else (PARAMETER, END_FUNCTION)
        if self._tag not in tags:
            self.failed = not any(tag.startswith(self._tag) for tag in tags)
            return
        tag, self._tag = self._tag, ""
        if tag == FUNCTION:
            self._state = _State.FUNCTION
            return
        self._begin()
        if tag == PARAMETER:
            self._state = _State.PARAMETER
        else:
            self._finish()

    def _name(self, character: str) -> None:
        """A name ends with its tag, or with the line where the tag's end is missing."""
        if character not in ">\n":
            self._word.append(character)
            self.failed = self.name is None and len(self._word) > _MAX_NAME
            return
        name, self._word = "".join(self._word).strip(), []
        if self._state is _State.PARAMETER:
            self._begin_value(name, is_first=character == ">")
            return
        is_known = name in self._functions
        self.failed = not (is_known or (self._is_marked and is_tool_name(name, self._functions)))
        self._function, self._state = name, _State.BODY

    def _begin(self) -> None:
        self.name = self._function
        self._shape = Shape.of(self._functions.get(self.name))
        self._writer = JsonWriter(self._shape)
        self._writer.open("{")

    def _finish(self) -> None:
        self._writer.close()
        self.done = True

    # Values

    def _begin_value(self, name: str, is_first: bool) -> None:
        self._state, self._is_first, self._held = _State.VALUE, is_first, ""
        self._value = None
        if name not in self._given:
            self._given.add(name)
            self._writer.key(name)
            self._value = ParameterValue(self._writer, self._shape.property(name).types)

    def _put(self, text: str) -> None:
        if self._value is not None:
            self._value.text(text)

    def _end_value(self) -> None:
        if self._value is not None:
            self._value.end()

    def _feed_value(self, text: str, start: int) -> int:
        """Take text up to the next tag that may end the value."""
        position = start
        while position < len(text) and self._state is _State.VALUE:
            if self._is_first:
                self._is_first = False
                position += text[position] == "\n"
                continue
            if self._held:
                self._hold(text[position])
                position += 1
                continue
            found = _MAY_END.search(text, position)
            end = len(text) if found is None else found.start()
            self._put(text[position:end])
            self._held = text[end : end + 1]
            position = end + 1
        return min(position, len(text))

    def _hold(self, character: str) -> None:
        """A further character of what may be a tag, with the newline before it."""
        self._held += character
        tag = self._held.removeprefix("\n")
        # JSON has no newline within a string
        is_text = self._held == tag and self._value is not None and self._value.in_json_string
        if tag in _ENDS and not is_text:
            self._state = _State.ENDING
        elif tag.startswith(PARAMETER) and not is_text:
            self._hold_name(tag[len(PARAMETER) :])
        elif is_text or not any(end.startswith(tag) for end in (*_ENDS, PARAMETER)):
            self._release()

    def _hold_name(self, name: str) -> None:
        """The tag of a parameter ends a value that lacks its own, if the parameter can be meant."""
        if name.endswith(">") and self._is_meant(name[:-1].strip()):
            self._end_value()
            self._begin_value(name[:-1].strip(), is_first=True)
        elif name.endswith((">", "\n", "<")) or len(name) > _MAX_NAME:
            self._release()

    def _is_meant(self, name: str) -> bool:
        names = self._shape.names()
        is_name = name in names if names else is_tool_name(name, {})
        return is_name and name not in self._given

    def _release(self) -> None:
        """What was held back is text; its last character may begin a tag again."""
        kept = self._held[-1] if self._held[-1] in "\n<" else ""
        self._put(self._held.removesuffix(kept))
        self._held = kept

    def _follow(self, character: str) -> None:
        """Behind a tag that may end the value: it does if the call goes on, or ends, there."""
        if not self._tag and character in SPACE:
            self._gap.append(character)
            return
        self._tag += character
        is_end = self._held.removeprefix("\n") == END_PARAMETER
        tags = (PARAMETER, END_FUNCTION) if is_end else ()
        if any(tag != self._tag and tag.startswith(self._tag) for tag in tags):
            return
        tag, gap = self._tag, "".join(self._gap)
        self._tag, self._gap = "", []
        if tag == PARAMETER and is_end:
            self._end_value()
            self._state = _State.PARAMETER
        elif tag == END_FUNCTION and is_end:
            self._end_value()
            self._finish()
        else:
            self._state = _State.VALUE
            rest = "\n" if gap.endswith("\n") else ""
            self._put(self._held + gap.removesuffix("\n"))
            self._held = ""
            self._feed_value(rest + tag, 0)
