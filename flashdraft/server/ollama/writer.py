"""Answers as Ollama writes them: one object, or a line of JSON for each part and one for the end.

Times are in nanoseconds. What a model writes is a string of JSON in a line, whatever it is.
"""

from __future__ import annotations

import functools
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

from flashdraft.chat.answers.blocks import Block
from flashdraft.server.answering.answers import AnswerPart, Token
from flashdraft.server.answering.blocks import CollectedAnswer, new_id
from flashdraft.server.answering.logprobs import chat_logprobs
from flashdraft.server.answering.questions import Question
from flashdraft.server.answering.serving import Serving
from flashdraft.server.answering.usage import statistics
from flashdraft.server.http.errors import json_text
from flashdraft.server.ollama.fields import OllamaChatRequest, OllamaRequest
from flashdraft.server.ollama.naming import asked_name
from flashdraft.text.exact_json import Written

NDJSON = "application/x-ndjson"


def line(data: dict[str, Any]) -> str:
    """One line of a stream."""
    return json_text(data) + "\n"


class OllamaWriter:
    """Writes one answer."""

    def __init__(self, serving: Serving, body: OllamaRequest) -> None:
        self._began = time.perf_counter()
        self._model = asked_name(serving, body.model)
        self._is_chat = isinstance(body, OllamaChatRequest)
        self._texts = serving.token_texts if body.logprobs else None
        self._num_top = body.top_logprobs or 0

    def loaded(self) -> dict[str, Any]:
        """The answer to a request that asks nothing: the model is there."""
        return {**self._part("", "", []), "done": True, "done_reason": "load"}

    def whole(self, question: Question, answer: CollectedAnswer) -> dict[str, Any]:
        """The whole answer."""
        said, thought = answer.text("content"), answer.text("reasoning")
        made = self._part(said, thought, _calls(answer.calls), self._shown(answer.tokens))
        return {**made, **self._end(question, answer)}

    def lines(
        self, question: Question
    ) -> Callable[[AsyncIterator[AnswerPart | None]], AsyncIterator[str]]:
        """What makes lines of an answer's parts."""
        return functools.partial(self._lines, question)

    async def _lines(
        self, question: Question, parts: AsyncIterator[AnswerPart | None]
    ) -> AsyncIterator[str]:
        """All lines of the stream; a long silence brings one that says nothing."""
        answer = CollectedAnswer()
        num_calls = 0
        async for part in parts:
            if part is None:
                yield line({**self._part("", "", []), "done": False})
                continue
            changes = answer.add(part)
            if part.end is not None:
                changes = [*changes, *answer.parsed.close()]
            texts = {"reasoning": "", "content": "", "call": ""}
            for change in changes:
                texts[change.block.kind] += change.text
            ended = [c.block for c in changes if c.change == "end" and c.block.kind == "call"]
            calls = _calls(ended, num_calls)
            num_calls += len(calls)
            shown = self._shown(part.tokens)
            if texts["content"] or texts["reasoning"] or calls or shown:
                made = self._part(texts["content"], texts["reasoning"], calls, shown)
                yield line({**made, "done": False})
        yield line({**self._part("", "", []), **self._end(question, answer)})

    def _part(
        self,
        said: str,
        thought: str,
        calls: list[dict[str, Any]],
        shown: Sequence[dict[str, Any]] = (),
    ) -> dict[str, Any]:
        content: dict[str, Any] = {"content" if self._is_chat else "response": said}
        if thought:
            content["thinking"] = thought
        if calls:
            content["tool_calls"] = calls
        made: dict[str, Any] = {"model": self._model, "created_at": stamp(datetime.now(UTC))}
        made |= {"message": {"role": "assistant", **content}} if self._is_chat else content
        return {**made, "logprobs": shown} if shown else made

    def _shown(self, tokens: Iterable[Token]) -> list[dict[str, Any]]:
        if self._texts is None:
            return []
        return chat_logprobs(self._texts, list(tokens), self._num_top)

    def _end(self, question: Question, answer: CollectedAnswer) -> dict[str, Any]:
        generation = answer.end.generation
        stats = generation.stats
        return {
            "done": True,
            "done_reason": "length" if answer.end.reason == "length" else "stop",
            "total_duration": _nanoseconds(time.perf_counter() - self._began),
            "load_duration": 0,  # it was loaded before
            "prompt_eval_count": len(question.prompt_ids),
            "prompt_eval_duration": _nanoseconds(stats.ttft_s - stats.queue_s),
            "eval_count": len(generation.token_ids),
            "eval_duration": _nanoseconds(stats.decode_s),
            "flashdraft": statistics([generation]),
        }


def stamp(moment: datetime) -> str:
    """A time as Ollama writes it."""
    return moment.isoformat().replace("+00:00", "Z")


def _calls(blocks: Iterable[Block], first: int = 0) -> list[dict[str, Any]]:
    """Calls, each as a whole: arguments are an object."""
    return [
        {
            "id": new_id("call_"),
            "function": {
                "index": first + number,
                "name": block.name,
                "arguments": Written(block.text or "{}"),
            },
        }
        for number, block in enumerate(blocks)
    ]


def _nanoseconds(seconds: float) -> int:
    """At least one: clients divide by it."""
    return max(1, round(seconds * 1e9))
