"""From the engine's events to what every API says: reasoning, text, calls, usage, why it ended.

This is the one loop over events; the APIs only write its parts in their own shapes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Literal

from flashdraft.chat.answers.deltas import Content, Delta, Reasoning, ResponseParser
from flashdraft.core import FinishReason, Generation, ShownTree, TokenEvent, TokenLogprob
from flashdraft.engine.sampling.grammar import TOO_COMPLEX, GrammarTooComplexError
from flashdraft.server.answering.questions import Question
from flashdraft.server.answering.serving import Serving
from flashdraft.server.http.errors import GenerationFailedError
from flashdraft.server.process.queue_places import ReservedPlaces

MAX_TOGETHER = 16  # answers to one request; more of them wait here, not in the engine's queue
_QUEUED_PARTS = 16  # of answers that are generated together and read one after the other


@dataclass(frozen=True)
class Token:
    """A token of an answer, as logprobs and the token view show it."""

    id: int
    drafted: bool
    logprob: TokenLogprob | None
    is_stop: bool  # the token that ended the answer; only the older logprobs show it


@dataclass(frozen=True)
class End:
    """How an answer ended."""

    reason: Literal["stop", "length", "tool_calls"]
    stop_string: str | None  # the stop string that ended it
    generation: Generation


@dataclass(frozen=True)
class AnswerPart:
    """What one step of the engine added to one of the answers."""

    index: int  # which answer
    step: int
    deltas: list[Delta]
    tokens: list[Token]
    num_tokens: int  # of this answer so far, the stop token included
    end: End | None = None
    trees: tuple[ShownTree, ...] = ()  # that were verified, where the question asks


async def answers(
    serving: Serving, route: str, questions: Sequence[Question]
) -> AsyncGenerator[AnswerPart]:
    """The parts of all answers as they come. Closing it cancels what still runs.

    A queue without room for all that run together refuses the request before any of them begins.
    Counts requests that end well or are given up; failures are counted where they are told.
    """
    places = serving.engine.info.max_batch + serving.settings.max_queue
    together = min(MAX_TOGETHER, len(questions), max(1, places))  # more would never be let in
    ends: list[End] = []
    try:
        with serving.engine.reserve(together) as reserved:
            streams = [
                _answer(serving, number, one, reserved) for number, one in enumerate(questions)
            ]
            parts = streams[0] if len(streams) == 1 else _merge(streams, together)
            async with contextlib.aclosing(parts):
                async for part in parts:
                    if part.end is not None:
                        ends.append(part.end)
                        reserved.give_back_all_but(len(questions) - len(ends))
                    yield part
    except (asyncio.CancelledError, GeneratorExit):
        serving.metrics.finished(route, "cancelled", None)
        raise
    serving.metrics.finished(route, ends[-1].reason, ends[-1].generation)


async def _answer(
    serving: Serving, index: int, question: Question, reserved: ReservedPlaces
) -> AsyncGenerator[AnswerPart]:
    reader = _EventReader(serving, index, question)
    async with contextlib.aclosing(serving.engine.generate(question.request(), reserved)) as events:
        async for event in events:
            yield reader.read(event)
            if event.generation is not None:
                return
    raise GenerationFailedError("The engine ended the answer without a result; send it again.")


class _EventReader:
    """Reads one answer's events."""

    def __init__(self, serving: Serving, index: int, question: Question) -> None:
        self._tokenizer = serving.tokenizer
        self._index = index
        self._params = question.params
        self._stop_ids = frozenset(question.params.stop_token_ids)
        if not question.params.ignore_eos:
            self._stop_ids |= frozenset(serving.engine.info.eos_token_ids)
        self._parser: ResponseParser | None = None
        self._max_calls: float = 0
        if question.tool_use is not None:
            offered = question.tool_use.offered
            self._parser = serving.answer_format.parser(question.prompt_ids, offered)
            if offered:
                self._max_calls = float("inf") if question.tool_use.parallel else 1
        self._num_tokens = self._steps = 0
        self._called = False

    def read(self, event: TokenEvent) -> AnswerPart:
        generation = event.generation
        if generation is not None and generation.finish_reason is FinishReason.ERROR:
            why = generation.error or "The answer could not be computed."
            is_grammar = why.startswith(TOO_COMPLEX)
            raise GrammarTooComplexError(why) if is_grammar else GenerationFailedError(why)
        if generation is not None and generation.finish_reason is FinishReason.CANCELLED:
            raise GenerationFailedError("The server cancelled the answer; send it again.")
        self._num_tokens += len(event.token_ids)
        self._steps += 1
        deltas = self._deltas(event)
        end = None if generation is None else self._end(generation)
        tokens, num_tokens = self._tokens(event), self._num_tokens
        return AnswerPart(
            self._index, self._steps, deltas, tokens, num_tokens, end, trees=event.trees
        )

    def _deltas(self, event: TokenEvent) -> list[Delta]:
        if self._parser is None:
            return [Content(event.text)] if event.text else []
        deltas = self._parser.push(event.pieces)
        if event.generation is not None:
            deltas = [*deltas, *self._parser.finish()]
        return [delta for delta in deltas if self._may_show(delta)]

    def _may_show(self, delta: Delta) -> bool:
        """A call that the request excludes (no tools, no second call) is no part of the answer."""
        if isinstance(delta, Reasoning | Content):
            return bool(delta.text)
        shown = delta.index < self._max_calls
        self._called |= shown
        return shown

    def _tokens(self, event: TokenEvent) -> list[Token]:
        is_stopped = event.generation is not None and (
            event.generation.finish_reason is FinishReason.STOP
        )
        last = len(event.token_ids) - 1
        logprobs: Sequence[TokenLogprob | None] = event.logprobs or [None] * (last + 1)
        return [
            Token(
                token,
                event.drafted[number],
                logprobs[number],
                is_stopped and number == last and token in self._stop_ids,
            )
            for number, token in enumerate(event.token_ids)
        ]

    def _end(self, generation: Generation) -> End:
        if generation.finish_reason is FinishReason.LENGTH:
            return End("length", None, generation)
        stop_string = self._stop_string(generation)
        return End("tool_calls" if self._called else "stop", stop_string, generation)

    def _stop_string(self, generation: Generation) -> str | None:
        """Which stop string ended the text: the one that the tokens spell behind it."""
        ids = generation.token_ids
        if not self._params.stop or not ids or ids[-1] in self._stop_ids:
            return None
        rest = self._tokenizer.decode(ids)[len(generation.text) :]
        return next((stop for stop in self._params.stop if rest.startswith(stop)), None)


async def _merge(
    streams: Sequence[AsyncGenerator[AnswerPart]], together: int
) -> AsyncGenerator[AnswerPart]:
    """Several answers at once; the first failure ends them all."""
    parts: asyncio.Queue[AnswerPart | None | Exception] = asyncio.Queue(_QUEUED_PARTS)
    turns = asyncio.Semaphore(together)

    async def pump(stream: AsyncGenerator[AnswerPart]) -> None:
        try:
            async with turns, contextlib.aclosing(stream):
                async for part in stream:
                    await parts.put(part)
            await parts.put(None)
        except Exception as error:
            await parts.put(error)

    tasks = [asyncio.create_task(pump(stream)) for stream in streams]
    try:
        waiting = len(tasks)
        while waiting:
            part = await parts.get()
            if isinstance(part, Exception):
                raise part
            if part is None:
                waiting -= 1
            else:
                yield part
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
