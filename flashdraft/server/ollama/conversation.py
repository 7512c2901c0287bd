"""Ollama's messages, prompts and options to what the engine is asked."""

from __future__ import annotations

from typing import Any

from flashdraft.chat.binding import ToolUse
from flashdraft.core import GrammarSpec
from flashdraft.server.answering.constraints import (
    answer_grammar,
    check_function_tools,
    function_tools,
    json_schema_grammar,
)
from flashdraft.server.answering.pictures import picture_part
from flashdraft.server.answering.questions import (
    ChatInput,
    Question,
    chat_question,
    renamed,
    sampling,
    spread,
    thinking_switches,
)
from flashdraft.server.answering.serving import Serving
from flashdraft.server.http.errors import FieldError
from flashdraft.server.http.fields import FlashdraftOptions
from flashdraft.server.http.picture_fields import SentText
from flashdraft.server.ollama.fields import (
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaMessage,
    OllamaOptions,
    OllamaRequest,
)

# What Ollama calls the settings of an answer.
_NAMES = {
    "max_tokens": "options.num_predict",
    "repetition_penalty": "options.repeat_penalty",
    "temperature": "options.temperature",
    "top_k": "options.top_k",
    "top_p": "options.top_p",
    "min_p": "options.min_p",
    "seed": "options.seed",
    "stop": "options.stop",
    "logprobs": "top_logprobs",
    "thinking": "think",
}


def is_load(body: OllamaChatRequest | OllamaGenerateRequest) -> bool:
    """Whether nothing is asked: that is how clients have a model loaded."""
    if isinstance(body, OllamaChatRequest):
        return not body.messages
    return not (body.prompt or body.images)


async def question_of(
    serving: Serving, body: OllamaChatRequest | OllamaGenerateRequest
) -> Question:
    """What the engine is asked."""
    given = _settings(serving, body)
    form = _form(serving, body)
    if isinstance(body, OllamaGenerateRequest) and body.raw:
        if body.think:
            raise FieldError(
                "think", "think is asked of the model's template, which raw leaves out; choose one."
            )
        return await _raw_question(serving, body.prompt or "", form, given)
    tool_use = ToolUse()
    if isinstance(body, OllamaChatRequest):
        tool_use = _tool_use(serving, body)
        messages = _chat_messages(body.messages or [])
    else:
        messages = [{"role": "system", "content": body.system}] if body.system else []
        said = _content(body.prompt, body.images, "images")
        messages.append({"role": "user", "content": said})
    thinking = None if body.think in (None, "") else body.think is not False
    switches = thinking_switches(serving, thinking, None)
    is_open = messages[-1]["role"] == "assistant"  # which Ollama continues
    conversation = ChatInput(messages, switches, not is_open, is_open)
    asked = tool_use, form, given, FlashdraftOptions(), _NAMES
    question = await chat_question(serving, conversation, *asked)
    return spread(serving, question, 1)[0]


async def _raw_question(
    serving: Serving, prompt: str, form: GrammarSpec | None, given: dict[str, Any]
) -> Question:
    """A prompt that is continued as it is."""
    ids = await serving.tokenize(prompt, True)
    with renamed(_NAMES):
        params = sampling(serving, ids, given)
    grammar = answer_grammar(serving, ToolUse(), form, ids)
    return spread(serving, Question(ids, params, grammar=grammar), 1)[0]


def _settings(serving: Serving, body: OllamaRequest) -> dict[str, Any]:
    options = body.options or OllamaOptions.model_construct()
    limit = serving.engine.info.max_context
    if options.num_ctx is not None and options.num_ctx > limit:
        raise FieldError(
            "options.num_ctx",
            f"options.num_ctx is {options.num_ctx}; this server's context has {limit} tokens. Ask "
            "for no more, or leave it out.",
        )
    if body.top_logprobs and not body.logprobs:
        raise FieldError("top_logprobs", "top_logprobs is set without logprobs; set both.")
    asked = options.num_predict
    return {
        "temperature": options.temperature,
        "top_k": None if options.top_k is None else max(0, options.top_k),
        "top_p": options.top_p,
        "min_p": options.min_p,
        "repetition_penalty": options.repeat_penalty,
        "presence_penalty": options.presence_penalty,
        "frequency_penalty": options.frequency_penalty,
        "seed": None if options.seed == -1 else options.seed,  # -1: a fresh one
        "stop": options.stop,
        "max_tokens": limit if asked is not None and asked <= 0 else asked,  # -1, -2: no limit
        "logprobs": (body.top_logprobs or 0) if body.logprobs else None,
    }


def _form(serving: Serving, body: OllamaRequest) -> GrammarSpec | None:
    if not body.format and not isinstance(body.format, dict):
        return None
    if body.format == "json":
        return GrammarSpec("json_object")
    return json_schema_grammar(serving, body.format, "format")


def _tool_use(serving: Serving, body: OllamaChatRequest) -> ToolUse:
    tool_use = ToolUse(function_tools(tool.function for tool in body.tools or ()))
    check_function_tools(serving, tool_use)
    return tool_use


def _chat_messages(given: list[OllamaMessage]) -> list[dict[str, Any]]:
    """The messages as chat templates want them; a result without an id is the next call's."""
    messages: list[dict[str, Any]] = []
    waiting: list[dict[str, Any]] = []  # calls without a result yet
    for place, message in enumerate(given):
        content = _content(message.content, message.images, f"messages[{place}].images")
        made: dict[str, Any] = {"role": message.role, "content": content}
        if message.thinking:
            made["reasoning_content"] = message.thinking
        if message.tool_calls:
            first = len(messages)
            waiting = [
                {
                    "id": call.id or f"call_{first}_{number}",
                    "type": "function",
                    "function": {"name": call.function.name, "arguments": call.function.arguments},
                }
                for number, call in enumerate(message.tool_calls)
            ]
            made["tool_calls"] = list(waiting)
            made["content"] = message.content or None  # as where the model called and said nothing
        elif message.role == "tool":
            made |= _result(message, waiting)
        messages.append(made)
    return messages


def _content(
    text: str | None, images: list[SentText] | None, place: str
) -> str | list[dict[str, Any]]:
    """What is said, after what is shown: as Ollama has it."""
    if not images:
        return text or ""
    parts = [
        picture_part(one, f"{place}[{number}]", is_bare=True) for number, one in enumerate(images)
    ]
    return [*parts, {"type": "text", "text": text}] if text else parts


def _result(message: OllamaMessage, waiting: list[dict[str, Any]]) -> dict[str, Any]:
    """Whose result it is: by the call's id, by the tool's name, else the first without one."""
    name = message.tool_name or message.name
    for call in waiting:
        is_named = name in (None, call["function"]["name"])
        if message.tool_call_id == call["id"] or (message.tool_call_id is None and is_named):
            waiting.remove(call)
            return {"tool_call_id": call["id"], "name": call["function"]["name"]}
    found = {"tool_call_id": message.tool_call_id}
    return {**found, "name": name} if name else found
