"""/api/chat and /api/generate."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from flashdraft.server.answering.answers import answers
from flashdraft.server.answering.blocks import collect
from flashdraft.server.answering.serving import Serving
from flashdraft.server.http.disconnect import run_until_disconnect
from flashdraft.server.http.errors import (
    OLLAMA_RESPONSES,
    ApiError,
    json_response,
    ollama_shape,
    route_class,
)
from flashdraft.server.http.sse import open_stream
from flashdraft.server.ollama.conversation import is_load, question_of
from flashdraft.server.ollama.fields import OllamaChatRequest, OllamaGenerateRequest
from flashdraft.server.ollama.writer import NDJSON, OllamaWriter, line

CHAT_ROUTE = "/api/chat"
GENERATE_ROUTE = "/api/generate"


def router(serving: Serving) -> APIRouter:
    """The routes, bound to a server."""
    routes = APIRouter(route_class=route_class(ollama_shape, serving.count_failure))

    @routes.post(CHAT_ROUTE, summary="Answer a conversation", responses=OLLAMA_RESPONSES)
    async def chat(body: OllamaChatRequest, request: Request) -> Response:
        return await _answer(serving, CHAT_ROUTE, body, request)

    @routes.post(GENERATE_ROUTE, summary="Answer a prompt", responses=OLLAMA_RESPONSES)
    async def generate(body: OllamaGenerateRequest, request: Request) -> Response:
        return await _answer(serving, GENERATE_ROUTE, body, request)

    return routes


async def _answer(
    serving: Serving,
    route: str,
    body: OllamaChatRequest | OllamaGenerateRequest,
    request: Request,
) -> Response:
    writer = OllamaWriter(serving, body)
    if is_load(body):
        _ = serving.engine.info  # raises where there is no model yet
        return json_response(writer.loaded())
    question = await run_until_disconnect(request, question_of(serving, body))
    parts = answers(serving, route, [question])
    if body.stream is False:
        (answer,) = await run_until_disconnect(request, collect(parts, 1))
        return json_response(writer.whole(question, answer))

    def failure(error: ApiError) -> str:
        serving.count_failure(route, error)
        return line(ollama_shape(error))

    return await open_stream(request, parts, writer.lines(question), failure, NDJSON)
