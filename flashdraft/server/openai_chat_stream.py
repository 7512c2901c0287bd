"""The chunks of a streamed chat completion."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from flashdraft.chat.deltas import Content, Delta, Reasoning, ToolCallArguments, ToolCallBegin
from flashdraft.server.answers import Part
from flashdraft.server.blocks import Answer
from flashdraft.server.logprobs import TokenTexts, chat_logprobs
from flashdraft.server.openai_common import new_id, usage_of
from flashdraft.server.questions import Question
from flashdraft.server.schemas_chat import ChatRequest
from flashdraft.server.schemas_common import StreamOptions
from flashdraft.server.serving import Serving
from flashdraft.server.sse import DONE, KEEP_ALIVE, sse
from flashdraft.server.usage import TokenView, openai_usage, statistics


class ChatStream:
    """Writes the parts of n answers as chunks."""

    def __init__(self, serving: Serving, body: ChatRequest, questions: Sequence[Question]) -> None:
        self._serving = serving
        self._questions = questions
        self._options = body.stream_options or StreamOptions.model_construct()
        self._answers = [Answer() for _ in questions]
        self._texts = TokenTexts(serving.tokenizer) if body.logprobs else None
        self._num_top = body.top_logprobs or 0
        shows_tokens = body.flashdraft is not None and body.flashdraft.tokens
        self._views = [TokenView(serving.tokenizer) for _ in questions] if shows_tokens else None
        self._num_tokens = [0] * len(questions)
        self._frame = {
            "id": new_id("chatcmpl-"),
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": body.model,
        }

    async def chunks(self, parts: AsyncIterator[Part | None]) -> AsyncIterator[str]:
        """All events of the stream."""
        for index in range(len(self._questions)):
            yield self._chunk(index, {"role": "assistant", "content": ""})
        async for part in parts:
            if part is None:
                yield KEEP_ALIVE
                continue
            self._answers[part.index].add(part)
            for chunk in self._of_part(part):
                yield chunk
        if self._options.include_usage:
            ends = [answer.end.generation for answer in self._answers]
            usage = usage_of(self._serving, self._questions, self._answers)
            yield sse(
                {**self._frame, "choices": [], "usage": usage, "flashdraft": statistics(ends)}
            )
        yield DONE

    def _of_part(self, part: Part) -> list[str]:
        self._num_tokens[part.index] = part.num_tokens
        extra: dict[str, Any] = {}
        logprobs = None
        if self._texts is not None:
            entries = chat_logprobs(self._texts, part.tokens, self._num_top)
            logprobs = {"content": entries} if entries else None
        if self._views is not None and (view := self._views[part.index].show(part)) is not None:
            extra["flashdraft"] = view
        deltas = [made for delta in part.deltas if (made := _delta(delta)) is not None]
        if not deltas and (logprobs or extra):
            deltas = [{}]  # the tokens are known although their text is held back
        chunks = []
        for delta in deltas:
            chunks.append(self._chunk(part.index, delta, logprobs=logprobs, **extra))
            logprobs, extra = None, {}
        if part.end is not None:
            stats = statistics([part.end.generation])
            chunks.append(self._chunk(part.index, {}, reason=part.end.reason, flashdraft=stats))
        return chunks

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        *,
        reason: str | None = None,
        logprobs: dict[str, Any] | None = None,
        flashdraft: dict[str, Any] | None = None,
    ) -> str:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        chunk: dict[str, Any] = {**self._frame, "choices": [choice]}
        if self._options.include_usage:
            chunk["usage"] = self._usage_so_far() if self._options.continuous_usage_stats else None
        if flashdraft is not None:
            chunk["flashdraft"] = flashdraft
        return sse(chunk)

    def _usage_so_far(self) -> dict[str, Any]:
        return openai_usage(len(self._questions[0].prompt_ids), sum(self._num_tokens), 0, 0)


def _delta(delta: Delta) -> dict[str, Any] | None:
    """A delta in the chat API's words; None where it has none."""
    match delta:
        case Reasoning(text=text):
            return {"reasoning_content": text}
        case Content(text=text):
            return {"content": text}
        case ToolCallBegin(index=index, name=name):
            function = {"name": name, "arguments": ""}
            call = {"index": index, "id": new_id("call_"), "type": "function", "function": function}
            return {"tool_calls": [call]}
        case ToolCallArguments(index=index, text=text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
    return None
