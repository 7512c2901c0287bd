"""What every route needs: the engine, the tokenizer, the limits, the names of the model, metrics.

Routes never reach past this: no module holds a server's state.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from flashdraft.chat.answer_format import AnswerFormat
from flashdraft.chat.sampling import answer_limit, sampling_defaults
from flashdraft.chat.templates import encode_chat
from flashdraft.errors import ContextLengthError, EngineLostError, quoted
from flashdraft.killable.pool import RefusedError
from flashdraft.media.kinds import FILM, PDF, is_readable
from flashdraft.models.tokenizer import Tokenizer, is_long
from flashdraft.server.answering.needs import AnswerEngine, RequestCounter
from flashdraft.server.answering.pictures import PictureOpener
from flashdraft.server.answering.token_texts import TokenTexts
from flashdraft.server.http.errors import ApiError, UnknownModelError
from flashdraft.server.settings import ServerSettings

LONG_AT_ONCE = 1  # texts; the others wait, and short ones do not wait for them
SHORT_AT_ONCE = 2  # more would wait for a process of the tokenizer all the same


@dataclass(frozen=True)
class Serving:
    """Everything that routes share."""

    engine: AnswerEngine
    tokenizer: Tokenizer
    settings: ServerSettings
    metrics: RequestCounter

    @property
    def model_names(self) -> tuple[str, ...]:
        """What clients may call the model; answers carry the name that was asked for."""
        return self.settings.served_model_names or (self.engine.info.model,)

    @cached_property
    def sampling_defaults(self) -> dict[str, Any]:
        """What a request gets where it says nothing: the checkpoint's advice, else OpenAI's 1.0."""
        advice, context = self.engine.info.generation_config, self.engine.info.max_context
        limit = self.settings.max_tokens_default or answer_limit(advice, context)
        return {"temperature": 1.0, "max_tokens": limit, **sampling_defaults(advice)}

    @cached_property
    def answer_format(self) -> AnswerFormat:
        """How the model marks thoughts and calls; found out once, for all requests."""
        return AnswerFormat.of(self.tokenizer)

    @cached_property
    def capabilities(self) -> list[str]:
        """What the model can be asked for, in Ollama's words, and two of our own."""
        able = {
            "completion": True,
            "tools": True,
            "thinking": self.answer_format.marks_thoughts,
            "vision": self.takes_pictures,
            "video": self.takes_films,
            "pdf": self.takes_pictures and is_readable(PDF),
        }
        return [what for what, is_there in able.items() if is_there]

    @property
    def takes_pictures(self) -> bool:
        """Whether the model that is loaded does; none does before."""
        try:
            return self.engine.info.vision is not None
        except EngineLostError:
            return False

    @property
    def takes_films(self) -> bool:
        """Whether the model does, and what reads them is installed."""
        vision = self.engine.info.vision if self.takes_pictures else None
        return vision is not None and vision.tokens.video is not None and is_readable(FILM)

    @cached_property
    def pictures(self) -> PictureOpener:
        """Who opens the pictures of all requests."""
        return PictureOpener(self.settings, self.metrics)

    @cached_property
    def token_texts(self) -> TokenTexts:
        """The texts of single tokens; made once, for a large vocabulary takes a second."""
        return TokenTexts(self.tokenizer)

    async def tokenize(self, text: str, add_special: bool = False) -> list[int]:
        """Token ids of a prompt's text; one that cannot fit is refused without tokenizing it."""
        if len(text) > self._most_chars:
            raise self._too_long(len(text))
        return await self._wait_for(is_long(text), self.tokenizer.encode, text, add_special)

    async def tokenize_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        switches: Mapping[str, Any] | None,
        add_generation_prompt: bool,
        continues_last: bool = False,
    ) -> list[int]:
        """Token ids of a conversation, in the model's own format."""
        waits = is_long([messages, tools, switches])
        encode = functools.partial(
            encode_chat,
            self.tokenizer,
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            extra=switches,
            allowed=self.settings.template_kwargs,
            max_chars=self._most_chars,
            waits=waits,
            continues_last=continues_last,
        )
        try:
            return await self._wait_for(waits, encode)
        except RefusedError as error:
            raise self._too_long(int(str(error))) from None

    async def _wait_for(
        self, waits: bool, make: Callable[..., list[int]], *arguments: Any
    ) -> list[int]:
        """What a thread waits for, while other requests go on; long ones keep few waiting."""
        threads = self._long_threads if waits else self._short_threads
        return await asyncio.get_running_loop().run_in_executor(threads, make, *arguments)

    @cached_property
    def _short_threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(SHORT_AT_ONCE, "flashdraft-short")

    @cached_property
    def _long_threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(LONG_AT_ONCE, "flashdraft-long")

    @property
    def _most_chars(self) -> int:
        return 2 * self.engine.info.max_context * self.tokenizer.longest_token

    def _too_long(self, size: int) -> ContextLengthError:
        return ContextLengthError(
            f"The prompt has {size} characters; the context holds {self.engine.info.max_context} "
            f"tokens, so more than {self._most_chars} are not even tokenized. Shorten it."
        )

    def model_name(self, given: str | None) -> str:
        """The name that an answer carries: the one that was asked for, else the leading one.

        Raises UnknownModelError where another model is asked for.
        """
        if given is None:
            return self.model_names[0]
        if given not in self.model_names:
            served = ", ".join(repr(one) for one in self.model_names)
            raise UnknownModelError(
                f"The model {quoted(given)} is not served here; use {served}, or leave model out."
            )
        return given

    def count_failure(self, route: str, error: ApiError) -> None:
        """Count a request whose client is told of an error."""
        self.metrics.finished(route, "refused" if error.status < 500 else "error", None)
