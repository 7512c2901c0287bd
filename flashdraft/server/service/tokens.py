"""Routes from text to token ids and back, as vLLM has them."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from flashdraft.chat.binding import ToolUse
from flashdraft.errors import RequestError
from flashdraft.server.answering.constraints import (
    check_function_tools,
    function_tools,
)
from flashdraft.server.answering.questions import ChatInput, conversation_prompt
from flashdraft.server.answering.serving import Serving
from flashdraft.server.http.disconnect import run_until_disconnect
from flashdraft.server.http.errors import (
    SERVICE_RESPONSES,
    CheckedRoute,
    FieldError,
    json_response,
)
from flashdraft.server.http.fields import Body, FunctionTool, Many
from flashdraft.server.openai.chat_fields import Message
from flashdraft.server.openai.chat_input import chat_messages

MAX_TOKENIZED = 2 * 1024 * 1024  # characters


class TokenizeRequest(Body):
    """A text, or a conversation in the model's chat format."""

    model: str | None = None
    prompt: str | None = None
    messages: Many[Message] | None = None
    tools: Many[FunctionTool] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False


class DetokenizeRequest(Body):
    """Token ids to turn into text."""

    model: str | None = None
    tokens: Many[int]
    skip_special_tokens: bool = False


def router(serving: Serving) -> APIRouter:
    """The routes, bound to a server."""
    routes = APIRouter(route_class=CheckedRoute, responses=SERVICE_RESPONSES)

    @routes.get("/tokenizer_info")
    async def tokenizer_info() -> dict[str, Any]:
        """What evaluation harnesses ask for to tokenize here (vLLM's route)."""
        tokenizer = serving.tokenizer
        sizes = {"model_max_length": serving.engine.info.max_context}
        return {**tokenizer.special_tokens, **sizes, "chat_template": tokenizer.chat_template}

    @routes.post("/tokenize")
    async def tokenize(body: TokenizeRequest, request: Request) -> Response:
        serving.model_name(body.model)
        tokens = await run_until_disconnect(request, _tokens(serving, body))
        limit = serving.engine.info.max_context
        content = {"tokens": tokens, "count": len(tokens), "max_model_len": limit}
        return await asyncio.to_thread(json_response, content)

    @routes.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> dict[str, str]:
        serving.model_name(body.model)
        size, limit = serving.engine.info.vocab_size, 2 * serving.engine.info.max_context
        if len(body.tokens) > limit:
            raise FieldError(
                "tokens",
                f"tokens has {len(body.tokens)} entries; at most {limit}, twice the context.",
            )
        wrong = next((token for token in body.tokens if not 0 <= token < size), None)
        if wrong is not None:
            raise FieldError("tokens", f"tokens holds {wrong}; token ids are from 0 to {size - 1}.")
        decode = serving.tokenizer.decode
        return {"prompt": await asyncio.to_thread(decode, body.tokens, body.skip_special_tokens)}

    return routes


async def _tokens(serving: Serving, body: TokenizeRequest) -> Many[int]:
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("Give either prompt or messages.")
    if body.prompt is not None:
        if len(body.prompt) > MAX_TOKENIZED:
            raise FieldError(
                "prompt",
                f"prompt has {len(body.prompt)} characters; at most {MAX_TOKENIZED} are tokenized.",
            )
        return await serving.tokenize(body.prompt, body.add_special_tokens)
    tool_use = ToolUse(function_tools(tool.function for tool in body.tools or ()))
    check_function_tools(serving, tool_use)
    conversation = ChatInput(
        chat_messages(body.messages or []),
        add_generation_prompt=body.add_generation_prompt,
        continues_last=body.continue_final_message,
    )
    return (await conversation_prompt(serving, conversation, tool_use.offered)).token_ids
