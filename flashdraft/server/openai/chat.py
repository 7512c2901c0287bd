"""/v1/chat/completions: OpenAI's chat API, with vLLM's further fields."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from flashdraft.server.answering.answers import answers
from flashdraft.server.answering.blocks import collect
from flashdraft.server.answering.serving import Serving
from flashdraft.server.http.disconnect import run_until_disconnect
from flashdraft.server.http.errors import (
    OPENAI_RESPONSES,
    json_response,
    openai_shape,
    route_class,
)
from flashdraft.server.http.sse import open_stream
from flashdraft.server.openai.chat_fields import ChatRequest
from flashdraft.server.openai.chat_input import chat_questions
from flashdraft.server.openai.chat_writer import ChatStreamWriter, chat_completion
from flashdraft.server.openai.common import stream_failure

ROUTE = "/v1/chat/completions"


def router(serving: Serving) -> APIRouter:
    """The route, bound to a server."""
    routes = APIRouter(route_class=route_class(openai_shape, serving.count_failure))

    @routes.post(ROUTE, summary="Answer a conversation", responses=OPENAI_RESPONSES)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        questions = await run_until_disconnect(request, chat_questions(serving, body))
        parts = answers(serving, ROUTE, questions)
        if body.stream:
            write = ChatStreamWriter(serving, body, questions).chunks
            return await open_stream(request, parts, write, stream_failure(serving, ROUTE))
        found = await run_until_disconnect(request, collect(parts, len(questions)))
        return json_response(await chat_completion(serving, body, questions, found))

    return routes
