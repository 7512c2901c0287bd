"""What an answer is made of while it streams: reasoning, content and tool calls, piece by piece."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol


@dataclass(frozen=True)
class Reasoning:
    """A further piece of the model's thoughts."""

    text: str


@dataclass(frozen=True)
class Content:
    """A further piece of the answer's own text."""

    text: str


@dataclass(frozen=True)
class ToolCallBegin:
    """A call begins; calls are counted from 0 and do not overlap."""

    index: int
    name: str


@dataclass(frozen=True)
class ToolCallArguments:
    """A further piece of a call's arguments; all of them joined are the JSON text of an object."""

    index: int
    text: str


@dataclass(frozen=True)
class ToolCallEnd:
    """The call's arguments are complete."""

    index: int


Delta = Reasoning | Content | ToolCallBegin | ToolCallArguments | ToolCallEnd


def join_deltas(deltas: Sequence[Delta]) -> list[Delta]:
    """The same deltas, neighbours of one kind made one."""
    if len(deltas) < 2:
        return list(deltas)
    joined: list[Delta] = []
    for _, group in groupby(deltas, key=lambda delta: (type(delta), getattr(delta, "index", 0))):
        parts = list(group)
        texts = [part.text for part in parts if not isinstance(part, ToolCallBegin | ToolCallEnd)]
        match parts[0]:
            case Content():
                joined.append(Content("".join(texts)))
            case Reasoning():
                joined.append(Reasoning("".join(texts)))
            case ToolCallArguments(index=index):
                joined.append(ToolCallArguments(index, "".join(texts)))
            case _:
                joined += parts
    return joined


class ResponseParser(Protocol):
    """Reads an answer's pieces (text, and ids of special tokens) in order; never raises on them.

    The joined deltas do not depend on how the stream was cut into pushes.
    """

    def push(self, pieces: Sequence[str | int]) -> list[Delta]:
        """Take the next pieces; return what is now decided."""
        ...

    def finish(self) -> list[Delta]:
        """The answer is over: what was held back; an open call is closed into valid JSON."""
        ...


class PlainParser:
    """For models that mark neither thoughts nor calls: all text is content."""

    def push(self, pieces: Sequence[str | int]) -> list[Delta]:
        text = "".join(piece for piece in pieces if isinstance(piece, str))
        return [Content(text)] if text else []

    def finish(self) -> list[Delta]:
        return []
