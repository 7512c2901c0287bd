"""Checks a conversation and brings it into the form that chat templates read: text only, for now.

Which roles and fields mean something is the template's business; they are passed on as they come.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from flashdraft.errors import RequestError

Message = Mapping[str, Any]

_TEXT_PARTS = ("text", "input_text", "output_text")  # the chat API's, the Responses API's
_READS_TOOL_ROLE = re.compile(
    r"role['\"\]\)]*\s*(?:==|!=|in|not in)\s*[\[(]?[^%}\n]*['\"]tool['\"]"
)


def check_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Copies of the messages with text parts joined and tool-call arguments as objects."""
    if isinstance(messages, str | bytes) or not isinstance(messages, Sequence) or not messages:
        raise RequestError(
            'messages must be a non-empty list of {"role": …, "content": …}, '
            f"not {brief(messages)}."
        )
    return [_check_message(index, message) for index, message in enumerate(messages)]


def check_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Copies of the tools; None where there are none."""
    if tools is None:
        return None
    if not isinstance(tools, Sequence) or isinstance(tools, str | bytes):
        raise RequestError(f"tools is {brief(tools)}; it must be a list of objects.")
    if not tools:
        return None
    for number, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise RequestError(f"tools[{number}] is {brief(tool)}; it must be an object.")
    return [dict(tool) for tool in tools]


def fit_to_template(messages: list[dict[str, Any]], template: str) -> list[dict[str, Any]]:
    """The same conversation in the words that the template knows.

    A template that has never heard of developers would drop their message or fail: they become the
    system. One that reads tool results from the assistant's message gets them there.
    """
    if "developer" not in template:
        for message in messages:
            if message["role"] == "developer":
                message["role"] = "system"
    if "tool_responses" in template and not _READS_TOOL_ROLE.search(template):
        return _fold_results(messages)
    return messages


def _fold_results(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tool messages as `tool_responses` of the assistant's message that called."""
    folded: list[dict[str, Any]] = []
    for message in messages:
        last = folded[-1] if folded else None
        calls = last.get("tool_calls") if last is not None else None
        if last is not None and calls and message["role"] == "tool":
            results = list(last.get("tool_responses") or ())
            name = message.get("name") or _called(calls, message, len(results))
            last["tool_responses"] = [*results, {"name": name, "response": message["content"]}]
        elif (
            last is not None
            and last.get("tool_responses")
            and not last["content"]
            and message["role"] == "assistant"
            and not message.get("tool_calls")
        ):
            last["content"] = message["content"]  # what it said next belongs to the same turn
        else:
            folded.append(message)
    return folded


def _called(calls: Sequence[Mapping[str, Any]], message: Message, number: int) -> str:
    """The name of the tool whose result this is: by the call's id, else by its place."""
    for call in calls:
        if call.get("id") is not None and call.get("id") == message.get("tool_call_id"):
            return str(call["function"]["name"])
    return str(calls[min(number, len(calls) - 1)]["function"]["name"])


def _check_message(index: int, message: Message) -> dict[str, Any]:
    where = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise RequestError(f"{where} is {brief(message)}; it must be an object.")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise RequestError(
            f"{where}.role is {brief(role)}; it must be a name such as 'system', 'user' or "
            "'assistant'."
        )
    checked = dict(message)
    calls = message.get("tool_calls")
    if calls:
        checked["tool_calls"] = _check_calls(where, calls)
    content = message.get("content")
    may_lack = ("tool_calls", "tool_responses", "reasoning_content")
    if content is None and not any(message.get(name) for name in may_lack):
        raise RequestError(f"{where} has no content; only a message with tool calls may lack it.")
    checked["content"] = "" if content is None else _text_of(where, content)
    return checked


def _text_of(where: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise RequestError(
            f"{where}.content is {brief(content)}; it must be text or a list of text parts."
        )
    texts = []
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in _TEXT_PARTS:
            raise RequestError(
                f"{where}.content[{number}] is {brief(kind or part)}; only text parts are "
                "supported: images, audio and video are refused."
            )
        if not isinstance(part.get("text"), str):
            raise RequestError(f"{where}.content[{number}].text must be a string.")
        texts.append(part["text"])
    return "\n".join(texts)


def _check_calls(where: str, calls: Any) -> list[dict[str, Any]]:
    """Tool calls whose arguments are objects: clients send JSON text, templates want the values."""
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise RequestError(f"{where}.tool_calls is {brief(calls)}; it must be a list.")
    checked = []
    for number, call in enumerate(calls):
        spot = f"{where}.tool_calls[{number}]"
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RequestError(f"{spot} needs a function with a name.")
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
            except (ValueError, RecursionError) as error:
                raise RequestError(
                    f"{spot}.function.arguments is not valid JSON: {error}."
                ) from None
        if not isinstance(arguments, Mapping):
            raise RequestError(f"{spot}.function.arguments must be a JSON object.")
        checked.append({**call, "function": {**function, "arguments": dict(arguments)}})
    return checked


def brief(value: Any) -> str:
    """A value for a message to the user."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"
