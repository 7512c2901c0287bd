"""One answer from request to last token: shown as it comes, stoppable, with its statistics."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import cast

from flashdraft.cli.display import AnswerView
from flashdraft.core import FinishReason, Generation, GenerationStats, SamplingParams, TokenEvent
from flashdraft.llm import failure_of


@dataclass(frozen=True)
class ShownAnswer:
    """What came of a request; without a generation it was interrupted."""

    text: str
    num_tokens: int
    stats: GenerationStats
    generation: Generation | None


def show_answer(
    events: Iterator[TokenEvent],
    view: AnswerView,
    is_stopped: Callable[[], bool] = lambda: False,
) -> ShownAnswer:
    """Show a stream to its end, or cancel it once `is_stopped`."""
    text = ""
    # a stream is a generator: closing it cancels the request
    with closing(cast(Generator[TokenEvent, None, None], events)), closing(view):
        for event in events:
            view.show(event)
            text += event.text
            if event.generation is not None:
                return _finished(event.generation)
            if is_stopped():
                break
    return ShownAnswer(text, view.progress.num_tokens, view.progress.stats, None)


def describe_cut(
    generation: Generation, params: SamplingParams, context: int, more: str = "--max-tokens"
) -> str | None:
    """By what an answer was cut off, and what gives it more room; None if it came to its end."""
    if generation.finish_reason is not FinishReason.LENGTH:
        return None
    limit = params.max_tokens
    if limit is not None and len(generation.token_ids) >= limit:
        return f"by --max-tokens {limit}; {more} {4 * limit} gives it more room."
    return (
        f"by the end of the context, {context} tokens for prompt and answer; shorten the prompt, "
        "or raise --max-context where the model and the memory have more."
    )


def _finished(generation: Generation) -> ShownAnswer:
    if generation.finish_reason is FinishReason.ERROR:
        raise failure_of(generation)
    return ShownAnswer(generation.text, len(generation.token_ids), generation.stats, generation)
