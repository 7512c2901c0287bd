"""The engine under test in this very process: prompts in, measured replies out.

Plain is the same engine and loop with verify length 0 for the request. A fixed number of requests
is kept in flight; the prefix cache is emptied before each run, so that no mode finds what the other
left behind.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch

from flashdraft.bench.results import DRAFT, DRAFTS, PLAIN, Measurement, Reply, acceptance_of
from flashdraft.bench.run.measure import OnReply, Run
from flashdraft.bench.tasks import BenchPrompt
from flashdraft.chat.answer_format import AnswerFormat
from flashdraft.chat.answers.deltas import Content
from flashdraft.chat.templates import encode_chat
from flashdraft.core import FinishReason, Generation, Request, SamplingParams, TokenEvent
from flashdraft.errors import RequestError
from flashdraft.llm import LLM

THINKING_SWITCH = "enable_thinking"
PREPARE_S = 90.0  # of a warm-up, at most: to capture the steps that may come


@dataclass
class _Talk:
    """A conversation under way: its messages so far, and the replies they got."""

    place: int
    messages: list[Mapping[str, Any]]
    left: deque[str]
    replies: list[Reply] = field(default_factory=list)
    # of the running turn
    prompt_ids: list[int] = field(default_factory=list)
    pieces: list[str | int] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    last_at: float | None = None

    @classmethod
    def of(cls, place: int, prompt: BenchPrompt) -> _Talk:
        return cls(place, list(prompt.messages), deque(prompt.follow_ups))

    def hear(self, event: TokenEvent, now: float) -> None:
        """Take in a step's tokens and the time they came at."""
        self.pieces += event.pieces
        count = len(event.token_ids)
        if count and self.last_at is not None:
            self.gaps += [(now - self.last_at) / count] * count
        if count:
            self.last_at = now


class LocalRunner:
    """Runs prompts through an `LLM`'s engine."""

    def __init__(self, llm: LLM, params: SamplingParams, thinking: bool, seed: int) -> None:
        tokenizer = llm.tokenizer
        assert tokenizer is not None, "who makes a runner has checked that there is one"
        if thinking and THINKING_SWITCH not in (tokenizer.chat_template or ""):
            raise RequestError(
                f"The chat template of {llm.model} has no switch {THINKING_SWITCH}: this model "
                "does not think aloud. Drop --thinking."
            )
        self._llm, self._tokenizer = llm, tokenizer
        self._answer_format = AnswerFormat.of(tokenizer)
        self._params, self._thinking, self._seed = params, thinking, seed
        self._ids = itertools.count()
        drafts = llm.engine.config.verify != 0
        self.modes: tuple[str, ...] = (PLAIN, DRAFT) if drafts else (PLAIN,)

    def run(self, run: Run, on_reply: OnReply) -> Measurement:
        """Answer every prompt with `run.concurrency` of them in flight."""
        engine = self._llm.engine
        engine.forget_prefixes()
        if run.is_warm_up:
            engine.prepare(PREPARE_S)
        if self._llm.kernels.device.type == "cuda":
            torch.cuda.synchronize(self._llm.kernels.device)
        waiting = deque(_Talk.of(place, prompt) for place, prompt in enumerate(run.prompts))
        flying: dict[str, _Talk] = {}
        done: dict[int, Sequence[Reply]] = {}
        failures: list[str] = []
        verified: list[int] = []
        accepted: list[int] = []
        begin = end = time.perf_counter()
        while waiting or flying:
            while waiting and len(flying) < run.concurrency:
                self._submit(waiting.popleft(), run, flying, failures)
            for event in engine.step():
                talk = flying[event.request_id]
                now = time.perf_counter()
                talk.hear(event, now)
                if event.generation is None:
                    continue
                del flying[event.request_id]
                end = now
                stats = event.generation.stats
                verified = _add(verified, stats.slots_verified)
                accepted = _add(accepted, stats.slots_accepted)
                reply = self._reply(talk, event.generation, failures)
                if reply is None:
                    continue
                talk.replies.append(reply)
                on_reply(reply)
                if talk.left:
                    talk.messages += [
                        {"role": "assistant", "content": reply.content},
                        {"role": "user", "content": talk.left.popleft()},
                    ]
                    waiting.appendleft(talk)  # it keeps its place in flight
                else:
                    done[talk.place] = talk.replies
        replies = {place: done[place] for place in sorted(done)}
        every = [reply for one in replies.values() for reply in one]
        return Measurement(
            replies,
            end - begin,
            acceptance_of(every, verified, accepted),
            [f"{run.label}: {failure}" for failure in dict.fromkeys(failures)],
            len(run.prompts) - len(done),
        )

    def _submit(self, talk: _Talk, run: Run, flying: dict[str, _Talk], failures: list[str]) -> None:
        switches = {THINKING_SWITCH: self._thinking}
        try:
            talk.prompt_ids = encode_chat(self._tokenizer, talk.messages, extra=switches)
        except (RequestError, ValueError, TypeError) as error:  # a template's no, half a character
            failures.append(f"prompt {talk.place + 1} was refused: {error}")
            return
        talk.pieces, talk.gaps, talk.last_at = [], [], None
        params = SamplingParams(
            max_tokens=run.max_tokens,
            temperature=self._params.temperature,
            top_p=self._params.top_p,
            top_k=self._params.top_k,
            min_p=self._params.min_p,
        )
        request = Request(
            f"bench-{next(self._ids)}",
            talk.prompt_ids,
            params,
            self._seed + talk.place,
            verify=0 if run.mode == PLAIN else None,
        )
        try:
            self._llm.engine.submit(request)
        except RequestError as error:  # too long for the context, most likely
            failures.append(f"prompt {talk.place + 1} was refused: {error}")
            return
        flying[request.id] = talk

    def _reply(self, talk: _Talk, generation: Generation, failures: list[str]) -> Reply | None:
        if generation.finish_reason is FinishReason.ERROR:
            failures.append(f"prompt {talk.place + 1} failed: {generation.error}")
            return None
        parser = self._answer_format.parser(talk.prompt_ids, None)
        deltas = [*parser.push(talk.pieces), *parser.finish()]
        stats = generation.stats
        return Reply(
            text="".join(piece for piece in talk.pieces if isinstance(piece, str)),
            content="".join(delta.text for delta in deltas if isinstance(delta, Content)),
            seconds=stats.ttft_s + stats.decode_s,
            ttft_s=stats.ttft_s,
            prompt_tokens=stats.prompt_tokens,
            output_tokens=len(generation.token_ids),
            token_gaps=talk.gaps,
            cached_tokens=stats.cached_tokens,
            steps=stats.steps,
            histogram=stats.histogram,
            buckets=stats.buckets,
            drafts={name: getattr(stats, name) for name in DRAFTS},
        )


def _add(left: Sequence[int], right: Sequence[int]) -> list[int]:
    return [a + b for a, b in zip_longest(left, right, fillvalue=0)]
