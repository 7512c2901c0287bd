"""Checks a conversation before it is rendered: texts, and pictures, films and PDFs among them.

Which roles and fields mean something is the template's business; they are passed on as they come.
What a template cannot read is brought into another form where it is rendered (text/fitting.py).
A picture has one form from here on, `{"type": "image", "image": …, "max_soft_tokens": …}`, a film
is a "video" and a PDF document a "pdf" in its place; nothing is opened here.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flashdraft.errors import RequestError, quoted
from flashdraft.media.kinds import FILM, PDF, PICTURE, Kind
from flashdraft.media.sizes import BUDGETS
from flashdraft.text import exact_json
from flashdraft.text.fitting import MAY_STAND_ALONE

Message = Mapping[str, Any]

_TEXT_PARTS = ("text", "input_text", "output_text")  # the chat API's, the Responses API's
_MEDIA_PARTS = {  # ours, the chat API's, the Responses API's, Anthropic's
    **dict.fromkeys(("image", "image_url", "input_image"), PICTURE),
    **dict.fromkeys(("video", "video_url", "input_video"), FILM),
    **dict.fromkeys(("pdf", "file", "input_file", "document"), PDF),
}
_WITH_PICTURES = ("user", "tool")  # roles
_NO_SOUND = "there is no hearing in these models: send what is said as text"
_REFUSED_PARTS = dict.fromkeys(("audio", "audio_url", "input_audio"), _NO_SOUND)
_DETAILS = {"low": 70, "auto": None, "high": 560}  # tokens; None: as the checkpoint has it
_THOUGHTS = ("reasoning_content", "thinking", "reasoning")  # templates differ


def check_messages(
    messages: Sequence[Message], *, may_name_files: bool = False
) -> list[dict[str, Any]]:
    """Copies of the messages, fit to be sent to a renderer once their pictures are taken out.

    `may_name_files`: whoever asks may read this machine's files and has Python's objects; a
    picture may then also be a path or a PIL image, and is bytes or a data: URL otherwise.
    """
    if isinstance(messages, str | bytes) or not isinstance(messages, Sequence) or not messages:
        raise RequestError(
            'messages must be a non-empty list of {"role": …, "content": …}, '
            f"not {quoted(messages)}."
        )
    return [
        _check_message(index, message, may_name_files) for index, message in enumerate(messages)
    ]


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


def _check_message(index: int, message: Message, may_name_files: bool) -> dict[str, Any]:
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
    if message.get("images"):  # as Ollama has it; a template would not see them
        raise RequestError(
            f"{where} has images beside its content; pictures are parts of the content: "
            '[{"type": "image", "image": …}, {"type": "text", "text": …}].'
        )
    content = message.get("content")
    if content is not None:
        checked["content"] = _check_content(where, role, content, may_name_files)
    elif role == "tool" or not any(checked.get(name) for name in MAY_STAND_ALONE):
        raise RequestError(f"{where} has no content; only a message with tool calls may lack it.")
    return checked


def _is_list_of_objects(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(one, Mapping) for one in value)


def _check_content(
    where: str, role: str, content: Any, may_name_files: bool
) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or isinstance(content, bytes | bytearray):
        raise RequestError(
            f"{where}.content is {quoted(content)}; it must be text, or a list of parts that are "
            "texts and pictures."
        )
    parts = []
    for number, part in enumerate(content):
        spot = f"{where}.content[{number}]"
        kind = part.get("type") if isinstance(part, Mapping) else None
        if isinstance(kind, str) and (media := _MEDIA_PARTS.get(kind)):
            if role not in _WITH_PICTURES:
                raise RequestError(
                    f"{spot} is a {media.noun} in a message of the role {quoted(role)}; "
                    f"{media.noun}s may stand in user messages and in tool results."
                )
            parts.append(_check_media(spot, part, media, may_name_files))
            continue
        if kind not in _TEXT_PARTS:
            why = _REFUSED_PARTS.get(kind) if isinstance(kind, str) else None
            why = why or "a part is a text, a picture, a film or a PDF"
            raise RequestError(f"{spot} is {quoted(kind or part)}; {why}.")
        if not isinstance(part.get("text"), str):
            raise RequestError(f"{spot}.text must be a string.")
        parts.append({**part, "type": "text"})
    return parts


def _check_media(
    where: str, part: Mapping[str, Any], kind: Kind, may_name_files: bool
) -> dict[str, Any]:
    """A part that is a picture, a film or a PDF, in our own form."""
    name = kind.part
    given, detail = _given(where, part, kind)
    checked = {"type": name, name: _check_file(where, given, kind, may_name_files)}
    budget = _check_budget(where, part.get("max_soft_tokens"), detail)
    if budget is not None and kind is FILM:
        raise RequestError(
            f"{where} says how many tokens a film may take, which is always the same: leave out "
            "max_soft_tokens and detail."
        )
    return checked if budget is None else {**checked, "max_soft_tokens": budget}


def _given(where: str, part: Mapping[str, Any], kind: Kind) -> tuple[Any, Any]:
    """The file of a part, wherever its API has it, and its detail."""
    detail, name = part.get("detail"), kind.part
    if part["type"] == name:
        return part.get(name), detail
    if kind is PDF:
        return _given_pdf(where, part), detail
    given: Any = part.get(f"{name}_url")
    if isinstance(given, Mapping):  # the chat API's
        return given.get("url"), given.get("detail", detail)
    return given, detail


def _given_pdf(where: str, part: Mapping[str, Any]) -> Any:
    """The chat API's, the Responses API's or Anthropic's."""
    held = {"file": part.get("file"), "document": part.get("source")}.get(part["type"], part)
    if not isinstance(held, Mapping):
        return held
    if part["type"] == "document":
        if held.get("type") == "base64" and isinstance(held.get("data"), str):
            return f"data:{held.get('media_type')};base64,{held['data']}"
    elif held.get("file_data") is not None:
        return held["file_data"]
    raise RequestError(
        f"{where} does not hold its file; send the file itself, as {PDF.example}… "
        "(nothing is stored or fetched here)."
    )


def _check_file(where: str, value: Any, kind: Kind, may_name_files: bool) -> Any:
    """What a picture, a film or a PDF is read from, checked for its form alone."""
    forms = f"a data: URL, such as {kind.example}…"
    if may_name_files:
        forms = f"bytes, a path, {'a PIL image, ' if kind is PICTURE else ''}or {forms}"
    if isinstance(value, bytes | bytearray | memoryview):
        if len(value) == 0:
            raise RequestError(f"{where} is a {kind.noun} of no bytes; give {forms}.")
        return bytes(value)
    if isinstance(value, str) and value:
        if value[:5].lower() == "data:":
            return value
        if "://" in value:
            raise RequestError(
                f"{where} is at {quoted(value)}, and nothing is fetched here; give {forms}."
            )
        if may_name_files:
            return Path(value)
    elif may_name_files and (
        isinstance(value, os.PathLike) or (kind is PICTURE and _is_pil_image(value))
    ):
        return value
    raise RequestError(f"{where} has {quoted(value)} for a {kind.noun}; give {forms}.")


def _is_pil_image(value: object) -> bool:
    """Pillow is not loaded for that: who has one of its pictures has loaded it."""
    pillow = sys.modules.get("PIL.Image")
    return pillow is not None and isinstance(value, pillow.Image)


def _check_budget(where: str, budget: Any, detail: Any) -> int | None:
    """How many tokens a picture may take; None where the checkpoint decides."""
    if detail is not None and (not isinstance(detail, str) or detail not in _DETAILS):
        known = ", ".join(_DETAILS)
        raise RequestError(f"{where}.detail is {quoted(detail)}; it must be one of {known}.")
    said = _DETAILS[detail] if detail is not None else None
    if budget is None:
        return said
    if type(budget) is not int or budget not in BUDGETS:
        known = ", ".join(map(str, BUDGETS))
        raise RequestError(
            f"{where}.max_soft_tokens is {quoted(budget)}; it must be one of {known}."
        )
    if said not in (None, budget):
        raise RequestError(
            f"{where} has a detail of {quoted(detail)}, which is {said} tokens, and "
            f"max_soft_tokens of {budget}; give one of them."
        )
    return budget


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
