"""How a family marks thoughts and calls: the words that formats and the state machine share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Protocol


class MarkKind(Enum):
    """What a marker does."""

    THINK = auto()
    END_THINK = auto()
    CALL = auto()
    END_CALL = auto()
    QUOTE = auto()


class CallReader(Protocol):
    """Reads what stands between a call's marks."""

    name: str | None  # set when the arguments begin
    failed: bool  # there is no call to be made of it
    done: bool  # the outermost bracket was closed

    @property
    def in_string(self) -> bool: ...

    def feed(self, text: str, start: int) -> int:
        """Take at least one character from `start` on; return where it stopped."""
        ...

    def quote(self) -> None: ...

    def close(self, is_complete: bool) -> None:
        """No more is coming, by a mark if `is_complete`; afterwards it is done or failed."""
        ...

    def take(self) -> str:
        """The arguments' JSON text since the last time."""
        ...


@dataclass(frozen=True)
class AnswerMarks:
    """How a family marks thoughts and calls, in one tokenizer's tokens."""

    spellings: Mapping[MarkKind, str]
    tokens: Mapping[int, MarkKind]  # the marks that are special tokens; the others are text
    new_call: Callable[[Mapping[str, Any]], CallReader]  # a reader; functions' schemas by name
    thinks_by_default: bool  # where the template is not told
    # marks at the answer's start alone
    openings: Mapping[str, MarkKind] = field(default_factory=dict)
    label: str = ""  # what a thought begins with that is no part of it
    # a reader of calls that stand without marks where an answer begins; None: there are none
    new_bare_call: Callable[[Mapping[str, Any]], CallReader] | None = None
    # what a call whose mark was forgotten begins with, and the reader of such a call
    unmarked_calls: Mapping[str, Callable[[Mapping[str, Any]], CallReader]] = field(
        default_factory=dict
    )

    def text_marks(self, *marks: MarkKind) -> dict[str, MarkKind]:
        """Those of the marks that are plain text, by spelling."""
        tokens = set(self.tokens.values())
        return {
            self.spellings[mark]: mark
            for mark in marks
            if mark in self.spellings and mark not in tokens
        }
