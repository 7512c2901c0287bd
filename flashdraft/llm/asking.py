"""Prompts, conversations and settings in all the forms users give them, made into requests."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

from flashdraft.chat.answer_format import AnswerFormat
from flashdraft.chat.answers.deltas import ResponseParser
from flashdraft.chat.binding import ToolUse, bound_grammar
from flashdraft.chat.messages import Message, check_tools
from flashdraft.chat.pictures import PicturePrompt
from flashdraft.chat.sampling import MIN_ANSWER
from flashdraft.chat.sight import Sight
from flashdraft.chat.templates import encode_with_pictures
from flashdraft.core import GrammarSpec, PlacedPicture, Request, SamplingParams, answer_seeds
from flashdraft.errors import RequestError, quoted
from flashdraft.models.config.vision import VisionConfig
from flashdraft.models.tokenizer import Tokenizer

Prompt = str | Sequence[int]
Messages = Sequence[Message]  # a conversation
Pictures = tuple[PlacedPicture, ...]
Settings = SamplingParams | Sequence[SamplingParams] | None
Tools = Sequence[Mapping[str, Any]] | None
ToolChoice = str | Mapping[str, Any] | None  # a word, a function's name, or OpenAI's object
Switches = Mapping[str, Any] | None  # of a chat template
CALLS = "generate(…), chat(…), stream(…)"  # where words of others are explained
SETTINGS = tuple(field.name for field in fields(SamplingParams))


@dataclass(frozen=True)
class AskedChat:
    """What reads the answers of a conversation."""

    answer_format: AnswerFormat
    tools: Tools

    def parser(self, prompt_ids: Sequence[int]) -> ResponseParser:
        """A parser of one answer."""
        return self.answer_format.parser(prompt_ids, self.tools)


@dataclass(frozen=True)
class Asked:
    """One prompt as the engine gets it: a request for each answer that is wanted."""

    requests: tuple[Request, ...]
    chat: AskedChat | None = None  # None: a text is continued, nothing is parsed


class Asker:
    """Makes requests for one model, which sees pictures if it has a `vision`.

    Threads may share it.
    """

    def __init__(
        self, model: str, tokenizer: Tokenizer | None, vision: VisionConfig | None = None
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self.sight = None if vision is None else Sight(vision)

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises RequestError where the model has none."""
        if self._tokenizer is None:
            raise RequestError(
                f"{self._model} has no tokenizer; give prompts as lists of token ids, without stop "
                "strings and grammars."
            )
        return self._tokenizer

    @cached_property
    def _answer_format(self) -> AnswerFormat:
        return AnswerFormat.of(self.tokenizer)

    def texts(
        self,
        prompts: Prompt | Sequence[Prompt],
        settings: Settings,
        grammar: GrammarSpec | None,
    ) -> list[Asked]:
        """Texts or token ids to be continued as they are."""
        many = _as_list(prompts)
        return [
            self._asked(PicturePrompt(self._ids(prompt)), params, grammar)
            for prompt, params in zip(many, _settings(settings, len(many)), strict=True)
        ]

    def one(
        self,
        prompt: Prompt | Messages,
        settings: Settings,
        grammar: GrammarSpec | None,
        tool_use: ToolUse,
        switches: Switches,
        verify: int | None = None,
    ) -> Asked:
        """A text or a conversation with one answer, which comes in pieces."""
        if isinstance(settings, SamplingParams) and settings.n > 1:
            raise RequestError(f"n is {settings.n}; a stream is one answer: use generate or chat.")
        if _is_conversation(prompt):
            conversation: Any = [prompt]
            return self.chats(conversation, settings, tool_use, grammar, switches, verify)[0]
        if tool_use.tools or switches:
            raise RequestError("tools and chat_template_kwargs are for conversations, not texts.")
        (params,) = _settings(settings, 1)
        return self._asked(PicturePrompt(self._ids(prompt)), params, grammar, verify)

    def chats(
        self,
        conversations: Sequence[Messages],
        settings: Settings,
        tool_use: ToolUse,
        grammar: GrammarSpec | None,
        switches: Switches,
        verify: int | None = None,
    ) -> list[Asked]:
        """Conversations to be answered in the model's own chat format."""
        asked, tools = list[Asked](), tool_use.offered
        each = _settings(settings, len(conversations))
        for messages, params in zip(conversations, each, strict=True):
            prompt = self.chat_prompt(messages, tools, switches)
            bound = self._bound(prompt.token_ids, params, tool_use, grammar, switches)
            chat = AskedChat(self._answer_format, tools)
            asked.append(self._asked(prompt, params, bound, verify, chat))
        return asked

    def chat_prompt(self, messages: Messages, tools: Tools, switches: Switches) -> PicturePrompt:
        """The token ids of a conversation, and its pictures, opened."""
        if switches is not None and not isinstance(switches, Mapping):
            raise RequestError(
                f"chat_template_kwargs is {quoted(switches)}; it must be a mapping, such as "
                '{"enable_thinking": True}.'
            )
        return encode_with_pictures(
            self.tokenizer, messages, self.sight, may_name_files=True, tools=tools, extra=switches
        )

    def _bound(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        tool_use: ToolUse,
        grammar: GrammarSpec | None,
        switches: Switches,
    ) -> GrammarSpec | None:
        """The grammar of a form and of calls; thoughts before them stay free."""
        if grammar is not None and not isinstance(grammar, GrammarSpec):
            return grammar  # the engine says what is wrong with it
        if grammar is None and not tool_use.tools:
            return None
        thinking = (switches or {}).get("enable_thinking")
        return bound_grammar(
            self._answer_format,
            tool_use,
            grammar,
            prompt_ids,
            thinking if isinstance(thinking, bool) else None,
            params.max_tokens or MIN_ANSWER,
        )

    def _ids(self, prompt: Any) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt, add_special=True)
        if not _is_list(prompt):
            raise RequestError(
                f"A prompt is {quoted(prompt)}; it must be text or a list of token ids (messages: "
                "chat)."
            )
        return list(prompt)

    def _asked(
        self,
        prompt: PicturePrompt,
        params: SamplingParams,
        grammar: GrammarSpec | None,
        verify: int | None = None,
        chat: AskedChat | None = None,
    ) -> Asked:
        if params.stop or grammar is not None:
            _ = self.tokenizer  # there must be one
        single = replace(params, n=1)
        requests = (
            Request(
                uuid.uuid4().hex,
                prompt.token_ids,
                single,
                seed,
                verify,
                grammar,
                params.prompt_logprobs,
                prompt.pictures,
            )
            for seed in answer_seeds(params.seed, params.n)
        )
        return Asked(tuple(requests), chat)


def one_of(params: Settings, sampling_params: Settings) -> Settings:
    """The settings, by our name or by vLLM's."""
    if params is not None and sampling_params is not None:
        raise RequestError("params and sampling_params are one thing; give one of them.")
    return sampling_params if params is None else params


def conversations(messages: Any) -> tuple[list[Messages], bool]:
    """Conversations, and whether they were given as a list of such."""
    is_many = _is_list(messages) and len(messages) > 0 and _is_list(messages[0])
    return (list(messages) if is_many else [messages]), is_many


def _is_conversation(prompt: Any) -> bool:
    return _is_list(prompt) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def tool_use_of(tools: Tools, choice: ToolChoice) -> ToolUse:
    """Tools, and which of them is to be called: as the server's `tool_choice` says it."""
    name = choice
    if isinstance(name, Mapping):  # {"type": "function", "function": {"name": …}}
        function = name.get("function")
        name = function.get("name") if isinstance(function, Mapping) else None
    if choice is not None and not isinstance(name, str):
        raise RequestError(
            f"tool_choice is {quoted(choice)}; it must be 'auto', 'none', 'required', or the name "
            "of one of the tools."
        )
    checked = tuple(map(_function_tool, check_tools(tools) or ()))
    tool_use = ToolUse(checked, "auto" if name is None else name)
    if wrong := tool_use.wrong_choice:
        raise RequestError(wrong)
    return tool_use


def _function_tool(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """A tool in OpenAI's form, as which a bare function may stand."""
    is_whole = isinstance(tool.get("function"), Mapping)
    return tool if is_whole else {"type": "function", "function": tool}


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if not _is_list(prompts):
        raise RequestError(
            f"prompts is {quoted(prompts)}; it must be text, a list of token ids, or a list of "
            "such."
        )
    if prompts and not isinstance(prompts[0], str | Sequence | Mapping):
        return [list(prompts)]  # type: ignore[arg-type]
    return list(prompts)  # type: ignore[arg-type]


def _settings(params: Settings, count: int) -> list[SamplingParams]:
    """One `SamplingParams` for each of `count` prompts."""
    params = SamplingParams() if params is None else params
    many = list(params) if isinstance(params, Sequence) else [params] * count
    if len(many) != count:
        raise RequestError(
            f"There are {count} prompts and {len(many)} SamplingParams; give one for all or one "
            "for each."
        )
    for one in many:
        if not isinstance(one, SamplingParams):
            raise RequestError(f"params holds {quoted(one)}; it must be SamplingParams.")
    return many
