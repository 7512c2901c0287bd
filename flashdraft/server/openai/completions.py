"""/v1/completions: raw prompts continued as they are, with echo and log-probabilities of prompts.

Evaluation harnesses score texts with it: echo and logprobs together, and no new tokens.
"""

from __future__ import annotations

import asyncio

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
from flashdraft.server.openai.common import stream_failure
from flashdraft.server.openai.completions_fields import CompletionRequest
from flashdraft.server.openai.completions_input import completion_questions, raw_prompts
from flashdraft.server.openai.completions_writer import CompletionWriter

ROUTE = "/v1/completions"


def router(serving: Serving) -> APIRouter:
    """The route, bound to a server."""
    routes = APIRouter(route_class=route_class(openai_shape, serving.count_failure))

    @routes.post(ROUTE, summary="Continue raw prompts", responses=OPENAI_RESPONSES)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        prompts = await raw_prompts(serving, body)
        # in a thread: a schema may be long
        questions = await asyncio.to_thread(completion_questions, serving, body, prompts)
        writer = CompletionWriter(serving, body, prompts, questions)
        parts = answers(serving, ROUTE, questions)
        if body.stream:
            return await open_stream(request, parts, writer.chunks, stream_failure(serving, ROUTE))
        found = await run_until_disconnect(request, collect(parts, len(questions)))
        # in a thread: the log-probabilities of a long prompt are many
        return json_response(await asyncio.to_thread(writer.completion, found))

    return routes
