"""The blocks an answer consists of: runs of thoughts, of text, and calls."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from flashdraft.chat.answers.deltas import (
    Content,
    Delta,
    Reasoning,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallEnd,
)


@dataclass
class Block:
    """A run of one kind in an answer; a call's text is its arguments."""

    kind: Literal["reasoning", "content", "call"]
    name: str = ""
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.pieces)


@dataclass(frozen=True)
class BlockChange:
    """A block begins, grows or ends."""

    change: Literal["begin", "grow", "end"]
    index: int
    block: Block
    text: str = ""


class Blocks:
    """The blocks of an answer, and how each delta changes them."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self._is_open = False

    def push(self, deltas: Iterable[Delta]) -> list[BlockChange]:
        """Take deltas; what happens to the blocks, in order."""
        return [change for delta in deltas for change in self._changes(delta)]

    def close(self) -> list[BlockChange]:
        """End the block that is open."""
        if not self._is_open:
            return []
        self._is_open = False
        return [BlockChange("end", len(self.blocks) - 1, self.blocks[-1])]

    def _changes(self, delta: Delta) -> list[BlockChange]:
        match delta:
            case Reasoning(text=text):
                return [*self._open("reasoning"), self._grow(text)]
            case Content(text=text):
                return [*self._open("content"), self._grow(text)]
            case ToolCallBegin(name=name):
                return self._open("call", name)
            case ToolCallArguments(text=text):
                return [self._grow(text)]
            case ToolCallEnd():
                return self.close()

    def _open(
        self, kind: Literal["reasoning", "content", "call"], name: str = ""
    ) -> list[BlockChange]:
        if self._is_open and kind != "call" and self.blocks[-1].kind == kind:
            return []
        ended = self.close()
        self.blocks.append(Block(kind, name))
        self._is_open = True
        return [*ended, BlockChange("begin", len(self.blocks) - 1, self.blocks[-1])]

    def _grow(self, text: str) -> BlockChange:
        self.blocks[-1].pieces.append(text)
        return BlockChange("grow", len(self.blocks) - 1, self.blocks[-1], text)
