"""Every client on the default pair: text, stream, tools and schema, as a new user would try them.

A client's script runs once with all it is asked (`python/`, `js/`); here is what must come of it.
"""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest

from tests.clients.client_processes import Report
from tests.clients.conftest import Ask
from tests.clients.python.schemas import PERSON_SCHEMA, WEATHER_SCHEMA

pytestmark = [pytest.mark.weights, pytest.mark.alone, pytest.mark.timeout(300)]

FOUR = ["text", "stream", "tools", "schema"]
BY_FUNCTION = "schema_by_function"  # a function whose call is the object
BY_ANTHROPIC = ["text_by_anthropic", "stream_by_anthropic", "schema_by_anthropic"]

# client: its environment, its script, what it is asked
CLIENTS: dict[str, tuple[str, str, list[str]]] = {
    "openai": ("clients", "openai_chat", [*FOUR, "named"]),
    "openai, responses": ("clients", "openai_responses", FOUR),
    "anthropic": ("clients", "anthropic_messages", FOUR),
    "openai for js": ("js", "openai_chat", FOUR),
    "@anthropic-ai/sdk": ("js", "anthropic_messages", FOUR),
    "langchain-openai": ("clients", "langchain_openai_chat", [*FOUR, BY_FUNCTION]),
    "langchain-anthropic": ("clients", "langchain_anthropic_chat", [*FOUR, BY_FUNCTION]),
    "litellm": (
        "instructor",
        "litellm_completion",
        [*FOUR, *BY_ANTHROPIC, "tools_by_anthropic"],
    ),
    "@ai-sdk/openai-compatible": ("js", "ai_sdk_openai_compatible", [*FOUR, "generate_object"]),
    "@ai-sdk/anthropic": ("js", "ai_sdk_anthropic", [*FOUR, "generate_object"]),
    "instructor": ("instructor", "instructor_objects", ["text", "objects", BY_FUNCTION, "schema"]),
    "pydantic-ai": (
        "clients",
        "pydantic_ai_agent",
        ["text", "stream", "schema", BY_FUNCTION, *BY_ANTHROPIC],
    ),
    "openai-agents": (
        "clients",
        "openai_agents",
        [*FOUR, *(f"{aspect}_by_responses" for aspect in FOUR)],
    ),
    "llm": ("clients", "llm_command", ["text", "stream", "schema"]),
    "aider": ("aider", "aider_command", ["text", "printed"]),
    "ollama": ("clients", "ollama_client", ["text", "stream", "schema"]),
    "ollama for js": ("js", "ollama_client", ["text", "stream", "schema"]),
}
REPORTS: dict[str, Report] = {}


def value_of(ask: Ask, client: str, aspect: str) -> Any:
    """What came of one aspect; the first question runs the client's script for all of them."""
    if client not in REPORTS:
        REPORTS[client] = ask(*CLIENTS[client])
    found = REPORTS[client][aspect]
    assert "error" not in found, f"{client}, {aspect}:\n{found['error']}"
    return found["value"]


def aspects(*kinds: str) -> list[tuple[str, str]]:
    """The clients' aspects of some kinds: `text` is one, and `text_by_anthropic` another."""
    return [
        (client, aspect)
        for client, (_, _, asked) in CLIENTS.items()
        for aspect in asked
        if aspect.partition("_by_")[0] in kinds
    ]


@pytest.mark.parametrize(("client", "aspect"), aspects("text"))
def test_text(ask_default: Ask, client: str, aspect: str) -> None:
    assert len(value_of(ask_default, client, aspect)) > 20


@pytest.mark.parametrize(("client", "aspect"), aspects("stream"))
def test_a_stream_is_the_text_in_pieces(ask_default: Ask, client: str, aspect: str) -> None:
    pieces = value_of(ask_default, client, aspect)
    text = value_of(ask_default, client, aspect.replace("stream", "text"))
    assert len(pieces) > 3 and "".join(pieces) == text


@pytest.mark.parametrize(("client", "aspect"), aspects("tools"))
def test_a_call_that_must_come_and_what_follows(ask_default: Ask, client: str, aspect: str) -> None:
    call = value_of(ask_default, client, aspect)
    assert call["name"] == "get_weather"
    jsonschema.validate(call["arguments"], WEATHER_SCHEMA)
    assert call["answer"].strip()


@pytest.mark.parametrize(("client", "aspect"), aspects("schema", "generate_object"))
def test_an_object(ask_default: Ask, client: str, aspect: str) -> None:
    jsonschema.validate(value_of(ask_default, client, aspect), PERSON_SCHEMA)


def test_a_named_function_is_called_once(ask_default: Ask) -> None:
    assert value_of(ask_default, "openai", "named") == ["get_weather"]


def test_objects_grow_in_instructor(ask_default: Ask) -> None:
    objects = value_of(ask_default, "instructor", "objects")
    assert len(objects) > 2
    jsonschema.validate(objects[-1], PERSON_SCHEMA)


def test_aider_prints_the_same_text_as_it_comes(ask_default: Ask) -> None:
    text, printed = (value_of(ask_default, "aider", one) for one in ("text", "printed"))
    assert text == printed
