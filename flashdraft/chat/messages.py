"""Checks a conversation before it is rendered: text only, for now.

Which roles and fields mean something is the template's business; they are passed on as they come.
What a template cannot read is brought into another form where it is rendered (text/fitting.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flashdraft.errors import RequestError, quoted
from flashdraft.text import exact_json
from flashdraft.text.fitting import MAY_STAND_ALONE

Message = Mapping[str, Any]

_TEXT_PARTS = ("text", "input_text", "output_text")  # the chat API's, the Responses API's
_THOUGHTS = ("reasoning_content", "thinking", "reasoning")  # templates differ


def check_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Copies of the messages, fit to be sent to a renderer: text, and JSON that can be read."""
    if isinstance(messages, str | bytes) or not isinstance(messages, Sequence) or not messages:
        raise RequestError(
            'messages must be a non-empty list of {"role": …, "content": …}, '
            f"not {quoted(messages)}."
        )
    return [_check_message(index, message) for index, message in enumerate(messages)]


def check_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Copies of the tools; None where there are none."""
    if tools is None:
        return None
    if not isinstance(tools, Sequence) or isinstance(tools, str | bytes):
        raise RequestError(f"tools is {quoted(tools)}; it must be a list of objects.")
    if not tools:
        return None
    for number, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise RequestError(f"tools[{number}] is {quoted(tool)}; it must be an object.")
    return [dict(tool) for tool in tools]


def _check_message(index: int, message: Message) -> dict[str, Any]:
    where = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise RequestError(f"{where} is {quoted(message)}; it must be an object.")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise RequestError(
            f"{where}.role is {quoted(role)}; it must be a name such as 'system', 'user' or "
            "'assistant'."
        )
    checked = dict(message)
    thoughts = next((message[name] for name in _THOUGHTS if message.get(name) is not None), None)
    if thoughts is not None:
        checked = {**dict.fromkeys(_THOUGHTS, thoughts), **message, "reasoning_content": thoughts}
    calls = message.get("tool_calls")
    if calls:
        checked["tool_calls"] = _check_calls(where, calls)
    results = message.get("tool_responses")
    if results is not None and not _is_list_of_objects(results):
        raise RequestError(
            f"{where}.tool_responses is {quoted(results)}; it must be a list of objects."
        )
    content = message.get("content")
    if content is not None:
        checked["content"] = _check_content(where, content)
    elif role == "tool" or not any(checked.get(name) for name in MAY_STAND_ALONE):
        raise RequestError(f"{where} has no content; only a message with tool calls may lack it.")
    return checked


def _is_list_of_objects(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(one, Mapping) for one in value)


def _check_content(where: str, content: Any) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise RequestError(
            f"{where}.content is {quoted(content)}; it must be text or a list of text parts."
        )
    parts = []
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in _TEXT_PARTS:
            raise RequestError(
                f"{where}.content[{number}] is {quoted(kind or part)}; only text parts are "
                "supported: images, audio and video are refused."
            )
        if not isinstance(part.get("text"), str):
            raise RequestError(f"{where}.content[{number}].text must be a string.")
        parts.append({**part, "type": "text"})
    return parts


def _check_calls(where: str, calls: Any) -> list[dict[str, Any]]:
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise RequestError(f"{where}.tool_calls is {quoted(calls)}; it must be a list.")
    checked = []
    for number, call in enumerate(calls):
        spot = f"{where}.tool_calls[{number}]"
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RequestError(f"{spot} needs a function with a name.")
        _check_arguments(f"{spot}.function.arguments", function.get("arguments", {}))
        checked.append({**call, "function": dict(function)})
    return checked


def _check_arguments(where: str, arguments: Any) -> None:
    try:
        if isinstance(arguments, str):
            arguments = exact_json.read(arguments or "{}")
        exact_json.write(arguments)  # the reader takes NaN, which no JSON has
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"{where} is not valid JSON: {error}.") from None
    if not isinstance(arguments, Mapping):
        raise RequestError(f"{where} must be a JSON object.")
