"""Brings a conversation that was checked into the forms that a chat template reads.

Null, absent and divided contents, and the text of a call's arguments, stay as they came wherever
the template can read them; elsewhere they become what it can read. The place of a picture, a part
`{"type": "image"}`, is never lost: a template that cannot have it there refuses the conversation.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from flashdraft.killable.child import RefusalError
from flashdraft.text import exact_json
from flashdraft.text.forms import TemplateForms

MAY_STAND_ALONE = ("tool_calls", "tool_responses", "reasoning_content")  # without a content
_READS_TOOL_ROLE = re.compile(
    r"role['\"\]\)]*\s*(?:==|!=|in|not in)\s*[\[(]?[^%}\n]*['\"]tool['\"]"
)


def fit_to_template(
    messages: list[dict[str, Any]], template: str, forms: TemplateForms
) -> list[dict[str, Any]]:
    """The same conversation in the words and forms that the template knows.

    A template that has never heard of developers would drop their message or fail: they become the
    system. One that reads tool results from the assistant's message gets them there.
    """
    if "developer" not in template:
        for message in messages:
            if message["role"] == "developer":
                message["role"] = "system"
    if "tool_responses" in template and not _READS_TOOL_ROLE.search(template):
        messages = _fold_results(messages)
    for message in messages:
        _fit_content(message, forms)
        for call in message.get("tool_calls") or ():
            _fit_arguments(call["function"], forms)
    return messages


def _fit_content(message: dict[str, Any], forms: TemplateForms) -> None:
    if message.get("content") is None:
        others = [name for name in MAY_STAND_ALONE if message.get(name)]
        if "content" not in message and forms.needs_content(others, absent=True):
            message["content"] = None
        if "content" in message and forms.needs_content(others, absent=False):
            message["content"] = ""
    content = message.get("content")
    if content is None:
        return
    form = forms.content(message["role"])
    if isinstance(content, str):
        if form == "parts":
            message["content"] = [{"type": "text", "text": content}]
    elif form == "text":
        if has_pictures(content):
            raise _lost_picture(message["role"])
        message["content"] = _joined(content)


def _fit_arguments(function: dict[str, Any], forms: TemplateForms) -> None:
    if "arguments" not in function:
        return
    form, arguments = forms.arguments(), function["arguments"]
    if isinstance(arguments, str):
        if form == "object":
            function["arguments"] = exact_json.read(arguments or "{}")
    elif form == "text":
        function["arguments"] = exact_json.write(arguments)


def has_pictures(content: Any) -> bool:
    """Whether a content has parts that are no text; they must stay parts."""
    return isinstance(content, list) and any(part["type"] != "text" for part in content)


def _lost_picture(role: str) -> RefusalError:
    remedy = "put the picture into a user message"
    if role == "user":
        remedy = "another template of the model may take pictures"
    return RefusalError("template", f"it reads {role} messages as text, without pictures; {remedy}")


def _joined(content: str | list[dict[str, Any]]) -> str:
    """Parts as one text, each on lines of its own, as vLLM has it."""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def _fold_results(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tool messages as `tool_responses` of the assistant's message that called.

    Those are texts: a result with a picture stays a message, as such a template has it itself.
    """
    folded: list[dict[str, Any]] = []
    for message in messages:
        last = folded[-1] if folded else None
        calls = last.get("tool_calls") if last is not None else None
        is_result = message["role"] == "tool" and not has_pictures(message["content"])
        if last is not None and calls and is_result:
            results = list(last.get("tool_responses") or ())
            name = message.get("name") or _called(calls, message, len(results))
            result = {"name": name, "response": _joined(message["content"])}
            last["tool_responses"] = [*results, result]
        elif (
            last is not None
            and last.get("tool_responses")
            and not last.get("content")
            and message["role"] == "assistant"
            and not message.get("tool_calls")
        ):
            last["content"] = message.get("content")  # said next, in the same turn
        else:
            folded.append(message)
    return folded


def _called(calls: Sequence[Mapping[str, Any]], message: Mapping[str, Any], number: int) -> str:
    """The name of the tool whose result this is: by the call's id, else by its place."""
    for call in calls:
        if call.get("id") is not None and call.get("id") == message.get("tool_call_id"):
            return str(call["function"]["name"])
    return str(calls[min(number, len(calls) - 1)]["function"]["name"])
