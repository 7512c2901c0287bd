"""A server whose engine reads its answers from a script: the real routes, tokenizer and parsers.

The tokenizer is the tiny byte-level one with Gemma 4's marks as special tokens, so that scripts are
written in Gemma 4's own form: `<|channel>thought\\n…<channel|>`, `<|tool_call>call:name{…}`.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import httpx2
import tokenizers
from fastapi import FastAPI

from flashdraft.core import (
    FinishReason,
    Generation,
    GenerationStats,
    Request,
    ShownTree,
    TokenEvent,
    TokenLogprob,
)
from flashdraft.engine.output import TextOutput
from flashdraft.models.stream_decoder import StreamDecoder
from flashdraft.models.tokenizer import Tokenizer
from flashdraft.server.answering.serving import Serving
from flashdraft.server.anthropic import messages as anthropic
from flashdraft.server.ollama import generation as ollama
from flashdraft.server.openai import chat, completions, responses
from flashdraft.server.process.client import EngineInfo
from flashdraft.server.process.queue_places import QueuePlaces, ReservedPlaces
from flashdraft.server.settings import ServerSettings
from flashdraft.server.telemetry.metrics import Metrics
from tests.tiny import END_OF_TURN, make_tiny_tokenizer

MODEL = "tiny"
MARKS = (
    "<|tool>",
    "<tool|>",
    "<|tool_call>",
    "<tool_call|>",
    "<|tool_response>",
    "<tool_response|>",
    '<|"|>',
    "<|think|>",
    "<|channel>",
    "<channel|>",
    "<|turn>",
    "<turn|>",
)
TEMPLATE = (
    "{% if enable_thinking %}<|think|>{% endif %}"
    "{% for tool in tools or [] %}<|tool>{{ tool.function.name }}<tool|>{% endfor %}"
    "{% for message in messages %}<|turn>{{ message.role }}\n"
    "{% if message.reasoning %}({{ message.reasoning }}){% endif %}"
    "{% for call in message.tool_calls or [] %}"
    "[{{ call.function.name }}:{{ call.function.arguments | tojson }}]{% endfor %}"
    "{% if message.role == 'tool' %}{{ message.name }}={% endif %}"
    "{{ message.content }}<turn|>\n{% endfor %}<|turn>model\n"
    "{% if not enable_thinking %}<|channel>thought\n<channel|>{% endif %}"
)
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}
CALL = '<|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:2}<tool_call|>'
OTHER_CALL = '<|tool_call>call:get_weather{city:<|"|>Rome<|"|>}<tool_call|>'
THOUGHT = "<|channel>thought\nlet me see<channel|>"

Step = str | Exception


@functools.cache
def make_tokenizer() -> Tokenizer:
    """The tiny tokenizer with Gemma 4's marks and a template that shows what it is given."""
    backend = make_tiny_tokenizer()
    backend.add_special_tokens([tokenizers.AddedToken(mark, special=True) for mark in MARKS])
    return Tokenizer(backend, special_tokens={}, chat_template=TEMPLATE)


class ScriptedEngine:
    """Answers every request with the next script; a script is cut into steps of `width` tokens."""

    def __init__(self, tokenizer: Tokenizer, scripts: Sequence[Step], width: int = 3) -> None:
        self.tokenizer = tokenizer
        self.scripts = list(scripts)
        self.width = width
        self.requests: list[Request] = []
        self.cancelled: list[str] = []
        self.places = QueuePlaces()
        self.pause: Callable[[int], Any] | None = None  # awaited before every step
        self.info = EngineInfo(
            model=MODEL,
            drafter=None,
            max_context=4096,
            vocab_size=tokenizer.vocab_size,
            eos_token_ids=(END_OF_TURN,),
            device="cpu",
            dtype="float32",
            generation_config={"temperature": 0.7, "top_k": 64},
            supports_grammar=True,
        )

    def reserve(self, count: int) -> AbstractContextManager[ReservedPlaces]:
        return self.places.reserve(count)

    async def generate(
        self, request: Request, reserved: ReservedPlaces | None = None
    ) -> AsyncGenerator[TokenEvent]:
        self.requests.append(request)
        script = self.scripts[(len(self.requests) - 1) % len(self.scripts)]
        done = False
        try:
            if isinstance(script, Exception):
                raise script
            for number, event in enumerate(self._events(request, script)):
                if self.pause is not None:
                    await self.pause(number)
                await asyncio.sleep(0)
                done = event.generation is not None
                yield event
        finally:
            if not done:
                self.cancelled.append(request.id)

    def _events(self, request: Request, script: str) -> list[TokenEvent]:
        text, _, failure = script.partition("!!")
        ids = [*self.tokenizer.encode(text), END_OF_TURN]
        output = TextOutput(StreamDecoder(self.tokenizer), request.params.stop)
        events: list[TokenEvent] = []
        taken: list[int] = []
        while True:
            step = ids[len(taken) : len(taken) + self.width]
            reason = None
            used = []
            for token in step:
                used.append(token)
                taken.append(token)
                if token == END_OF_TURN or output.push(token):
                    reason = FinishReason.STOP
                elif len(taken) == request.params.max_tokens:
                    reason = FinishReason.LENGTH
                if reason is not None:
                    break
            if failure and len(events) == 2:
                reason = FinishReason.ERROR
            if reason is not None:
                output.finish()
            shown = output.take()
            generation = None
            if reason is not None:
                generation = self._generation(request, output.text, taken, reason, failure)
            events.append(
                TokenEvent(
                    request.id,
                    tuple(used),
                    shown.text,
                    tuple(number > 0 for number in range(len(used))),
                    self._logprobs(request, used),
                    generation,
                    shown.pieces,
                    self._trees(request, used),
                )
            )
            if reason is not None:
                return events

    def _trees(self, request: Request, ids: Sequence[int]) -> tuple[ShownTree, ...]:
        """Of every step: its tokens, but for the first, behind a branch that was refused."""
        if not request.shows_trees or len(ids) < 2:
            return ()
        tokens = (END_OF_TURN, *ids[1:])
        path = tuple(range(2, 1 + len(tokens)))
        return (ShownTree(1, tokens, (0, 0, *path[:-1]), path),)

    def _logprobs(self, request: Request, ids: Sequence[int]) -> tuple[TokenLogprob, ...] | None:
        count = request.params.logprobs
        return None if count is None else tuple(_logprob(token, count) for token in ids)

    def _generation(
        self, request: Request, text: str, ids: list[int], reason: FinishReason, failure: str
    ) -> Generation:
        stats = GenerationStats(
            prompt_tokens=len(request.prompt_ids),
            cached_tokens=2,
            steps=2,
            drafted=6,
            accepted=4,
            decode_tokens=6,
            histogram={3: 2},
            ttft_s=0.5,
            decode_s=2.0,
        )
        prompt_logprobs = None
        if request.prompt_logprobs is not None:
            rest = [_logprob(token, request.prompt_logprobs) for token in request.prompt_ids[1:]]
            prompt_logprobs = [None, *rest]
        error = failure or None
        return Generation(
            text, list(ids), reason, stats, error=error, prompt_logprobs=prompt_logprobs
        )


def _logprob(token: int, count: int) -> TokenLogprob:
    top = ((token, -0.25), (token + 1, -1.5), (token + 2, -3.0))
    return TokenLogprob(-0.25, top[:count])


class CountedMetrics(Metrics):
    """Remembers what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, str]] = []

    def finished(self, route: str, outcome: str, generation: Generation | None) -> None:
        self.seen.append((route, outcome))


class Scripted:
    """The app around a scripted engine, and a client for it."""

    def __init__(self, *scripts: Step, width: int = 3, **settings: Any) -> None:
        tokenizer = make_tokenizer()
        self.engine = ScriptedEngine(tokenizer, scripts, width)
        self.metrics = CountedMetrics()
        self.serving = Serving(self.engine, tokenizer, ServerSettings(**settings), self.metrics)
        self.app = FastAPI()
        for module in (chat, completions, responses, anthropic, ollama):
            self.app.include_router(module.router(self.serving))

    def post(self, path: str, body: Any) -> httpx2.Response:
        """Send one request; a string is sent as it is."""

        async def send() -> httpx2.Response:
            transport = httpx2.ASGITransport(self.app, raise_app_exceptions=False)
            async with httpx2.AsyncClient(transport=transport, base_url="http://test") as client:
                if isinstance(body, str | bytes):
                    headers = {"Content-Type": "application/json"}
                    return await client.post(path, content=body, headers=headers)
                return await client.post(path, json=body)

        return asyncio.run(send())

    def prompt(self, index: int = -1) -> str:
        """The prompt of a request, as text."""
        ids = self.engine.requests[index].prompt_ids
        return self.engine.tokenizer.decode(ids, skip_special=False)
