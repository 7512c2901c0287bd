"""The prompts and settings of /v1/completions to what the engine is asked."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flashdraft.chat.binding import ToolUse
from flashdraft.core import GrammarSpec
from flashdraft.server.answering.constraints import answer_grammar
from flashdraft.server.answering.questions import Question, room_for_answer, sampling, spread
from flashdraft.server.answering.serving import Serving
from flashdraft.server.http.body_structure import MAX_PROMPTS
from flashdraft.server.http.errors import FieldError
from flashdraft.server.openai.common import output_form, sampling_fields
from flashdraft.server.openai.completions_fields import CompletionRequest

DEFAULT_MAX_TOKENS = 16  # OpenAI's


@dataclass(frozen=True)
class RawPrompt:
    """One prompt, as tokens and, where it is shown, as text."""

    text: str
    ids: list[int]


async def raw_prompts(serving: Serving, body: CompletionRequest) -> list[RawPrompt]:
    """The prompts of a body that can be answered."""
    serving.model_name(body.model)
    _check(body)
    return [await _prompt(serving, one, bool(body.echo)) for one in _given(body)]


def completion_questions(
    serving: Serving, body: CompletionRequest, prompts: Sequence[RawPrompt]
) -> list[Question]:
    """What the engine is asked, n times for each prompt."""
    form = output_form(serving, body)
    return [one for prompt in prompts for one in _questions(serving, body, form, prompt)]


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


def _questions(
    serving: Serving, body: CompletionRequest, form: GrammarSpec | None, prompt: RawPrompt
) -> list[Question]:
    given = body.max_tokens if body.max_tokens is not None else DEFAULT_MAX_TOKENS
    params = sampling(
        serving,
        prompt.ids,
        {**sampling_fields(body), "max_tokens": max(1, given), "logprobs": body.logprobs},
    )
    question = Question(
        prompt.ids,
        params,
        grammar=answer_grammar(serving, ToolUse(), form, prompt.ids),
        verify=body.drafting.verify,
        prompt_logprobs=body.logprobs if body.echo else None,
        shows_trees=body.drafting.trees,
    )
    return spread(serving, question, body.n)
