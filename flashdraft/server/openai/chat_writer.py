"""Answers as a chat completion, whole or in chunks."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from flashdraft.chat.answers.deltas import (
    Content,
    Delta,
    Reasoning,
    ToolCallArguments,
    ToolCallBegin,
)
from flashdraft.server.answering.answers import AnswerPart
from flashdraft.server.answering.blocks import CollectedAnswer, new_id
from flashdraft.server.answering.logprobs import chat_logprobs
from flashdraft.server.answering.questions import Question
from flashdraft.server.answering.serving import Serving
from flashdraft.server.answering.usage import reasoning_tokens, statistics
from flashdraft.server.http.sse import DONE, KEEP_ALIVE, sse
from flashdraft.server.openai.chat_fields import ChatRequest
from flashdraft.server.openai.common import Chunks, new_frame, usage_of


async def chat_completion(
    serving: Serving,
    body: ChatRequest,
    questions: Sequence[Question],
    found: Sequence[CollectedAnswer],
) -> dict[str, Any]:
    """The whole completion."""
    texts = serving.token_texts if body.logprobs else None
    choices = []
    for index, answer in enumerate(found):
        logprobs = None
        if texts is not None:
            entries = chat_logprobs(texts, answer.tokens, body.top_logprobs or 0)
            logprobs = {"content": entries, "refusal": None}
        choices.append(
            {
                "index": index,
                "message": _message(answer),
                "logprobs": logprobs,
                "finish_reason": answer.end.reason,
            }
        )
    return {
        **new_frame(serving, body, "chat.completion"),
        "choices": choices,
        "usage": usage_of(questions, found, await reasoning_tokens(serving, found)),
        "flashdraft": statistics([answer.end.generation for answer in found]),
    }


def _message(answer: CollectedAnswer) -> dict[str, Any]:
    text, calls = answer.text("content"), answer.calls
    message: dict[str, Any] = {
        "role": "assistant",
        "content": text or (None if calls else ""),
        "reasoning_content": answer.text("reasoning") or None,
        "refusal": None,
    }
    if calls:
        message["tool_calls"] = [
            {
                "id": new_id("call_"),
                "type": "function",
                "function": {"name": call.name, "arguments": call.text},
            }
            for call in calls
        ]
    return message


class ChatStreamWriter:
    """Writes the parts of n answers as chunks."""

    def __init__(self, serving: Serving, body: ChatRequest, questions: Sequence[Question]) -> None:
        self._serving = serving
        self._questions = questions
        self._answers = [CollectedAnswer() for _ in questions]
        self._texts = serving.token_texts if body.logprobs else None
        self._num_top = body.top_logprobs or 0
        self._chunks = Chunks(serving, body, questions, "chat.completion.chunk")

    async def chunks(self, parts: AsyncIterator[AnswerPart | None]) -> AsyncIterator[str]:
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
        if self._chunks.tells_usage:
            ends = [answer.end.generation for answer in self._answers]
            num_reasoning = await reasoning_tokens(self._serving, self._answers)
            usage = usage_of(self._questions, self._answers, num_reasoning)
            told = {"choices": [], "usage": usage, "flashdraft": statistics(ends)}
            yield sse({**self._chunks.frame, **told})
        yield DONE

    def _of_part(self, part: AnswerPart) -> list[str]:
        view = self._chunks.take(part)
        logprobs = None
        if self._texts is not None:
            entries = chat_logprobs(self._texts, part.tokens, self._num_top)
            logprobs = {"content": entries} if entries else None
        deltas = [made for delta in part.deltas if (made := _delta(delta)) is not None]
        if not deltas and (logprobs or view):
            deltas = [{}]  # the tokens are known although their text is held back
        chunks = []
        for delta in deltas:
            chunks.append(self._chunk(part.index, delta, logprobs=logprobs, flashdraft=view))
            logprobs = view = None
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
        return self._chunks.write(choice, flashdraft)


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
