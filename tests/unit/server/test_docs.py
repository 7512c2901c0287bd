"""docs/server.md names every field that a request may have."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from flashdraft.server.anthropic import fields as schemas_messages
from flashdraft.server.anthropic.fields import CountTokensRequest, MessagesRequest
from flashdraft.server.http.fields import REMEDIES, Body, FlashdraftOptions
from flashdraft.server.ollama import fields as ollama_fields
from flashdraft.server.ollama.fields import (
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaMessage,
    OllamaOptions,
    OllamaShowRequest,
)
from flashdraft.server.openai import chat_fields, responses_fields
from flashdraft.server.openai.chat_fields import ChatRequest
from flashdraft.server.openai.completions_fields import CompletionRequest
from flashdraft.server.openai.responses_fields import ResponsesRequest

PAGE = (Path(__file__).parents[3] / "docs/server.md").read_text(encoding="utf-8")
BODIES = (ChatRequest, CompletionRequest, CountTokensRequest, MessagesRequest, ResponsesRequest)
OLLAMA_BODIES = (OllamaChatRequest, OllamaGenerateRequest, OllamaMessage, OllamaOptions)
UNREMARKABLE = {"id", "status", "phase", "title", "context", "data", "logprobs", "detail"}


def fields(model: type[Body], advisory_only: bool) -> Iterator[str]:
    for name, info in model.model_fields.items():
        if not advisory_only or info.description == "Accepted, without effect.":
            yield info.alias or name


@pytest.mark.parametrize("model", [*BODIES, *OLLAMA_BODIES, OllamaShowRequest, FlashdraftOptions])
def test_every_field_of_a_body_is_named(model: type[Body]) -> None:
    missing = [name for name in fields(model, False) if not re.search(rf"\b{name}\b", PAGE)]
    assert missing == []


def test_every_advisory_field_is_named() -> None:
    modules = (chat_fields, schemas_messages, responses_fields, ollama_fields)
    models = [
        one
        for module in modules
        for one in vars(module).values()
        if isinstance(one, type) and issubclass(one, Body)
    ]
    assert len(models) > 20
    names = {name for model in models for name in fields(model, True)} - UNREMARKABLE
    assert [name for name in sorted(names) if not re.search(rf"\b{name}\b", PAGE)] == []


def test_no_remedy_is_for_a_field_that_every_body_takes() -> None:
    taken = set.intersection(*(set(fields(model, False)) for model in BODIES))
    assert taken & REMEDIES.keys() == set()
