"""The messages, tools and settings of the chat API to what the engine is asked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flashdraft.chat.binding import ToolUse
from flashdraft.media.kinds import FILM, PDF
from flashdraft.server.answering.constraints import (
    check_function_tools,
    function_tools,
)
from flashdraft.server.answering.pictures import media_part, picture_part
from flashdraft.server.answering.questions import (
    ChatInput,
    Question,
    chat_question,
    spread,
    thinking_switches,
)
from flashdraft.server.answering.serving import Serving
from flashdraft.server.http.errors import FieldError
from flashdraft.server.http.picture_fields import budget_of
from flashdraft.server.openai.chat_fields import (
    AssistantMessage,
    ChatRequest,
    ContentPart,
    Message,
    NamedTool,
    ToolMessage,
)
from flashdraft.server.openai.common import output_form, sampling_fields


async def chat_questions(serving: Serving, body: ChatRequest) -> list[Question]:
    """What the engine is asked, once for each of the n answers."""
    serving.model_name(body.model)
    if body.top_logprobs and not body.logprobs:
        raise FieldError("top_logprobs", "top_logprobs is set without logprobs; set both.")
    tool_use = _tool_use(body)
    check_function_tools(serving, tool_use)
    form = output_form(serving, body)
    thinking = None if body.reasoning_effort is None else body.reasoning_effort != "none"
    switches = thinking_switches(serving, thinking, body.chat_template_kwargs)
    given = {
        **sampling_fields(body),
        "max_tokens": _first(body.max_completion_tokens, body.max_tokens),
        "logprobs": (body.top_logprobs or 0) if body.logprobs else None,
    }
    names = {"logprobs": "top_logprobs"}
    if body.max_completion_tokens is not None:
        names["max_tokens"] = "max_completion_tokens"
    conversation = ChatInput(
        chat_messages(body.messages),
        switches,
        _begins_turn(body),
        bool(body.continue_final_message),
    )
    asked = tool_use, form, given, body.drafting, names
    question = await chat_question(serving, conversation, *asked)
    return spread(serving, question, body.n)


def _begins_turn(body: ChatRequest) -> bool:
    if body.continue_final_message and body.add_generation_prompt:
        raise FieldError(
            "add_generation_prompt",
            "add_generation_prompt is true, and continue_final_message too: an answer goes on with "
            "the last message or begins a new one. Set one of them.",
        )
    return body.add_generation_prompt is not False


def _first(newer: int | None, older: int | None) -> int | None:
    return older if newer is None else newer


def _tool_use(body: ChatRequest) -> ToolUse:
    choice = body.tool_choice
    name = choice.function.name if isinstance(choice, NamedTool) else choice
    tools = function_tools(tool.function for tool in body.tools or ())
    return ToolUse(tools, name or "auto", body.parallel_tool_calls is not False)


def chat_messages(given: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages as chat templates want them, and each tool result with its tool's name."""
    names: dict[str, str] = {}
    messages = []
    for number, message in enumerate(given):
        content = _content(message.content, f"messages[{number}].content")
        made: dict[str, Any] = {"role": message.role, "content": content}
        if isinstance(message, AssistantMessage):
            fields = _assistant_fields(message)
            if message.content is None:
                made["content"] = message.refusal if fields else message.refusal or ""
            if made["content"] is None and "content" not in message.model_fields_set:
                del made["content"]
            made |= fields
            names |= {call.id: call.function.name for call in message.tool_calls or () if call.id}
        elif isinstance(message, ToolMessage):
            made["tool_call_id"] = message.tool_call_id
            name = message.name or names.get(message.tool_call_id or "")
            made |= {"name": name} if name else {}
        messages.append(made)
    return messages


def _assistant_fields(message: AssistantMessage) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    reasoning = message.reasoning_content or message.reasoning
    if reasoning:
        fields["reasoning_content"] = reasoning
    if message.tool_calls:
        fields["tool_calls"] = [
            call.model_dump(exclude={"index"}, exclude_none=True) for call in message.tool_calls
        ]
    return fields


def _content(
    content: str | list[ContentPart] | None, place: str
) -> str | list[dict[str, Any]] | None:
    if content is None or isinstance(content, str):
        return content
    return [_part(part, f"{place}[{number}]") for number, part in enumerate(content)]


def _part(part: ContentPart, place: str) -> dict[str, Any]:
    if (shown := part.image_url) is not None:
        budget = budget_of(shown.detail, shown.max_soft_tokens)
        return picture_part(shown.url, f"{place}.image_url.url", budget)
    if (film := part.video_url) is not None:
        return media_part(FILM, film.url, f"{place}.video_url.url")
    if (file := part.file) is not None:
        assert file.file_data is not None, "a part with a file has it"
        return media_part(PDF, file.file_data, f"{place}.file.file_data", file.max_soft_tokens)
    return {"type": "text", "text": part.text or part.refusal or ""}
