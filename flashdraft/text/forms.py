"""Which forms of a message a chat template can read, found by rendering small conversations.

A template is a program: whether it goes through parts, tests for none or concatenates may hide
behind macros and variables, and differ from role to role; what it prints cannot hide. It knows no
family, and not how rendering is done: it is given a function for that. What it finds for a
template holds for every request, so that its owner keeps it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection
from typing import Any, Literal, NamedTuple

ContentForm = Literal["text", "parts", "both"]
ArgumentsForm = Literal["text", "object", "both"]
Render = Callable[[list[dict[str, Any]]], str | None]  # None where the template refuses

_FIRST, _SECOND = "qwxfirstz", "qwxsecondz"  # nothing that a template says itself
_USER = {"role": "user", "content": "Hi"}
_ID = "qwxcall01"  # some templates want nine letters and digits
_OBJECT = {_FIRST: _SECOND}
_TEXT = f'{{"{_FIRST}" :"{_SECOND}"}}'  # as nobody spaces it: written anew, it differs
_JSON = re.compile(rf'\{{\s*"{_FIRST}"\s*:\s*"{_SECOND}"\s*\}}')


class TemplateForms:
    """What one template reads; every answer is found at the first question."""

    def __init__(self, render: Render) -> None:
        self._render = render
        self.content = functools.lru_cache(maxsize=16)(self._content)  # roles are the client's
        self._needs_content = functools.cache(self._find_needs_content)
        self._reading = functools.cache(self._find_reading)

    def needs_content(self, others: Collection[str], *, absent: bool) -> bool:
        """Whether an assistant's message must have a text, where it was null or absent.

        `others` are the fields it has instead: tool_calls, tool_responses, reasoning_content.
        """
        return self._needs_content(frozenset(others), absent)

    def _content(self, role: str) -> ContentForm:
        """How the content of a role may come: as text, as a list of text parts, or as both."""
        text = self._render(self._conversation(role, _FIRST + _SECOND))
        parts = self._render(self._conversation(role, [_part(_FIRST), _part(_SECOND)]))
        takes_text = text is not None and _FIRST + _SECOND in text
        takes_parts = (
            parts is not None
            and -1 < parts.find(_FIRST) < parts.find(_SECOND)
            # The list in Python's spelling or in JSON is not what the client said.
            and not any(quote + _FIRST + quote in parts for quote in "'\"")
        )
        if takes_parts:
            return "both" if takes_text else "parts"
        return "text"

    def _conversation(self, role: str, content: Any) -> list[dict[str, Any]]:
        message = {"role": role, "content": content}
        if role == "tool":
            message |= {"tool_call_id": _ID, "name": "f"}
            return [_USER, self._some_call(), message]
        if role == "assistant":
            return [_USER, message, _USER]
        return [message] if role == "user" else [message, _USER]

    def _find_needs_content(self, others: frozenset[str], absent: bool) -> bool:
        """Whether the template fails without a text, or prints Python's word for none."""
        spoken: dict[str, Any] = {"role": "assistant"}
        conversation = [_USER, spoken, _USER]
        if "tool_calls" in others:
            spoken |= self._some_call()
            conversation = _called(spoken)
        if "tool_responses" in others:
            spoken["tool_responses"] = [{"name": "f", "response": "x"}]
            conversation = [_USER, spoken]
        if "reasoning_content" in others:
            spoken |= dict.fromkeys(("reasoning_content", "reasoning", "thinking"), "x")
        spoken["content"] = [_part("")] if self.content("assistant") == "parts" else ""
        silent = {**spoken, "content": None}
        if absent:
            del silent["content"]
        with_text = self._render(conversation)
        without = self._render([silent if one is spoken else one for one in conversation])
        if without is None or with_text is None:
            return with_text is not None
        return without.count("None") > with_text.count("None")

    def arguments(self) -> ArgumentsForm:
        """How the arguments of past calls may come: as JSON text, as an object, or as both.

        An object that the template writes in a form of its own is what its model has learned:
        then text, though printed, is not read.
        """
        return self._reading().form

    def _some_call(self) -> dict[str, Any]:
        reading = self._reading()
        return _call(reading.content, _TEXT if reading.form == "text" else _OBJECT)

    def _find_reading(self) -> _Reading:
        """Templates may read calls only beside a content that is null, or fail on it."""
        shown = None
        for content in (None, "", [_part("")]):
            text = self._render(_called(_call(content, _TEXT))) or ""
            written = self._render(_called(_call(content, _OBJECT)))
            if shown is None and written is not None:
                shown = _Reading(content, "object")
            reads_object = _FIRST in (written or "") and repr(_OBJECT) not in (written or "")
            if _TEXT in text:
                if not reads_object:
                    return _Reading(content, "text")
                return _Reading(content, "both" if _JSON.search(written or "") else "object")
            if reads_object:
                return _Reading(content, "object")
        return shown or _Reading("", "object")


class _Reading(NamedTuple):
    """A message with a call that the template shows: its content, and the arguments' form."""

    content: Any
    form: ArgumentsForm


def _part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _call(content: Any, arguments: Any) -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments}
    call = {"id": _ID, "type": "function", "function": function}
    return {"role": "assistant", "content": content, "tool_calls": [call]}


def _called(message: dict[str, Any]) -> list[dict[str, Any]]:
    result = {"role": "tool", "tool_call_id": _ID, "name": "f", "content": "x"}
    return [_USER, message, result]
