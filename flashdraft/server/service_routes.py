"""Routes about the server itself: health, version, metrics, models, tokens, and the web page."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

from fastapi import APIRouter, HTTPException, Request
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response

from flashdraft.core import VERSION
from flashdraft.errors import RequestError
from flashdraft.server.answering.constraints import ToolUse
from flashdraft.server.answering.questions import conversation_ids
from flashdraft.server.answering.serving import Serving
from flashdraft.server.http.errors import (
    SERVICE_RESPONSES,
    CheckedRoute,
    FieldError,
    json_response,
)
from flashdraft.server.http.fields import Body, FunctionTool, Many
from flashdraft.server.http.security import page_headers
from flashdraft.server.openai.chat import chat_messages, chat_tools, check_chat_tools
from flashdraft.server.openai.chat_fields import Message
from flashdraft.server.process.client import EngineClient, EngineState
from flashdraft.server.telemetry.metrics import Metrics
from flashdraft.server.telemetry.prometheus import CONTENT_TYPE

MAX_TOKENIZED = 2 * 1024 * 1024  # characters
PAGE_FOLDER = Path(__file__).parent / "page"
_PAGE_TYPES = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}


class TokenizeRequest(Body):
    """A text, or a conversation in the model's chat format."""

    model: str | None = None
    prompt: str | None = None
    messages: Many[Message] | None = None
    tools: Many[FunctionTool] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True


class DetokenizeRequest(Body):
    """Token ids to turn into text."""

    model: str | None = None
    tokens: Many[int]
    skip_special_tokens: bool = False


def router(serving: Serving) -> APIRouter:
    """The routes of one server."""
    routes = APIRouter(route_class=CheckedRoute, responses=SERVICE_RESPONSES)
    engine = cast(EngineClient, serving.engine)
    metrics = cast(Metrics, serving.metrics)
    started_at = datetime.now(UTC)

    @routes.get("/health", responses={503: {"description": "The engine takes no requests."}})
    async def health() -> JSONResponse:
        is_ready = engine.state is EngineState.READY
        content = {"status": engine.state.value, "detail": engine.detail}
        headers = {} if is_ready else {"Retry-After": "5"}
        return JSONResponse(content, status_code=200 if is_ready else 503, headers=headers)

    @routes.get("/version")
    async def version() -> dict[str, str]:
        return {"version": VERSION}

    @routes.get("/metrics", response_class=PlainTextResponse)
    async def show_metrics() -> PlainTextResponse:
        return PlainTextResponse(metrics.render(), media_type=CONTENT_TYPE)

    @routes.get("/v1/models")
    async def models(request: Request) -> dict[str, Any]:
        describe = _anthropic_model if _speaks_anthropic(request) else _openai_model
        data = [describe(serving, name, started_at) for name in serving.model_names]
        if _speaks_anthropic(request):
            ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]}
            return {"data": data, "has_more": False, **ends}
        return {"object": "list", "data": data}

    @routes.get("/v1/models/{model_id:path}")
    async def model(request: Request, model_id: str) -> dict[str, Any]:
        serving.check_model(model_id)
        describe = _anthropic_model if _speaks_anthropic(request) else _openai_model
        return describe(serving, model_id, started_at)

    _add_token_routes(routes, serving)
    _add_page(routes)
    return routes


def _add_token_routes(routes: APIRouter, serving: Serving) -> None:
    @routes.get("/tokenizer_info")
    async def tokenizer_info() -> dict[str, Any]:
        """What evaluation harnesses ask for to tokenize here (vLLM's route)."""
        tokenizer = serving.tokenizer
        sizes = {"model_max_length": serving.engine.info.max_context}
        return {**tokenizer.special_tokens, **sizes, "chat_template": tokenizer.chat_template}

    @routes.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> Response:
        if body.model is not None:
            serving.check_model(body.model)
        tokens = await _tokens(serving, body)
        limit = serving.engine.info.max_context
        content = {"tokens": tokens, "count": len(tokens), "max_model_len": limit}
        return await asyncio.to_thread(json_response, content)

    @routes.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> dict[str, str]:
        if body.model is not None:
            serving.check_model(body.model)
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
    tool_use = ToolUse(chat_tools(body.tools))
    check_chat_tools(serving, tool_use)
    return await conversation_ids(
        serving,
        chat_messages(body.messages or []),
        tool_use.offered,
        add_generation_prompt=body.add_generation_prompt,
    )


def _add_page(routes: APIRouter) -> None:
    files = {file.name: file for file in PAGE_FOLDER.glob("*") if file.suffix in _PAGE_TYPES}

    @routes.get("/", include_in_schema=False)
    async def page() -> HTMLResponse:
        index = PAGE_FOLDER / "index.html"
        if not index.is_file():
            raise HTTPException(404, "This installation has no web page.")
        text = index.read_text(encoding="utf-8")
        return HTMLResponse(text, headers=page_headers(text))

    @routes.get("/page/{name}", include_in_schema=False)
    async def page_file(name: str) -> Response:
        if name not in files:  # names of files that are there: no path leads elsewhere
            raise HTTPException(404, f"The page has no file {name!r}.")
        file = files[name]
        return Response(
            file.read_bytes(),
            media_type=_PAGE_TYPES[file.suffix],
            headers={"Cache-Control": "no-cache", "Cross-Origin-Resource-Policy": "same-origin"},
        )


def _speaks_anthropic(request: Request) -> bool:
    return "anthropic-version" in request.headers


def _openai_model(serving: Serving, name: str, created: datetime) -> dict[str, Any]:
    info = serving.engine.info
    return {
        "id": name,
        "object": "model",
        "created": int(created.timestamp()),
        "owned_by": "flashdraft",
        "root": info.model,
        "max_model_len": info.max_context,
    }


def _anthropic_model(serving: Serving, name: str, created: datetime) -> dict[str, Any]:
    stamp = created.isoformat(timespec="seconds").replace("+00:00", "Z")
    return {"type": "model", "id": name, "display_name": name, "created_at": stamp}
