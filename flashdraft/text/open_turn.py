"""A last message that is to be continued: its end is marked, and the rendered text cut there.

What stands behind it (the end of a turn, the beginning of the next) is the template's and unknown
here. A template that drops, repeats or changes that end is refused.
"""

from __future__ import annotations

import secrets
from typing import Any

from flashdraft.killable.child import RefusalError


class OpenTurn:
    """The mark behind a conversation's last message; letters, which no template takes apart."""

    def __init__(self, messages: list[dict[str, Any]]) -> None:
        self._mark = f"end{secrets.token_hex(16)}end"
        message = messages[-1]
        content = message.get("content") or ""
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if parts[-1]["type"] != "text":
            raise RefusalError(
                "template", "the last message ends with a picture, so no text goes on in it"
            )
        text = parts[-1]["text"]
        self._last_line = text.rpartition("\n")[2].lstrip()
        if isinstance(content, str):
            message["content"] = content + self._mark
        else:
            message["content"] = [*parts[:-1], {**parts[-1], "text": text + self._mark}]

    def cut(self, text: str) -> str:
        """A rendered text up to the mark; RefusalError where the message is not there as it was."""
        before, _, behind = text.partition(self._mark)
        if len(before) == len(text) or self._mark in behind:
            raise _refusal("drops or repeats the last message")
        if not before.endswith(self._last_line):
            raise _refusal("changes the text of the last message")
        return before


def _refusal(what: str) -> RefusalError:
    text = f"it {what}, which thus cannot be continued; end with a message of the user's"
    return RefusalError("template", text)
