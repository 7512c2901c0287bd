"""Whole answers, as their parts come."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Literal

from flashdraft.chat.answers.blocks import Block, BlockChange, Blocks
from flashdraft.server.answering.answers import AnswerPart, End, Token


def new_id(prefix: str) -> str:
    """A fresh id, as clients expect it to begin."""
    return f"{prefix}{uuid.uuid4().hex}"


@dataclass
class CollectedAnswer:
    """A whole answer."""

    parsed: Blocks = field(default_factory=Blocks)
    tokens: list[Token] = field(default_factory=list)
    finished: End | None = None

    def add(self, part: AnswerPart) -> list[BlockChange]:
        """Take the next part; how it changes the blocks."""
        self.tokens += part.tokens
        self.finished = part.end
        return self.parsed.push(part.deltas)

    @property
    def blocks(self) -> list[Block]:
        return self.parsed.blocks

    @property
    def end(self) -> End:
        assert self.finished is not None, "an answer is complete when its stream has ended"
        return self.finished

    def text(self, kind: Literal["reasoning", "content"]) -> str:
        """All text of a kind."""
        return "".join(block.text for block in self.blocks if block.kind == kind)

    @property
    def calls(self) -> list[Block]:
        return [block for block in self.blocks if block.kind == "call"]


async def collect(parts: AsyncGenerator[AnswerPart], count: int) -> list[CollectedAnswer]:
    """All answers, when they are complete."""
    found = [CollectedAnswer() for _ in range(count)]
    async with contextlib.aclosing(parts):
        async for part in parts:
            found[part.index].add(part)
    return found
