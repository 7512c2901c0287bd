"""From the fields of any API to what the engine is asked: prompt, settings, grammar, limits.

Knows no API's shape: messages are in the chat template's form, a tool is OpenAI's function tool.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from flashdraft.chat.binding import Tool, ToolUse
from flashdraft.chat.pictures import PicturePrompt
from flashdraft.core import GrammarSpec, PlacedPicture, Request, SamplingParams, answer_seeds
from flashdraft.errors import ContextLengthError, RequestError
from flashdraft.server.answering.constraints import answer_grammar
from flashdraft.server.answering.serving import Serving
from flashdraft.server.http.body_structure import MAX_STOP_TOKEN_IDS
from flashdraft.server.http.errors import FieldError, field_of
from flashdraft.server.http.fields import FlashdraftOptions

MAX_STOP_CHARACTERS = 1024


@dataclass(frozen=True)
class Question:
    """One answer to be generated."""

    prompt_ids: list[int]
    params: SamplingParams
    tool_use: ToolUse | None = None  # None: a raw continuation, nothing is parsed
    grammar: GrammarSpec | None = None
    verify: int | None = None
    prompt_logprobs: int | None = None
    pictures: tuple[PlacedPicture, ...] = ()
    shows_trees: bool = False  # its parts tell what was verified beside the chains
    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)

    def request(self) -> Request:
        """What the engine is sent; `spread` has made the seed a definite one."""
        assert self.params.seed is not None
        return Request(
            self.request_id,
            self.prompt_ids,
            self.params,
            self.params.seed,
            self.verify,
            grammar=self.grammar,
            prompt_logprobs=self.prompt_logprobs,
            pictures=self.pictures,
            shows_trees=self.shows_trees,
        )


@dataclass(frozen=True)
class ChatInput:
    """What the chat template is given."""

    messages: Sequence[Mapping[str, Any]]
    switches: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True  # the answer's turn has begun
    continues_last: bool = False  # it is the last message's, and goes on where that ends


async def conversation_prompt(
    serving: Serving, conversation: ChatInput, tools: Sequence[Tool] | None
) -> PicturePrompt:
    """The token ids of a conversation within the limits, and its pictures in their places."""
    limit, messages = serving.settings.max_messages, conversation.messages
    if not messages:
        raise FieldError("messages", "messages is empty; it needs at least one message.")
    if len(messages) > limit:
        raise FieldError("messages", f"messages has {len(messages)} entries; at most {limit}.")
    if conversation.continues_last:
        _check_open(messages[-1])
    vision = serving.engine.info.vision
    opened = await serving.pictures.open(messages, vision)
    token_ids = await serving.tokenize_chat(
        opened.messages,
        tools,
        conversation.switches,
        conversation.add_generation_prompt,
        conversation.continues_last,
    )
    if opened.films:  # their times are encoded
        encode = serving.tokenizer.encode_batch
        return await asyncio.to_thread(opened.place, token_ids, vision, encode)
    return opened.place(token_ids, vision)


def _check_open(last: Mapping[str, Any]) -> None:
    """Refuse to continue what is no text of the assistant's."""
    if last["role"] != "assistant":
        raise FieldError(
            "messages",
            f"messages ends with the role {last['role']!r}; only the assistant's message can be "
            "continued.",
        )
    if last.get("tool_calls"):
        raise FieldError(
            "messages",
            "messages ends with calls, which cannot be continued; send their results.",
        )


async def chat_question(
    serving: Serving,
    conversation: ChatInput,
    tool_use: ToolUse,
    form: GrammarSpec | None,
    given: Mapping[str, Any],
    drafting: FlashdraftOptions,
    names: Mapping[str, str],
) -> Question:
    """What the engine is asked to answer a conversation; `given` are the request's settings.

    `names` has what the API calls fields that have another name here.
    """
    with renamed(names):
        if conversation.continues_last and (form is not None or tool_use.is_forced):
            raise FieldError(
                "messages",
                "messages ends with an answer to be continued, and a form or a forced call holds "
                "for whole answers; leave out the one or the other.",
            )
        if conversation.continues_last and conversation.switches.get("enable_thinking"):
            raise FieldError(
                "thinking",
                "thinking is on, and messages ends with an answer to be continued, before which no "
                "thought can stand; leave out the one or the other.",
            )
        prompt_ids, pictures = await conversation_prompt(serving, conversation, tool_use.offered)
        params = sampling(serving, prompt_ids, given)
        thinking = conversation.switches.get("enable_thinking")
        grammar = None
        if form is not None or tool_use.tools:  # in a thread: all tools together may be long
            parts = tool_use, form, prompt_ids, thinking, params.max_tokens
            grammar = await asyncio.to_thread(answer_grammar, serving, *parts)
    return Question(
        prompt_ids,
        params,
        tool_use,
        grammar,
        drafting.verify,
        pictures=pictures,
        shows_trees=drafting.trees,
    )


@contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Complaints about fields that have another name here name them as the API does."""
    try:
        yield
    except RequestError as error:
        name = field_of(error)
        if name is None or name not in names:
            raise
        text = str(error)
        begins = text.startswith(f"{name} ") or text.startswith(f"{name}[")
        text = names[name] + text.removeprefix(name) if begins else text
        raise FieldError(names[name], text) from None


def room_for_answer(serving: Serving, prompt_ids: Sequence[int]) -> int:
    """How many tokens the context has left; ContextLengthError if there are none."""
    room = serving.engine.info.max_context - len(prompt_ids)
    if room < 1:
        raise ContextLengthError(
            f"The prompt has {len(prompt_ids)} tokens; the context holds "
            f"{serving.engine.info.max_context} with at least one for the answer. Shorten it."
        )
    return room


def sampling(
    serving: Serving, prompt_ids: Sequence[int], given: Mapping[str, Any]
) -> SamplingParams:
    """The settings of an answer: what the request says, else what the checkpoint recommends."""
    room = room_for_answer(serving, prompt_ids)
    chosen = {**serving.sampling_defaults, **{k: v for k, v in given.items() if v is not None}}
    if given.get("max_tokens") is None:
        chosen["max_tokens"] = min(room, chosen["max_tokens"])
    chosen["stop"] = check_stop(serving, chosen.get("stop", ()))
    if "stop_token_ids" in chosen:
        check_stop_ids(serving, chosen["stop_token_ids"])
    if "logit_bias" in chosen:
        chosen["logit_bias"] = check_bias(serving, chosen["logit_bias"])
    return SamplingParams(**chosen)


def check_stop(serving: Serving, stop: str | Sequence[str]) -> tuple[str, ...]:
    """Stop strings within the limits; an empty one would end every answer at once."""
    many = (stop,) if isinstance(stop, str) else tuple(stop)
    limit = serving.settings.max_stop
    if len(many) > limit:
        raise FieldError("stop", f"stop has {len(many)} strings; at most {limit}.")
    for one in many:
        if not one:
            raise FieldError("stop", "stop holds an empty string; it must have non-empty ones.")
        if len(one) > MAX_STOP_CHARACTERS:
            raise FieldError(
                "stop", f"A stop string has {len(one)} characters; at most {MAX_STOP_CHARACTERS}."
            )
    return many


def check_stop_ids(serving: Serving, ids: Sequence[int]) -> None:
    """Stop tokens within the limit and the vocabulary."""
    where, size = "stop_token_ids", serving.engine.info.vocab_size
    if len(ids) > MAX_STOP_TOKEN_IDS:
        raise FieldError(where, f"{where} has {len(ids)} entries; at most {MAX_STOP_TOKEN_IDS}.")
    if (wrong := next((token for token in ids if not 0 <= token < size), None)) is not None:
        raise FieldError(where, f"{where} holds {wrong}; token ids are from 0 to {size - 1}.")


def check_bias(serving: Serving, bias: Mapping[str, float]) -> dict[int, float]:
    """logit_bias by token id; JSON has it by text."""
    limit = serving.settings.max_logit_bias
    if len(bias) > limit:
        raise FieldError("logit_bias", f"logit_bias has {len(bias)} entries; at most {limit}.")
    checked, size = {}, serving.engine.info.vocab_size
    for token, value in bias.items():
        if not (token.isascii() and token.isdigit() and len(token) <= 10):
            raise FieldError("logit_bias", f"logit_bias has the key {token!r}; keys are token ids.")
        if int(token) >= size:
            raise FieldError(
                "logit_bias", f"logit_bias has the key {token}; token ids end at {size - 1}."
            )
        checked[int(token)] = value
    return checked


def spread(serving: Serving, question: Question, n: int | None) -> list[Question]:
    """The question n times, with the seeds seed, seed + 1, … ; a fresh seed where there is none."""
    limit = serving.settings.max_n
    count = 1 if n is None else n
    if not 1 <= count <= limit:
        raise FieldError("n", f"n is {count}; it must be from 1 to {limit}.")
    return [
        replace(question, params=replace(question.params, seed=seed), request_id=uuid.uuid4().hex)
        for seed in answer_seeds(question.params.seed, count)
    ]


def thinking_switches(
    serving: Serving, thinking: bool | None, given: Mapping[str, Any] | None
) -> dict[str, Any]:
    """The template's switches: those on the list, and thinking on or off where the API says so."""
    allowed = serving.settings.template_kwargs
    for name, value in (given or {}).items():
        if name not in allowed:
            raise FieldError(
                "chat_template_kwargs",
                f"chat_template_kwargs has {name!r}; allowed are {', '.join(allowed)}.",
            )
        if not isinstance(value, bool | None):
            raise FieldError(
                "chat_template_kwargs", f"chat_template_kwargs.{name} must be true or false."
            )
    switches = {} if thinking is None else {"enable_thinking": thinking}
    return {**switches, **(given or {})}
