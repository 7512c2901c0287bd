"""What answering needs of others: an engine, and somebody who counts."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AbstractContextManager
from typing import Protocol

from flashdraft.core import Generation, Request, TokenEvent
from flashdraft.server.process.client import EngineInfo
from flashdraft.server.process.queue_places import ReservedPlaces


class AnswerEngine(Protocol):
    """The part of `EngineClient` that routes use."""

    @property
    def info(self) -> EngineInfo: ...

    def reserve(self, count: int) -> AbstractContextManager[ReservedPlaces]: ...

    def generate(
        self, request: Request, reserved: ReservedPlaces | None = None
    ) -> AsyncGenerator[TokenEvent]: ...


class PictureCounter(Protocol):
    """Who counts pictures."""

    def picture_opened(self, num_tokens: int) -> None: ...

    def picture_refused(self) -> None: ...


class RequestCounter(PictureCounter, Protocol):
    """Who counts requests and their pictures.

    `outcome`: stop, length, tool_calls, cancelled, error or refused.
    """

    def finished(self, route: str, outcome: str, generation: Generation | None) -> None: ...
