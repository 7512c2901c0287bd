"""A chat's history: turns, the system prompt, and which turns still fit the context. No model."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from flashdraft.cli.files import write_text

Message = dict[str, str]


@dataclass
class Turn:
    """A question and, once there is one, its answer."""

    question: str
    answer: str | None = None


@dataclass
class Conversation:
    """What was said. Turns that no longer fit are left out of the prompt, not forgotten."""

    system: str | None = None
    turns: list[Turn] = field(default_factory=list)
    num_left_out: int = 0

    def prompt(self) -> list[Message]:
        """The messages the model gets to see."""
        return self._messages(self.turns[self.num_left_out :])

    def fit(self, count_tokens: Callable[[list[Message]], int], max_tokens: int) -> int:
        """Leave out the oldest turns, never the last, until the prompt fits; how many more."""
        before = self.num_left_out
        while self.num_left_out < len(self.turns) - 1 and count_tokens(self.prompt()) > max_tokens:
            self.num_left_out += 1
        return self.num_left_out - before

    def undo(self) -> Turn | None:
        """Take the last turn back."""
        turn = self.turns.pop() if self.turns else None
        self.num_left_out = min(self.num_left_out, len(self.turns))
        return turn

    def reset(self) -> None:
        """Forget every turn; the system prompt stays."""
        self.turns.clear()
        self.num_left_out = 0

    def save(self, path: Path) -> None:
        """Write the whole conversation: messages for a .json file, else text to read."""
        messages = self._messages(self.turns)
        if path.suffix.lower() == ".json":
            text = json.dumps({"messages": messages}, indent=2, ensure_ascii=False) + "\n"
        else:
            text = "\n".join(f"## {m['role']}\n\n{m['content']}\n" for m in messages)
        write_text(path, text)

    def _messages(self, turns: list[Turn]) -> list[Message]:
        messages = []
        if self.system is not None:
            messages.append({"role": "system", "content": self.system})
        for turn in turns:
            messages.append({"role": "user", "content": turn.question})
            if turn.answer is not None:
                messages.append({"role": "assistant", "content": turn.answer})
        return messages
