"""What the OpenAI routes share: sampling fields, output formats, errors of streams, usage."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from flashdraft.core import GrammarSpec
from flashdraft.server.answering.answers import AnswerPart
from flashdraft.server.answering.blocks import CollectedAnswer, new_id
from flashdraft.server.answering.constraints import (
    choice_grammar,
    json_schema_grammar,
    regex_grammar,
)
from flashdraft.server.answering.questions import Question
from flashdraft.server.answering.serving import Serving
from flashdraft.server.answering.usage import TokenView, openai_usage
from flashdraft.server.http.errors import ApiError, FieldError, openai_shape
from flashdraft.server.http.fields import ResponseFormat, SamplingFields, StreamOptions
from flashdraft.server.http.sse import sse

_PASSED_ON = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "stop_token_ids",
    "min_tokens",
    "ignore_eos",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
)


def sampling_fields(body: SamplingFields) -> dict[str, Any]:
    """The fields that go to the engine as they are."""
    if body.stream_options is not None and not body.stream:
        raise FieldError("stream_options", "stream_options is set without stream; set both.")
    return {name: getattr(body, name) for name in _PASSED_ON}


def output_form(serving: Serving, body: SamplingFields) -> GrammarSpec | None:
    """The one constraint on the answer's text."""
    found: list[tuple[str, GrammarSpec]] = []

    def add(where: str, value: Any, make: Callable[[Serving, Any, str], GrammarSpec]) -> None:
        if value is not None:
            found.append((where, make(serving, value, where)))

    if (grammar := _format(serving, body.response_format)) is not None:
        found.append(("response_format", grammar))
    add("guided_json", body.guided_json, json_schema_grammar)
    add("guided_regex", body.guided_regex, regex_grammar)
    add("guided_choice", body.guided_choice, choice_grammar)
    if (outputs := body.structured_outputs) is not None:
        add("structured_outputs.json", outputs.json_, json_schema_grammar)
        add("structured_outputs.regex", outputs.regex, regex_grammar)
        add("structured_outputs.choice", outputs.choice, choice_grammar)
        if outputs.json_object:
            found.append(("structured_outputs.json_object", GrammarSpec("json_object")))
    if len(found) > 1:
        names = ", ".join(where for where, _ in found)
        raise FieldError(found[1][0], f"{names} are all set; an answer has one constraint.")
    return found[0][1] if found else None


def _format(serving: Serving, wanted: ResponseFormat | None) -> GrammarSpec | None:
    """The grammar of a response_format."""
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return GrammarSpec("json_object")
    where = "response_format.json_schema"
    if wanted.json_schema is None or wanted.json_schema.schema_ is None:
        raise FieldError(where, f"{where}.schema is missing; it is the schema to follow.")
    return json_schema_grammar(serving, wanted.json_schema.schema_, where)


def usage_of(
    questions: Sequence[Question], found: Sequence[CollectedAnswer], num_reasoning: int = 0
) -> dict[str, Any]:
    """The usage of finished answers; a prompt that several answers share counts once."""
    prompts = {id(question.prompt_ids): len(question.prompt_ids) for question in questions}
    cached = {
        id(question.prompt_ids): answer.end.generation.stats.cached_tokens
        for question, answer in zip(reversed(questions), reversed(found), strict=True)
    }  # in reverse: the first answer to a prompt tells, it came before the others could help it
    return openai_usage(
        sum(prompts.values()),
        sum(len(answer.end.generation.token_ids) for answer in found),
        sum(cached.values()),
        num_reasoning,
    )


class Chunks:
    """What the chunks of both APIs' streams share: a frame, usage, and the extension field."""

    def __init__(
        self, serving: Serving, body: SamplingFields, questions: Sequence[Question], kind: str
    ) -> None:
        options = body.stream_options or StreamOptions.model_construct()
        self.tells_usage = bool(options.include_usage)
        self._tells_usage_so_far = bool(options.continuous_usage_stats)
        prompts = {id(one.prompt_ids): len(one.prompt_ids) for one in questions}
        self._num_prompt_tokens = sum(prompts.values())
        self._num_tokens = [0] * len(questions)
        shows = body.drafting.tokens
        self._views = [TokenView(serving) for _ in questions] if shows else None
        self.frame = new_frame(serving, body, kind)

    def take(self, part: AnswerPart) -> dict[str, Any] | None:
        """Count a part; what the extension field says of its tokens."""
        self._num_tokens[part.index] = part.num_tokens
        return self._views[part.index].show(part) if self._views is not None else None

    def write(self, choice: dict[str, Any], flashdraft: dict[str, Any] | None = None) -> str:
        """The chunk of one choice."""
        chunk: dict[str, Any] = {**self.frame, "choices": [choice]}
        if self.tells_usage:
            chunk["usage"] = self._usage_so_far() if self._tells_usage_so_far else None
        if flashdraft is not None:
            chunk["flashdraft"] = flashdraft
        return sse(chunk)

    def _usage_so_far(self) -> dict[str, Any]:
        return openai_usage(self._num_prompt_tokens, sum(self._num_tokens), 0, 0)


def new_frame(serving: Serving, body: SamplingFields, kind: str) -> dict[str, Any]:
    """What every answer and chunk begins with."""
    prefix = "cmpl-" if kind == "text_completion" else "chatcmpl-"
    return {
        "id": new_id(prefix),
        "object": kind,
        "created": int(time.time()),
        "model": serving.model_name(body.model),
    }


def stream_failure(serving: Serving, route: str) -> Callable[[ApiError], str]:
    """The last event of a stream that fails: an error object, and no [DONE]."""

    def write(error: ApiError) -> str:
        serving.count_failure(route, error)
        return sse(openai_shape(error))

    return write
