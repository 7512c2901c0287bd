"""Anthropic's conversation, tools and settings to what the engine is asked."""

from __future__ import annotations

import json
from typing import Any

from flashdraft.chat.binding import ToolUse
from flashdraft.core import GrammarSpec
from flashdraft.media.kinds import PDF, PICTURE
from flashdraft.server.answering.constraints import check_tools, json_schema_grammar
from flashdraft.server.answering.pictures import media_part
from flashdraft.server.answering.questions import (
    ChatInput,
    Question,
    chat_question,
    conversation_prompt,
    spread,
    thinking_switches,
)
from flashdraft.server.answering.serving import Serving
from flashdraft.server.anthropic.fields import (
    AnthropicMessage,
    ContentBlock,
    CountTokensRequest,
    MessagesRequest,
)
from flashdraft.server.http.errors import FieldError

# Claude Code opens its system prompt with a line that is new in every request: with it no prompt
# would ever be found in the prefix cache, and it tells the model nothing.
_BILLING = "x-anthropic-billing-header:"


async def prompt_of(serving: Serving, body: CountTokensRequest) -> list[int]:
    """The token ids of the conversation."""
    serving.model_name(body.model)
    tool_use = tool_use_of(body)
    _check_tools(serving, tool_use)
    conversation = _conversation(serving, body)
    return (await conversation_prompt(serving, conversation, tool_use.offered)).token_ids


def _check_tools(serving: Serving, tool_use: ToolUse) -> None:
    check_tools(serving, tool_use, [f"tools[{n}].input_schema" for n in range(len(tool_use.tools))])


def _conversation(serving: Serving, body: CountTokensRequest) -> ChatInput:
    """The conversation; one that ends with the assistant is continued there (prefill).

    Whether the model is to think: Anthropic's default is that it does not.
    """
    thinking = body.thinking is not None and body.thinking.type != "disabled"
    is_open = bool(body.messages) and body.messages[-1].role == "assistant"
    switches = thinking_switches(serving, thinking, None)
    return ChatInput(chat_messages(body), switches, not is_open, is_open)


async def question_of(serving: Serving, body: MessagesRequest) -> Question:
    """What the engine is asked."""
    serving.model_name(body.model)
    tool_use = tool_use_of(body)
    _check_tools(serving, tool_use)
    form = _format(serving, body)
    given = {
        "max_tokens": body.max_tokens,
        "stop": body.stop_sequences,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
    }
    question = await chat_question(
        serving,
        _conversation(serving, body),
        tool_use,
        form,
        given,
        body.drafting,
        {"stop": "stop_sequences"},
    )
    return spread(serving, question, 1)[0]


def _format(serving: Serving, body: MessagesRequest) -> GrammarSpec | None:
    if body.output_config is not None and body.output_config.format is not None:
        schema = body.output_config.format.schema_
        return json_schema_grammar(serving, schema, "output_config.format.schema")
    if body.output_format is not None:
        return json_schema_grammar(serving, body.output_format.schema_, "output_format.schema")
    return None


def tool_use_of(body: CountTokensRequest) -> ToolUse:
    """Tools in the chat template's shape, and the choice among them."""
    tools = tuple(
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description or "",
                "parameters": tool.input_schema or {"type": "object", "properties": {}},
                "strict": bool(tool.strict),
            },
        }
        for tool in body.tools or ()
    )
    choice = body.tool_choice
    if choice is None:
        return ToolUse(tools)
    if choice.type == "tool" and not choice.name:
        raise FieldError("tool_choice.name", "tool_choice.name is missing; it names the tool.")
    names = {"any": "required", "tool": choice.name or "", "auto": "auto", "none": "none"}
    return ToolUse(tools, names[choice.type], not choice.disable_parallel_tool_use)


def chat_messages(body: CountTokensRequest) -> list[dict[str, Any]]:
    """The conversation as chat templates want it."""
    if not body.messages:
        raise FieldError("messages", "messages is empty; it needs at least one message.")
    messages: list[dict[str, Any]] = []
    system = _system_text(body.system)
    if system:
        messages.append({"role": "system", "content": system})
    names: dict[str, str] = {}
    for number, message in enumerate(body.messages):
        if isinstance(message.content, str):
            messages.append({"role": message.role, "content": message.content})
        elif message.role == "assistant":
            messages.append(_assistant(message.content, names))
        else:
            messages += _user(message, names, f"messages[{number}].content")
    return messages


def _system_text(system: str | list[ContentBlock] | None) -> str:
    if system is None or isinstance(system, str):
        return system or ""
    texts = [block.text or "" for block in system]
    return "\n\n".join(text for text in texts if text and not text.startswith(_BILLING))


def _assistant(blocks: list[ContentBlock], names: dict[str, str]) -> dict[str, Any]:
    """One message of text, thoughts and calls; `names` learns the calls' ids."""
    calls = []
    for block in blocks:
        if block.type == "tool_use":
            names[block.id or ""] = block.name or ""
            function = {"name": block.name or "", "arguments": block.input or {}}
            calls.append({"id": block.id, "type": "function", "function": function})
    # Null is what the chat API has where the model called and said nothing.
    made: dict[str, Any] = {
        "role": "assistant",
        "content": _parts(blocks, "") or (None if calls else ""),
    }
    thoughts = "\n".join(block.thinking or "" for block in blocks if block.type == "thinking")
    if thoughts:
        made["reasoning_content"] = thoughts
    if calls:
        made["tool_calls"] = calls
    return made


def _user(message: AnthropicMessage, names: dict[str, str], place: str) -> list[dict[str, Any]]:
    """Tool results are messages of their own, in the order they stand in."""
    messages: list[dict[str, Any]] = []
    parts: list[dict[str, Any]] = []
    for number, block in enumerate(message.content):
        assert isinstance(block, ContentBlock)
        where = f"{place}[{number}]"
        if block.type == "tool_result":
            if parts:
                messages.append({"role": message.role, "content": parts})
                parts = []
            messages.append(_tool_result(block, names, f"{where}.content"))
        else:
            parts += _part(block, where)
    if parts or not messages:
        messages.append({"role": message.role, "content": parts or ""})
    return messages


def _tool_result(block: ContentBlock, names: dict[str, str], place: str) -> dict[str, Any]:
    content = block.content or ""
    said: Any = content if isinstance(content, str) else _parts(content, place) or ""
    if block.is_error:
        parts = [] if isinstance(said, str) else said
        pictures = [part for part in parts if part["type"] != "text"]
        texts = [said] if isinstance(said, str) else [part.get("text", "") for part in parts]
        text = "Error: " + "\n".join(texts if not pictures else filter(None, texts))
        said = [{"type": "text", "text": text}, *pictures] if pictures else text
    made = {"role": "tool", "tool_call_id": block.tool_use_id, "content": said}
    name = names.get(block.tool_use_id or "")
    return {**made, "name": name} if name else made


def _parts(blocks: list[ContentBlock], place: str) -> list[dict[str, Any]]:
    """What the blocks say and show."""
    parts = (_part(block, f"{place}[{number}]") for number, block in enumerate(blocks))
    return [part for found in parts for part in found]


def _part(block: ContentBlock, place: str) -> list[dict[str, Any]]:
    """What one block says or shows, if anything; a reference to a tool stands as its name."""
    if (source := block.source) is not None:
        kind = PDF if block.type == "document" else PICTURE
        about = [{"type": "text", "text": one} for one in (block.title, block.context) if one]
        if source.data is not None:
            return [*about, media_part(kind, source.data, f"{place}.source.data", is_bare=True)]
        assert source.url is not None, "the one or the other is there"
        return [*about, media_part(kind, source.url, f"{place}.source.url")]
    is_reference = block.type == "tool_reference"
    text = json.dumps({"tool": block.tool_name}) if is_reference else block.text
    return [{"type": "text", "text": text}] if text else []
