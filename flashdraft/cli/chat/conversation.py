"""A chat's history: turns, the system prompt, and which turns still fit the context. No model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from flashdraft.cli.pictures import PictureFile, content_of
from flashdraft.errors import RequestError, quoted

Message = dict[str, Any]


@dataclass
class Turn:
    """A question with its pictures and, once there is one, its answer."""

    question: str
    answer: str | None = None
    pictures: tuple[PictureFile, ...] = ()


@dataclass
class Conversation:
    """What was said. Turns that no longer fit are left out of the prompt, not forgotten."""

    system: str | None = None
    turns: list[Turn] = field(default_factory=list)
    num_left_out: int = 0

    @classmethod
    def of(cls, messages: Sequence[Message]) -> Conversation:
        """A conversation from its messages: perhaps a system prompt, then questions and answers.

        The content is a text; a question's `pictures` stand beside it.
        """
        system = None
        if messages and messages[0]["role"] == "system":
            system, messages = messages[0]["content"], messages[1:]
        for number, message in enumerate(messages):
            role = ("user", "assistant")[number % 2]
            if message["role"] != role:
                raise RequestError(
                    f"Message {number + 1} after the system prompt is by {quoted(message['role'])}"
                    f"; it must be by {role!r}: questions and answers take turns."
                )
        if len(messages) % 2:
            raise RequestError("The last question has no answer; take it out.")
        pairs = zip(messages[::2], messages[1::2], strict=True)
        turns = [
            Turn(asked["content"], said["content"], tuple(asked.get("pictures", ())))
            for asked, said in pairs
        ]
        return cls(system, turns)

    def messages(self) -> list[Message]:
        """Everything that was said; pictures are the names of their files."""
        return self._messages(self.turns, named=True)

    def prompt(self) -> list[Message]:
        """The messages the model gets to see."""
        return self._messages(self.turns[self.num_left_out :])

    def fit(self, count_tokens: Callable[[list[Message]], int], max_tokens: int) -> int:
        """Leave out the oldest turns, never the last, until the prompt fits; how many more.

        From the newest turn backwards, so that what is counted is no more than a few times what
        fits, however long the conversation is.
        """
        before, last = self.num_left_out, len(self.turns) - 1
        if before >= last or self._fits(before, count_tokens, max_tokens):
            return 0
        too_many, fitting, step = before, last, 1  # turns left out: known not to fit, and to fit
        while (tried := last - step) > too_many and self._fits(tried, count_tokens, max_tokens):
            fitting, step = tried, 2 * step
        too_many = max(too_many, tried)
        while fitting - too_many > 1:
            middle = (fitting + too_many) // 2
            if self._fits(middle, count_tokens, max_tokens):
                fitting = middle
            else:
                too_many = middle
        self.num_left_out = fitting
        return fitting - before

    def undo(self) -> Turn | None:
        """Take the last turn back."""
        turn = self.turns.pop() if self.turns else None
        self.num_left_out = min(self.num_left_out, len(self.turns))
        return turn

    def reset(self) -> None:
        """Forget every turn; the system prompt stays."""
        self.turns.clear()
        self.num_left_out = 0

    def _fits(
        self, num_left_out: int, count_tokens: Callable[[list[Message]], int], max_tokens: int
    ) -> bool:
        return count_tokens(self._messages(self.turns[num_left_out:])) <= max_tokens

    def _messages(self, turns: list[Turn], *, named: bool = False) -> list[Message]:
        messages: list[Message] = []
        if self.system is not None:
            messages.append({"role": "system", "content": self.system})
        for turn in turns:
            content = content_of(turn.question, turn.pictures, named=named)
            messages.append({"role": "user", "content": content})
            if turn.answer is not None:
                messages.append({"role": "assistant", "content": turn.answer})
        return messages
