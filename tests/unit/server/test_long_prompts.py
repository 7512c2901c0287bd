"""A prompt that cannot fit is refused by its length alone, before anything tokenizes it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from flashdraft.errors import ContextLengthError
from flashdraft.models.tokenizer import Tokenizer
from flashdraft.server.answering.serving import Serving
from flashdraft.server.process.life import WORKER_COMMAND


class Counted:
    """A tokenizer that counts what it is asked."""

    longest_token = 4

    def __init__(self) -> None:
        self.calls = 0

    def encode(self, text: str, add_special: bool = False) -> list[int]:
        self.calls += 1
        return list(range(len(text)))


def test_a_text_beyond_all_tokens_is_refused_unread() -> None:
    tokenizer = Counted()
    engine: Any = SimpleNamespace(info=SimpleNamespace(max_context=10))
    serving = Serving(engine, cast(Tokenizer, tokenizer), cast(Any, None), cast(Any, None))
    assert len(asyncio.run(serving.tokenize("a" * 80))) == 80
    with pytest.raises(ContextLengthError, match="81 characters; the context holds 10 tokens"):
        asyncio.run(serving.tokenize("a" * 81))
    assert tokenizer.calls == 1


def test_the_worker_imports_nothing_from_the_current_folder() -> None:
    assert "-P" in WORKER_COMMAND
