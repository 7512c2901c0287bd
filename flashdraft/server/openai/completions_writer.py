"""Answers as a completion of raw prompts, whole or in chunks."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from flashdraft.server.answering.answers import AnswerPart
from flashdraft.server.answering.blocks import CollectedAnswer
from flashdraft.server.answering.logprobs import LegacyLogprobs
from flashdraft.server.answering.questions import Question
from flashdraft.server.answering.serving import Serving
from flashdraft.server.answering.usage import openai_usage, statistics
from flashdraft.server.http.sse import DONE, KEEP_ALIVE, sse
from flashdraft.server.openai.common import Chunks, usage_of
from flashdraft.server.openai.completions_fields import CompletionRequest
from flashdraft.server.openai.completions_input import RawPrompt


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
