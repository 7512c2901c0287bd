"""/v1/messages and /v1/messages/count_tokens: Anthropic's API, as Claude Code uses it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request, Response

from flashdraft.chat.answers.blocks import Block, BlockChange
from flashdraft.server.answering.answers import AnswerPart, End, answers
from flashdraft.server.answering.blocks import CollectedAnswer, collect, new_id
from flashdraft.server.answering.questions import Question
from flashdraft.server.answering.serving import Serving
from flashdraft.server.answering.usage import TokenView, statistics
from flashdraft.server.anthropic.conversation import prompt_of, question_of
from flashdraft.server.anthropic.fields import CountTokensRequest, MessagesRequest
from flashdraft.server.http.disconnect import run_until_disconnect
from flashdraft.server.http.errors import (
    ANTHROPIC_RESPONSES,
    ApiError,
    anthropic_shape,
    json_response,
    route_class,
)
from flashdraft.server.http.sse import open_stream, sse
from flashdraft.text.exact_json import Written

ROUTE = "/v1/messages"
COUNT_ROUTE = "/v1/messages/count_tokens"


def router(serving: Serving) -> APIRouter:
    """The routes, bound to a server."""
    routes = APIRouter(route_class=route_class(anthropic_shape, serving.count_failure))

    def failure(error: ApiError) -> str:
        serving.count_failure(ROUTE, error)
        return sse(anthropic_shape(error), "error")

    @routes.post(ROUTE, summary="Answer a conversation", responses=ANTHROPIC_RESPONSES)
    async def messages(body: MessagesRequest, request: Request) -> Response:
        question = await run_until_disconnect(request, question_of(serving, body))
        parts = answers(serving, ROUTE, [question])
        if body.stream:
            return await open_stream(
                request, parts, MessageStream(serving, body, question).events, failure
            )
        (answer,) = await run_until_disconnect(request, collect(parts, 1))
        return json_response(_message(serving, body, question, answer))

    @routes.post(COUNT_ROUTE, summary="Count tokens", responses=ANTHROPIC_RESPONSES)
    async def count_tokens(body: CountTokensRequest, request: Request) -> Response:
        prompt_ids = await run_until_disconnect(request, prompt_of(serving, body))
        return json_response({"input_tokens": len(prompt_ids)})

    return routes


def _message(
    serving: Serving, body: MessagesRequest, question: Question, answer: CollectedAnswer
) -> dict[str, Any]:
    return {
        **_frame(serving, body),
        "content": [_whole_block(block) for block in answer.blocks],
        **_stop(answer.end),
        "usage": _usage(question, answer.end),
        "flashdraft": statistics([answer.end.generation]),
    }


def _frame(serving: Serving, body: MessagesRequest) -> dict[str, Any]:
    name = serving.model_name(body.model)
    return {"id": new_id("msg_"), "type": "message", "role": "assistant", "model": name}


def _whole_block(block: Block) -> dict[str, Any]:
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    if block.kind == "content":
        return {"type": "text", "text": block.text}
    return {**_empty_block(block), "input": Written(block.text or "{}")}


def _empty_block(block: Block) -> dict[str, Any]:
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": "", "signature": ""}
    if block.kind == "content":
        return {"type": "text", "text": ""}
    return {"type": "tool_use", "id": new_id("toolu_"), "name": block.name, "input": {}}


def _stop(end: End) -> dict[str, Any]:
    reasons = {"length": "max_tokens", "tool_calls": "tool_use", "stop": "end_turn"}
    reason = reasons[end.reason]
    if end.stop_string is not None:
        reason = "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": end.stop_string}


def _usage(question: Question, end: End | None) -> dict[str, Any]:
    """Anthropic counts the tokens found in the cache apart from the others."""
    cached = 0 if end is None else end.generation.stats.cached_tokens
    return {
        "input_tokens": len(question.prompt_ids) - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": 0 if end is None else len(end.generation.token_ids),
    }


class MessageStream:
    """Writes an answer as Anthropic's events."""

    def __init__(self, serving: Serving, body: MessagesRequest, question: Question) -> None:
        self._frame = _frame(serving, body)
        self._question = question
        self._view = TokenView(serving) if body.drafting.tokens else None

    async def events(self, parts: AsyncIterator[AnswerPart | None]) -> AsyncIterator[str]:
        """All events of the stream."""
        message = {
            **self._frame,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(self._question, None),
        }
        yield _event("message_start", message=message)
        yield _event("ping")
        answer = CollectedAnswer()
        async for part in parts:
            if part is None:
                yield _event("ping")
                continue
            changes = answer.add(part)
            if part.end is not None:
                changes = [*changes, *answer.parsed.close()]
            view = self._view.show(part) if self._view else None
            for event in self._of_changes(changes, view):
                yield event
        yield _event(
            "message_delta",
            delta=_stop(answer.end),
            usage=_usage(self._question, answer.end),
            flashdraft=statistics([answer.end.generation]),
        )
        yield _event("message_stop")

    def _of_changes(self, changes: list[BlockChange], view: dict[str, Any] | None) -> list[str]:
        extra = {} if view is None else {"flashdraft": view}
        events = []
        for change in changes:
            events += _block_events(change, extra)
            extra = {}
        if extra:  # the tokens are known although their text is held back
            events.append(_event("ping", **extra))
        return events


def _block_events(change: BlockChange, extra: dict[str, Any]) -> list[str]:
    index, block = change.index, change.block
    if change.change == "begin":
        begun = _empty_block(block)
        return [_event("content_block_start", index=index, content_block=begun, **extra)]
    if change.change == "end":
        stop = _event("content_block_stop", index=index, **extra)
        if block.kind != "reasoning":
            return [stop]
        signature = {"type": "signature_delta", "signature": ""}
        return [_event("content_block_delta", index=index, delta=signature), stop]
    delta = {
        "reasoning": {"type": "thinking_delta", "thinking": change.text},
        "content": {"type": "text_delta", "text": change.text},
        "call": {"type": "input_json_delta", "partial_json": change.text},
    }[block.kind]
    return [_event("content_block_delta", index=index, delta=delta, **extra)]


def _event(kind: str, **fields: Any) -> str:
    return sse({"type": kind, **fields}, kind)
