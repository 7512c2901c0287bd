"""The items, tools and settings of /v1/responses to what the engine is asked."""

from __future__ import annotations

import json
from typing import Any

from flashdraft.chat.binding import ToolUse
from flashdraft.core import GrammarSpec
from flashdraft.media.kinds import PDF
from flashdraft.server.answering.constraints import check_tools, json_schema_grammar
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
from flashdraft.server.openai.responses_fields import (
    ChosenTool,
    InputFunctionCall,
    InputFunctionOutput,
    InputMessage,
    InputReasoning,
    ResponsePart,
    ResponsesRequest,
)

LOGPROBS = "message.output_text.logprobs"
_PASSED_ON = ("temperature", "top_p", "top_k", "min_p", "seed", "stop", "ignore_eos")

_NAMES = {"messages": "input", "max_tokens": "max_output_tokens", "logprobs": "top_logprobs"}


async def question_of(serving: Serving, body: ResponsesRequest) -> Question:
    """What the engine is asked."""
    serving.model_name(body.model)
    tool_use = _tool_use(body)
    numbers = [n for n, tool in enumerate(body.tools or ()) if tool.type == "function"]
    check_tools(serving, tool_use, [f"tools[{n}].parameters" for n in numbers])
    form = _format(serving, body)
    effort = body.reasoning.effort if body.reasoning else None
    thinking = None if effort is None else effort != "none"
    switches = thinking_switches(serving, thinking, body.chat_template_kwargs)
    wants_logprobs = body.top_logprobs is not None or LOGPROBS in (body.include or ())
    given = {
        **{name: getattr(body, name) for name in _PASSED_ON},
        "max_tokens": body.max_output_tokens,
        "logprobs": (body.top_logprobs or 0) if wants_logprobs else None,
    }
    conversation = ChatInput(chat_messages(body), switches)
    asked = tool_use, form, given, body.drafting, _NAMES
    question = await chat_question(serving, conversation, *asked)
    return spread(serving, question, 1)[0]


def _format(serving: Serving, body: ResponsesRequest) -> GrammarSpec | None:
    wanted = body.text.format if body.text else None
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return GrammarSpec("json_object")
    if wanted.schema_ is None:
        raise FieldError("text.format.schema", "text.format.schema is missing; it is required.")
    return json_schema_grammar(serving, wanted.schema_, "text.format.schema")


def _tool_use(body: ResponsesRequest) -> ToolUse:
    tools = []
    for number, tool in enumerate(body.tools or ()):
        if tool.type != "function":
            continue  # hosted: the model is not told of it, so it never calls it
        if not tool.name:
            raise FieldError(f"tools[{number}].name", f"tools[{number}].name is missing.")
        function = {
            "name": tool.name,
            "description": tool.description or "",
            "parameters": tool.parameters or {"type": "object", "properties": {}},
            "strict": bool(tool.strict),
        }
        tools.append({"type": "function", "function": function})
    choice = body.tool_choice
    name = choice.name if isinstance(choice, ChosenTool) else choice
    return ToolUse(tuple(tools), name or "auto", body.parallel_tool_calls is not False)


def chat_messages(body: ResponsesRequest) -> list[dict[str, Any]]:
    """The conversation as chat templates want it: what the model did in one turn is one message."""
    messages: list[dict[str, Any]] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": body.input}]
    names: dict[str, str] = {}
    for number, item in enumerate(body.input):
        if isinstance(item, InputMessage) and item.role != "assistant":
            content = _content(item.content, f"input[{number}].content")
            messages.append({"role": item.role, "content": content})
        elif isinstance(item, InputFunctionOutput):
            output = _content(item.output, f"input[{number}].output")
            made = {"role": "tool", "tool_call_id": item.call_id, "content": output}
            name = names.get(item.call_id)
            messages.append({**made, "name": name} if name else made)
        else:
            if isinstance(item, InputFunctionCall):
                names[item.call_id] = item.name
                _check_arguments(item, f"input[{number}].arguments")
            _add_to_turn(messages, item)
    for message in messages:
        if message.get("tool_calls") and not message["content"]:
            message["content"] = (
                None  # what the chat API has where the model called and said nothing
            )
    return messages


def _check_arguments(call: InputFunctionCall, where: str) -> None:
    try:
        arguments = json.loads(call.arguments or "{}")
    except (ValueError, RecursionError) as error:
        raise FieldError(where, f"{where} is not valid JSON: {error}.") from None
    if not isinstance(arguments, dict):
        raise FieldError(where, f"{where} must be a JSON object.")


def _add_to_turn(
    messages: list[dict[str, Any]], item: InputMessage | InputFunctionCall | InputReasoning
) -> None:
    """Add what the model said, thought or called to its turn; text after calls is a new one."""
    is_open = bool(messages) and messages[-1]["role"] == "assistant"
    if is_open and "tool_calls" in messages[-1] and not isinstance(item, InputFunctionCall):
        is_open = False
    if not is_open:
        messages.append({"role": "assistant", "content": ""})
    turn = messages[-1]
    if isinstance(item, InputMessage):
        said = _content(item.content, "")
        turn["content"] = said if not turn["content"] else [*_parts(turn["content"]), *_parts(said)]
    elif isinstance(item, InputReasoning):
        thoughts = turn.get("reasoning_content", "") + _text(item.content or item.summary or [])
        if thoughts:
            turn["reasoning_content"] = thoughts
    else:
        function = {"name": item.name, "arguments": item.arguments}
        call = {"id": item.call_id, "type": "function", "function": function}
        turn.setdefault("tool_calls", []).append(call)


def _text(content: str | list[ResponsePart]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part.text or part.refusal or "" for part in content)


def _content(content: str | list[ResponsePart], place: str) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    return [_part(part, f"{place}[{number}]") for number, part in enumerate(content)]


def _part(part: ResponsePart, place: str) -> dict[str, Any]:
    budget = budget_of(part.detail, part.max_soft_tokens)
    if part.image_url is not None:
        return picture_part(part.image_url, f"{place}.image_url", budget)
    for name in ("file_data", "file_url"):
        if (file := getattr(part, name)) is not None:
            return media_part(PDF, file, f"{place}.{name}", budget)
    return {"type": "text", "text": part.text or part.refusal or ""}


def _parts(content: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content
