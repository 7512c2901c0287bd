"""What every route needs: the engine, the tokenizer, the limits, the names of the model, metrics.

Routes never reach past this: no module holds a server's state.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any, Protocol

from flashdraft.chat.response import sampling_defaults
from flashdraft.core import Generation, Request, TokenEvent
from flashdraft.errors import ContextLengthError
from flashdraft.models.tokenizer import Tokenizer
from flashdraft.server.api_errors import ApiError, UnknownModelError
from flashdraft.server.engine_client import EngineInfo
from flashdraft.server.settings import ServerSettings


class Engine(Protocol):
    """The part of `EngineClient` that routes use."""

    @property
    def info(self) -> EngineInfo: ...

    def generate(self, request: Request) -> AsyncGenerator[TokenEvent]: ...


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

    @property
    def sampling_defaults(self) -> dict[str, Any]:
        """What a request gets where it says nothing: the checkpoint's advice, else OpenAI's 1.0."""
        return {"temperature": 1.0, **sampling_defaults(self.engine.info.generation_config)}

    def encode(self, text: str, add_special: bool = False) -> list[int]:
        """Token ids of a prompt's text; one that cannot fit is refused without tokenizing it."""
        limit = self.engine.info.max_context
        if len(text) > 2 * limit * self.tokenizer.longest_token:
            raise ContextLengthError(
                f"The prompt has {len(text)} characters; the context holds {limit} tokens. "
                "Shorten it."
            )
        return self.tokenizer.encode(text, add_special)

    def check_model(self, name: str) -> None:
        """Refuse a model that is not served."""
        if name not in self.model_names:
            served = ", ".join(repr(one) for one in self.model_names)
            raise UnknownModelError(f"The model {name!r} is not served here; use {served}.")

    def count_failure(self, route: str, error: ApiError) -> None:
        """Count a request whose client is told of an error."""
        self.metrics.finished(route, "refused" if error.status < 500 else "error", None)
