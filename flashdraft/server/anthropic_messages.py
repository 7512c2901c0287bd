"""Anthropic's conversation, tools and settings to what the engine is asked."""

from __future__ import annotations

import json
from typing import Any

from flashdraft.core import GrammarSpec
from flashdraft.server.api_errors import FieldError
from flashdraft.server.constraints import (
    ToolUse,
    answer_grammar,
    check_tools,
    json_schema_grammar,
)
from flashdraft.server.questions import (
    Question,
    chat_prompt,
    sampling,
    spread,
    thinking_switches,
)
from flashdraft.server.schemas_messages import (
    AnthropicMessage,
    ContentBlock,
    CountTokensRequest,
    MessagesRequest,
)
from flashdraft.server.serving import Serving

# Claude Code opens its system prompt with a line that is new in every request: with it no prompt
# would ever be found in the prefix cache, and it tells the model nothing.
_BILLING = "x-anthropic-billing-header:"


async def prompt_of(serving: Serving, body: CountTokensRequest, tool_use: ToolUse) -> list[int]:
    """The token ids of the conversation."""
    serving.check_model(body.model)
    switches = thinking_switches(serving, is_thinking(body), None)
    return await chat_prompt(serving, chat_messages(body), tool_use.offered, switches)


def is_thinking(body: CountTokensRequest) -> bool:
    """Whether the model is to think; Anthropic's default is that it does not."""
    return body.thinking is not None and body.thinking.type != "disabled"


async def question_of(serving: Serving, body: MessagesRequest) -> Question:
    """What the engine is asked."""
    tool_use = tool_use_of(body)
    check_tools(serving, tool_use)
    form = _format(serving, body)
    prompt_ids = await prompt_of(serving, body, tool_use)
    grammar = answer_grammar(serving, tool_use, form, prompt_ids, is_thinking(body))
    params = sampling(
        serving,
        prompt_ids,
        {
            "max_tokens": body.max_tokens,
            "stop": body.stop_sequences,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "top_k": body.top_k,
        },
    )
    verify = body.flashdraft.verify if body.flashdraft else None
    return spread(serving, Question(prompt_ids, params, tool_use, grammar, verify), 1)[0]


def _format(serving: Serving, body: MessagesRequest) -> GrammarSpec | None:
    config = body.output_config
    wanted = (config.format if config else None) or body.output_format
    if wanted is None:
        return None
    return json_schema_grammar(serving, wanted.schema_, "output_config.format")


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
    if body.messages[-1].role == "assistant":
        raise FieldError(
            "messages",
            "The last message is the assistant's: continuing it (prefill) is not supported. End "
            "with a user message.",
        )
    messages: list[dict[str, Any]] = []
    system = _system_text(body.system)
    if system:
        messages.append({"role": "system", "content": system})
    names: dict[str, str] = {}
    for message in body.messages:
        if isinstance(message.content, str):
            messages.append({"role": message.role, "content": message.content})
        elif message.role == "assistant":
            messages.append(_assistant(message.content, names))
        else:
            messages += _user(message, names)
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
    made: dict[str, Any] = {"role": "assistant", "content": _join(blocks, "text")}
    thoughts = "\n".join(block.thinking or "" for block in blocks if block.type == "thinking")
    if thoughts:
        made["reasoning_content"] = made["reasoning"] = thoughts  # templates differ
    if calls:
        made["tool_calls"] = calls
    return made


def _user(message: AnthropicMessage, names: dict[str, str]) -> list[dict[str, Any]]:
    """Tool results are messages of their own, in the order they stand in."""
    messages: list[dict[str, Any]] = []
    texts: list[str] = []
    for block in message.content:
        assert isinstance(block, ContentBlock)
        if block.type == "tool_result":
            if texts:
                messages.append({"role": message.role, "content": "\n".join(texts)})
                texts = []
            messages.append(_tool_result(block, names))
        elif block.type == "text":
            texts.append(block.text or "")
    if texts or not messages:
        messages.append({"role": message.role, "content": "\n".join(texts)})
    return messages


def _tool_result(block: ContentBlock, names: dict[str, str]) -> dict[str, Any]:
    content = block.content
    text = _result_text(content) if isinstance(content, list) else content or ""
    made = {
        "role": "tool",
        "tool_call_id": block.tool_use_id,
        "content": f"Error: {text}" if block.is_error else text,
    }
    name = names.get(block.tool_use_id or "")
    return {**made, "name": name} if name else made


def _result_text(blocks: list[ContentBlock]) -> str:
    """The text of a result; a reference to a tool stands as its name."""
    texts = [
        json.dumps({"tool": block.tool_name}) if block.type == "tool_reference" else block.text
        for block in blocks
    ]
    return "\n".join(text for text in texts if text)


def _join(blocks: list[ContentBlock], kind: str) -> str:
    return "\n".join(block.text or "" for block in blocks if block.type == kind)
