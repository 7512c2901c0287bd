"""Tools for models whose template does not show them: told in the prompt.

The functions stand in the system message, a call is Hermes' `<tool_call>{json}</tool_call>` as
text, and what a function returned is the user's next message. A grammar makes sure that a call that
must come is one (grammar/hermes.py); what is free is read back as it is for Hermes, and without
marks where an answer begins with a call, since models forget them. A template that writes tools in
a format that is not known here is left to do so; calls of it can be forced.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flashdraft.chat.answers import hermes
from flashdraft.chat.answers.marks import MarkKind
from flashdraft.text import exact_json
from flashdraft.text.fitting import has_pictures

_CALL, _END_CALL = (hermes.CALL_SPELLINGS[mark] for mark in (MarkKind.CALL, MarkKind.END_CALL))
_TOLD = f"""You may call these functions, each described by a JSON object:
{{functions}}
To call one, write nothing but its name and an object with its arguments, as JSON:
{_CALL}
{{{{"name": NAME, "arguments": ARGUMENTS}}}}
{_END_CALL}
What it returns comes in the next message. Without a need for a function, answer as usual."""
_RETURNED = "<tool_response>\n{text}\n</tool_response>"
_GAP = "\n\n"


def ignores_tools(template: str, tools: Sequence[Any] | None) -> bool:
    """Whether a template has no word for tools, their calls or what came of them.

    Some have words for calls and results alone, and would drop the tools that are offered.
    """
    return ("tools" if tools else "tool") not in template


def prompt_tools(
    messages: Sequence[dict[str, Any]], tools: Sequence[Mapping[str, Any]] | None, template: str
) -> list[dict[str, Any]]:
    """A checked conversation in which tools, calls and what came of them are text."""
    written = [_without_calls(message) for message in _joined_results(messages)]
    if not tools:
        return written
    told = _TOLD.format(functions="\n".join(exact_json.write(_described(tool)) for tool in tools))
    role = "system" if "system" in template else "user"
    first = written[0] if written else None
    if first is not None and first["role"] in (role, "developer"):
        return [{**first, "content": _before(first.get("content"), told, role)}, *written[1:]]
    return [{"role": role, "content": told}, *written]


def _described(tool: Mapping[str, Any]) -> dict[str, Any]:
    """What the model must know of a tool."""
    function = tool.get("function", tool)
    known = function if isinstance(function, Mapping) else {}
    return {name: known[name] for name in ("name", "description", "parameters") if name in known}


def _before(content: Any, told: str, role: str) -> Any:
    """A first message that tells of tools too: behind the system's words, before the user's."""
    if isinstance(content, list):
        part = [{"type": "text", "text": told}]
        return [*content, *part] if role == "system" else [*part, *content]
    words = [content or "", told] if role == "system" else [told, content or ""]
    return _GAP.join(filter(None, words))


def _without_calls(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose calls stand in its text."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    rest = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**rest, "content": _GAP.join([*_texts(message.get("content")), *map(_written, calls)])}


def _written(call: Mapping[str, Any]) -> str:
    function = call["function"]
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = exact_json.read(arguments or "{}")
    content = {"name": function["name"], "arguments": arguments or {}}
    return f"{_CALL}\n{exact_json.write(content)}\n{_END_CALL}"


def _joined_results(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What functions returned, as messages of the user; those of one turn are one message.

    A result's pictures follow its text.
    """
    joined: list[dict[str, Any]] = []
    was_result = False
    for message in messages:
        if is_result := message["role"] == "tool":
            returned = _returned(message.get("content"))
            if was_result:
                joined[-1]["content"] = _behind(joined[-1]["content"], returned)
            else:
                joined.append({"role": "user", "content": returned})
        else:
            joined.append(message)
        was_result = is_result
    return joined


def _returned(content: Any) -> str | list[dict[str, Any]]:
    text = _RETURNED.format(text="\n".join(_texts(content)))
    if not has_pictures(content):
        return text
    pictures = [part for part in content if part["type"] != "text"]
    return [{"type": "text", "text": text}, *pictures]


def _behind(before: str | list[dict[str, Any]], text: str | list[dict[str, Any]]) -> Any:
    """Two contents as one."""
    if isinstance(before, str) and isinstance(text, str):
        return f"{before}\n{text}"
    parts: list[dict[str, Any]] = []
    for content in (before, text):
        parts += [{"type": "text", "text": content}] if isinstance(content, str) else content
    return parts


def _texts(content: Any) -> list[str]:
    if isinstance(content, list):
        return [part["text"] for part in content if part["type"] == "text"]
    return [content] if content else []
