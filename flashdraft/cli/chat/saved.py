"""Conversations in files: written with their settings, and read back with every doubt.

A .json file holds the messages, the settings and the model's name; any other one is text to read,
which is not read back. Pictures are named, not copied: they are read again from their own files.
Only regular files are written and read.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashdraft.cli.chat.conversation import Conversation, Message
from flashdraft.cli.files import write_text
from flashdraft.cli.input import decoded
from flashdraft.cli.pictures import PictureFile, read_picture
from flashdraft.errors import RequestError, quoted, shortened
from flashdraft.media.kinds import KINDS
from flashdraft.media.sizes import BUDGETS

MAX_BYTES = 4 * 2**20
MAX_MESSAGES = 4096
_KEYS = ("messages", "settings", "model")
_ROLES = ("system", "user", "assistant")


@dataclass(frozen=True)
class SavedChat:
    """A conversation as a file has it; settings are checked by whoever takes them."""

    conversation: Conversation
    settings: Mapping[str, Any]
    model: str | None


def save_chat(
    path: Path, conversation: Conversation, settings: Mapping[str, Any], model: str
) -> None:
    """Write the whole conversation: for a .json file as `load_chat` reads it, else as text."""
    if path.exists() and not path.is_file():
        raise RequestError(f"{path} is no regular file; name one.")
    messages = conversation.messages()
    if path.suffix.lower() == ".json":
        content = {"model": model, "settings": dict(settings), "messages": messages}
        text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    else:
        text = "\n".join(f"## {m['role']}\n\n{_as_text(m['content'])}\n" for m in messages)
    write_text(path, text)


def load_chat(path: Path) -> SavedChat:
    """Read a .json file that /save wrote, or messages in OpenAI's form; RequestError otherwise."""
    text = decoded(_read(path), str(path))
    try:
        content = json.loads(text)
    except RecursionError:
        raise RequestError(f"{path} is nested too deeply for a conversation.") from None
    except ValueError as error:
        raise RequestError(f"{path} is not readable as JSON: {shortened(error)}.") from None
    if not isinstance(content, dict) or not isinstance(content.get("messages"), list):
        raise RequestError(f"{path} has no list of `messages`, as /save writes it.")
    for key in content:
        if key not in _KEYS:
            raise RequestError(
                f"{path} has {quoted(key)}; a conversation has only {', '.join(_KEYS)}."
            )
    settings, model = content.get("settings", {}), content.get("model")
    if not isinstance(settings, dict) or not isinstance(model, str | None):
        raise RequestError(f"{path}: `settings` must be an object and `model` a name.")
    if len(content["messages"]) > MAX_MESSAGES:
        raise RequestError(
            f"{path} has {len(content['messages']):,} messages; {MAX_MESSAGES:,} are taken."
        )
    messages = [_message(path, n, one) for n, one in enumerate(content["messages"], 1)]
    try:
        conversation = Conversation.of(messages)
    except RequestError as error:
        raise RequestError(f"{path}: {error}") from None
    return SavedChat(conversation, settings, model)


def _as_text(content: str | list[dict[str, Any]]) -> str:
    """A content to be read; the pictures of a question go before it."""
    if isinstance(content, str):
        return content
    nouns = {kind.part: kind.noun for kind in KINDS}
    lines = (
        f"[{nouns[kind]}: {part[kind]}]" if (kind := part["type"]) in nouns else part["text"]
        for part in content
    )
    return "\n".join(lines)


def _read(path: Path) -> bytes:
    try:
        # without waiting: somebody else's pipe of that name may have nobody at its other end
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise RequestError(f"{path} is no regular file; name one that /save wrote.")
            data = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        reason = getattr(error, "strerror", None) or error
        raise RequestError(f"{path} cannot be read: {reason}.") from None
    if len(data) > MAX_BYTES:
        raise RequestError(f"{path} has more than {MAX_BYTES:,} bytes; no context holds that.")
    return data


def _message(path: Path, number: int, message: Any) -> Message:
    where = f"{path}: message {number}"
    if not isinstance(message, dict) or message.keys() != {"role", "content"}:
        raise RequestError(f"{where} must have `role` and `content`, and nothing else.")
    role, content = message["role"], message["content"]
    if role not in _ROLES:
        raise RequestError(f"{where} has the role {quoted(role)}; known are {', '.join(_ROLES)}.")
    parts = list[Any]()
    if isinstance(content, list) and len(content) > 1 and role == "user":
        *parts, last = content
        content = last.get("text") if isinstance(last, dict) else last
    if not isinstance(content, str):
        raise RequestError(
            f"{where} has {quoted(content)} for text; it must be a string, or in a question "
            "pictures and a text, as /save writes them."
        )
    try:
        content.encode("utf-8")
    except UnicodeEncodeError:
        raise RequestError(f"{where} has half a character (a lone surrogate).") from None
    pictures = [_picture(where, part) for part in parts]
    return {"role": role, "content": content, "pictures": pictures}


def _picture(where: str, part: Any) -> PictureFile:
    """A picture of a question, read from the file that is named."""
    named = part.get("type") if isinstance(part, dict) else None
    kind = next((one for one in KINDS if one.part == named), None)
    name = part.get(kind.part) if kind is not None else None
    if kind is None or not isinstance(name, str) or not name:
        raise RequestError(
            f"{where} has {quoted(part)} before its text; there may be pictures, as "
            '{"type": "image", "image": FILE}, and films and PDFs.'
        )
    budget = part.get("max_soft_tokens")
    if budget is not None and (type(budget) is not int or budget not in BUDGETS):
        known = ", ".join(map(str, BUDGETS))
        raise RequestError(
            f"{where} has max_soft_tokens of {quoted(budget)}; it must be one of {known}."
        )
    try:
        return read_picture(name, budget, kind)
    except RequestError as error:
        raise RequestError(f"{where}: {error}") from None
