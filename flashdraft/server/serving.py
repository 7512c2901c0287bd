"""What every route needs: the engine, the tokenizer, the limits, the names of the model, metrics.

Routes never reach past this: no module holds a server's state.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from flashdraft.chat.response import sampling_defaults
from flashdraft.core import Generation, Request, TokenEvent
from flashdraft.errors import ContextLengthError
from flashdraft.models.tokenizer import Tokenizer
from flashdraft.server.api_errors import ApiError, UnknownModelError
from flashdraft.server.engine_client import EngineInfo
from flashdraft.server.places import Hold
from flashdraft.server.settings import ServerSettings
from flashdraft.server.token_texts import TokenTexts

LONG_TEXT = 16 * 1024  # characters; texts that are longer take noticeable time to tokenize
LONG_AT_ONCE = 2  # of them; the others wait, and short ones do not wait for them


class Engine(Protocol):
    """The part of `EngineClient` that routes use."""

    @property
    def info(self) -> EngineInfo: ...

    def reserve(self, count: int) -> AbstractContextManager[Hold]: ...

    def generate(
        self, request: Request, hold: Hold | None = None
    ) -> AsyncGenerator[TokenEvent]: ...


class Metrics(Protocol):
    """Who counts requests. `outcome`: stop, length, tool_calls, cancelled, error or refused."""

    def finished(self, route: str, outcome: str, generation: Generation | None) -> None: ...


@dataclass(frozen=True)
class Serving:
    """Everything that routes share."""

    engine: Engine
    tokenizer: Tokenizer
    settings: ServerSettings
    metrics: Metrics

    @property
    def model_names(self) -> tuple[str, ...]:
        """What clients may call the model; answers carry the name that was asked for."""
        return self.settings.served_model_names or (self.engine.info.model,)

    @cached_property
    def sampling_defaults(self) -> dict[str, Any]:
        """What a request gets where it says nothing: the checkpoint's advice, else OpenAI's 1.0."""
        return {"temperature": 1.0, **sampling_defaults(self.engine.info.generation_config)}

    @cached_property
    def token_texts(self) -> TokenTexts:
        """The texts of single tokens; made once, for a large vocabulary takes a second."""
        return TokenTexts(self.tokenizer)

    async def tokenize(self, text: str, add_special: bool = False) -> list[int]:
        """Token ids of a prompt's text, made in a thread: other requests go on meanwhile."""
        threads = self._few_threads if len(text) > LONG_TEXT else None
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(threads, self.encode, text, add_special)

    @cached_property
    def _few_threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(LONG_AT_ONCE, "flashdraft-tokenize")

    def encode(self, text: str, add_special: bool = False) -> list[int]:
        """Token ids of a prompt's text; one that cannot fit is refused without tokenizing it."""
        limit = self.engine.info.max_context
        most = 2 * limit * self.tokenizer.longest_token
        if len(text) > most:
            raise ContextLengthError(
                f"The prompt has {len(text)} characters; the context holds {limit} tokens, so more "
                f"than {most} are not even tokenized. Shorten it."
            )
        if len(text) <= LONG_TEXT:
            return self.tokenizer.encode(text, add_special)
        # unlike `encode` this lets the other threads of Python run
        (ids,) = self.tokenizer.encode_batch([text])
        before, after = self._around_text if add_special else ([], [])
        return [*before, *ids, *after]

    @cached_property
    def _around_text(self) -> tuple[list[int], list[int]]:
        """The special tokens that stand before and after a text."""
        bare, whole = self.tokenizer.encode("a"), self.tokenizer.encode("a", add_special=True)
        begin = next(n for n in range(len(whole)) if whole[n : n + len(bare)] == bare)
        return whole[:begin], whole[begin + len(bare) :]

    def check_model(self, name: str) -> None:
        """Refuse a model that is not served."""
        if name not in self.model_names:
            served = ", ".join(repr(one) for one in self.model_names)
            raise UnknownModelError(f"The model {name!r} is not served here; use {served}.")

    def count_failure(self, route: str, error: ApiError) -> None:
        """Count a request whose client is told of an error."""
        self.metrics.finished(route, "refused" if error.status < 500 else "error", None)
