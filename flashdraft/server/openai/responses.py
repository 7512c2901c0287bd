"""/v1/responses: OpenAI's newer API, without state. Answers are items; streams are events."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from flashdraft.server.answering.answers import answers
from flashdraft.server.answering.blocks import collect
from flashdraft.server.answering.serving import Serving
from flashdraft.server.http.disconnect import run_until_disconnect
from flashdraft.server.http.errors import (
    OPENAI_RESPONSES,
    ApiError,
    json_response,
    openai_shape,
    route_class,
)
from flashdraft.server.http.sse import open_stream
from flashdraft.server.openai.responses_fields import ResponsesRequest
from flashdraft.server.openai.responses_input import question_of
from flashdraft.server.openai.responses_writer import ResponseWriter

ROUTE = "/v1/responses"


def router(serving: Serving) -> APIRouter:
    """The route, bound to a server."""
    routes = APIRouter(route_class=route_class(openai_shape, serving.count_failure))

    @routes.post(ROUTE, summary="Answer a list of items", responses=OPENAI_RESPONSES)
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        question = await run_until_disconnect(request, question_of(serving, body))
        writer = ResponseWriter(serving, body, question)
        parts = answers(serving, ROUTE, [question])
        if body.stream:

            def failure(error: ApiError) -> str:
                serving.count_failure(ROUTE, error)
                return writer.failure(error)

            return await open_stream(request, parts, writer.events, failure)
        (answer,) = await run_until_disconnect(request, collect(parts, 1))
        return json_response(await writer.response(answer))

    return routes
