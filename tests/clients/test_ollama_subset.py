"""Ollama's own clients on the part of its API that is served: what is shown, sent and refused."""

from __future__ import annotations

from typing import Any

import pytest

from tests.clients.conftest import MAX_CONTEXT, Ask
from tests.clients.test_scripted_model import value_of
from tests.e2e.live_server import LiveServer
from tests.unit.server.scripted import CALL, MODEL, OTHER_CALL, THOUGHT

TEXT = "Well, é\u2028\x85 😀."  # two of them end a line for some clients
CALLS = [{"city": "Paris", "days": 2}, {"city": "Rome"}]

both = pytest.mark.parametrize("environment", ["clients", "js"])


def ollama(ask: Ask, environment: str, aspect: str) -> Any:
    return value_of(ask, environment, "ollama_client", aspect)


@both
def test_models(ask_scripted: Ask, environment: str) -> None:
    assert ollama(ask_scripted, environment, "models") == {
        "listed": [f"{MODEL}:latest"],
        "context": MAX_CONTEXT,
        "capabilities": ["completion", "tools", "thinking"],
    }


@both
@pytest.mark.parametrize("aspect", ["chat", "chat_stream"])
def test_chat(scripted: LiveServer, ask_scripted: Ask, environment: str, aspect: str) -> None:
    scripted.play(THOUGHT + TEXT + CALL + OTHER_CALL)
    found = ollama(ask_scripted, environment, aspect)
    tokens, nanoseconds = found.pop("counts")
    assert found == {"content": TEXT, "thinking": "let me see", "calls": CALLS, "done": True}
    assert tokens > 10 and nanoseconds > 0


@both
def test_generate(scripted: LiveServer, ask_scripted: Ask, environment: str) -> None:
    scripted.play("Hello there")
    found = ollama(ask_scripted, environment, "generate")
    assert found["whole"] == "".join(found["pieces"]) == "Hello there"
    assert found["loaded"] == "load"


@both
def test_refusals(ask_scripted: Ask, environment: str) -> None:
    refusals = ollama(ask_scripted, environment, "refusals")
    for status, words in refusals[:5]:
        assert status == 403 and "over HTTP" in words
    assert "Embeddings are not served" in refusals[5][1]
    assert f"this server's context has {MAX_CONTEXT}" in refusals[6][1]
    assert "not found" in refusals[7][1]
