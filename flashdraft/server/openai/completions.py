"""/v1/completions: raw prompts continued as they are, with echo and log-probabilities of prompts.

Evaluation harnesses score texts with it: echo and logprobs together, and no new tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request, Response

from flashdraft.server.answering.answers import AnswerPart, answers
from flashdraft.server.answering.blocks import CollectedAnswer, collect
from flashdraft.server.answering.constraints import ToolUse, answer_grammar
from flashdraft.server.answering.logprobs import LegacyLogprobs
from flashdraft.server.answering.questions import Question, room_for_answer, sampling, spread
from flashdraft.server.answering.serving import Serving
from flashdraft.server.answering.usage import openai_usage, statistics
from flashdraft.server.http.body_structure import MAX_PROMPTS
from flashdraft.server.http.disconnect import run_until_disconnect
from flashdraft.server.http.errors import (
    OPENAI_RESPONSES,
    FieldError,
    json_response,
    openai_shape,
    route_class,
)
from flashdraft.server.http.sse import DONE, KEEP_ALIVE, open_stream, sse
from flashdraft.server.openai.common import (
    Chunks,
    output_form,
    sampling_fields,
    stream_failure,
    usage_of,
)
from flashdraft.server.openai.completions_fields import CompletionRequest

ROUTE = "/v1/completions"
DEFAULT_MAX_TOKENS = 16  # OpenAI's


@dataclass(frozen=True)
class RawPrompt:
    """One prompt, as tokens and, where it is shown, as text."""

    text: str
    ids: list[int]


def router(serving: Serving) -> APIRouter:
    """The route, bound to a server."""
    routes = APIRouter(route_class=route_class(openai_shape, serving.count_failure))

    @routes.post(ROUTE, summary="Continue raw prompts", responses=OPENAI_RESPONSES)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        serving.check_model(body.model)
        _check(body)
        prompts = [await _prompt(serving, one, bool(body.echo)) for one in _given(body)]
        questions = [one for prompt in prompts for one in _questions(serving, body, prompt)]
        writer = CompletionWriter(serving, body, prompts, questions)
        parts = answers(serving, ROUTE, questions)
        if body.stream:
            return await open_stream(request, parts, writer.chunks, stream_failure(serving, ROUTE))
        found = await run_until_disconnect(request, collect(parts, len(questions)))
        # in a thread: the log-probabilities of a long prompt are many
        return json_response(await asyncio.to_thread(writer.completion, found))

    return routes


def _check(body: CompletionRequest) -> None:
    if body.suffix:
        raise FieldError("suffix", "suffix is not supported: leave it out.")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise FieldError(
            "best_of", f"best_of is {body.best_of}; only n ({body.n or 1}) is supported, the same."
        )
    if body.max_tokens is not None and body.max_tokens < 0:
        raise FieldError("max_tokens", f"max_tokens is {body.max_tokens}; it must be 0 or more.")
    if body.max_tokens == 0 and not body.echo:
        raise FieldError("max_tokens", "max_tokens is 0, which needs echo; else it is at least 1.")
    if body.stream and body.echo and body.logprobs is not None:
        raise FieldError("stream", "echo with logprobs cannot be streamed: set stream to false.")


def _given(body: CompletionRequest) -> list[str | list[int]]:
    given: Any = body.prompt
    many = [given] if isinstance(given, str) or (given and isinstance(given[0], int)) else given
    if not 0 < len(many) <= MAX_PROMPTS:
        raise FieldError(
            "prompt", f"prompt has {len(many)} entries; it must have from 1 to {MAX_PROMPTS}."
        )
    return many


async def _prompt(serving: Serving, given: str | list[int], is_shown: bool) -> RawPrompt:
    text = given if isinstance(given, str) else ""
    ids = await serving.tokenize(given, True) if isinstance(given, str) else given
    if not ids:
        raise FieldError("prompt", "prompt is empty; it must have at least one token.")
    room_for_answer(serving, ids)
    size = serving.engine.info.vocab_size
    if (wrong := next((token for token in ids if not 0 <= token < size), None)) is not None:
        raise FieldError(
            "prompt", f"prompt holds the token id {wrong}; ids go from 0 to {size - 1}."
        )
    if is_shown and not isinstance(given, str):
        known = [token for token in ids if token < serving.tokenizer.vocab_size]
        text = await asyncio.to_thread(serving.tokenizer.decode, known, skip_special=False)
    return RawPrompt(text, ids)


def _questions(serving: Serving, body: CompletionRequest, prompt: RawPrompt) -> list[Question]:
    given = body.max_tokens if body.max_tokens is not None else DEFAULT_MAX_TOKENS
    params = sampling(
        serving,
        prompt.ids,
        {**sampling_fields(body), "max_tokens": max(1, given), "logprobs": body.logprobs},
    )
    form = output_form(serving, body)
    question = Question(
        prompt.ids,
        params,
        grammar=answer_grammar(serving, ToolUse(), form, prompt.ids),
        verify=body.drafting.verify,
        prompt_logprobs=body.logprobs if body.echo else None,
    )
    return spread(serving, question, body.n)


class CompletionWriter:
    """Writes answers as a completion, whole or in chunks."""

    def __init__(
        self,
        serving: Serving,
        body: CompletionRequest,
        prompts: Sequence[RawPrompt],
        questions: Sequence[Question],
    ) -> None:
        self._serving = serving
        self._body = body
        self._questions = questions
        self._prompts = [prompt for prompt in prompts for _ in range(body.n or 1)]
        self._texts = serving.token_texts if body.logprobs is not None else None
        self._chunks = Chunks(serving, body, questions, "text_completion")

    def completion(self, found: Sequence[CollectedAnswer]) -> dict[str, Any]:
        """The whole completion."""
        usage = usage_of(self._questions, found)
        if self._is_echo_only:
            usage = openai_usage(
                usage["prompt_tokens"], 0, usage["prompt_tokens_details"]["cached_tokens"], 0
            )
        return {
            **self._chunks.frame,
            "choices": [self._choice(index, answer) for index, answer in enumerate(found)],
            "usage": usage,
            "flashdraft": statistics([answer.end.generation for answer in found]),
        }

    @property
    def _is_echo_only(self) -> bool:
        """No new tokens were asked for: one is generated all the same, and dropped."""
        return self._body.max_tokens == 0

    def _choice(self, index: int, answer: CollectedAnswer) -> dict[str, Any]:
        prompt, text = self._prompts[index], answer.text("content")
        tokens = answer.tokens
        reason: str = answer.end.reason
        if self._is_echo_only:
            text, tokens, reason = "", [], "length"
        logprobs = None
        if self._texts is not None:
            lists = LegacyLogprobs(self._texts, self._body.logprobs or 0)
            echoed = None
            if self._body.echo:
                known = answer.end.generation.prompt_logprobs
                echoed = lists.prompt(prompt.ids, known or [None] * len(prompt.ids), prompt.text)
            logprobs = lists.answer(tokens)
            if echoed is not None:
                logprobs = {name: echoed[name] + logprobs[name] for name in logprobs}
        return {
            "index": index,
            "text": prompt.text + text if self._body.echo else text,
            "logprobs": logprobs,
            "finish_reason": reason,
        }

    async def chunks(self, parts: AsyncIterator[AnswerPart | None]) -> AsyncIterator[str]:
        """All events of the stream."""
        found = [CollectedAnswer() for _ in self._questions]
        count = self._body.logprobs or 0
        lists = [LegacyLogprobs(self._texts, count) for _ in found] if self._texts else None
        if self._body.echo:
            for index, prompt in enumerate(self._prompts):
                yield self._chunk(index, prompt.text)
        async for part in parts:
            if part is None:
                yield KEEP_ALIVE
                continue
            answer = found[part.index]
            text = "".join(change.text for change in answer.add(part))
            logprobs = lists[part.index].answer(part.tokens) if lists and part.tokens else None
            view = self._chunks.take(part)
            if (text or logprobs or view) and not self._is_echo_only:
                yield self._chunk(part.index, text, logprobs=logprobs, flashdraft=view)
            if part.end is not None:
                reason = "length" if self._is_echo_only else part.end.reason
                stats = statistics([part.end.generation])
                yield self._chunk(part.index, "", reason=reason, flashdraft=stats)
        if self._chunks.tells_usage:
            whole = self.completion(found)
            yield sse({**whole, "choices": []})
        yield DONE

    def _chunk(
        self,
        index: int,
        text: str,
        *,
        reason: str | None = None,
        logprobs: dict[str, Any] | None = None,
        flashdraft: dict[str, Any] | None = None,
    ) -> str:
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
        return self._chunks.write(choice, flashdraft)
