"""/api/tags, /api/ps, /api/show and /api/version: what is served, in Ollama's words."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Response

from flashdraft.core import VERSION
from flashdraft.server.answering.serving import Serving
from flashdraft.server.http.errors import (
    OLLAMA_SERVICE_RESPONSES,
    CheckedRoute,
    json_response,
)
from flashdraft.server.ollama.fields import OllamaShowRequest
from flashdraft.server.ollama.naming import asked_name, listed_name
from flashdraft.server.ollama.writer import stamp

API_VERSION = "0.12.6"  # of Ollama, whose fields these are: clients ask whether it is new enough
_NEVER = "9999-12-31T23:59:59Z"
_OPTIONS = {"max_tokens": "num_predict", "repetition_penalty": "repeat_penalty"}  # Ollama's names
_FAMILY = "flashdraft"


def router(serving: Serving) -> APIRouter:
    """The routes, bound to a server."""
    routes = APIRouter(route_class=CheckedRoute, responses=OLLAMA_SERVICE_RESPONSES)
    started_at = stamp(datetime.now(UTC))

    @routes.head("/api/version", include_in_schema=False)
    @routes.get("/api/version")
    async def version() -> dict[str, str]:
        return {"version": API_VERSION, "flashdraft": VERSION}

    @routes.head("/api/tags", include_in_schema=False)
    @routes.get("/api/tags")
    async def tags() -> dict[str, Any]:
        models = [_model(serving, name) for name in serving.model_names]
        return {"models": [{**one, "modified_at": started_at} for one in models]}

    @routes.get("/api/ps")
    async def running() -> dict[str, Any]:
        loaded = {
            "expires_at": _NEVER,
            "size_vram": 0,
            "context_length": serving.engine.info.max_context,
        }
        return {"models": [{**_model(serving, name), **loaded} for name in serving.model_names]}

    @routes.post("/api/show")
    async def show(body: OllamaShowRequest) -> Response:
        name = asked_name(serving, body.model or body.name)
        return json_response({**_description(serving, name), "modified_at": started_at})

    return routes


def _model(serving: Serving, name: str) -> dict[str, Any]:
    """One of the names; its digest tells models apart, and is none of a file."""
    info = serving.engine.info
    digest = hashlib.sha256(f"{info.model} {info.dtype}".encode("utf-8", "replace")).hexdigest()
    shown = listed_name(name)
    return {
        "name": shown,
        "model": shown,
        "size": 0,
        "digest": digest,
        "details": _details(serving),
    }


def _details(serving: Serving) -> dict[str, Any]:
    info = serving.engine.info
    return {
        "parent_model": "",
        "format": "gguf" if info.model.endswith(".gguf") else "safetensors",
        "family": _FAMILY,
        "families": [_FAMILY],
        "parameter_size": "",
        "quantization_level": info.dtype,
    }


def _description(serving: Serving, name: str) -> dict[str, Any]:
    defaults = {_OPTIONS.get(name, name): x for name, x in serving.sampling_defaults.items()}
    return {
        "modelfile": f"FROM {name}\n",
        "parameters": "\n".join(f"{option} {value}" for option, value in defaults.items()),
        "template": serving.tokenizer.chat_template or "",
        "details": _details(serving),
        "model_info": {
            "general.architecture": _FAMILY,
            f"{_FAMILY}.context_length": serving.engine.info.max_context,
            f"{_FAMILY}.vocab_size": serving.engine.info.vocab_size,
        },
        "capabilities": serving.capabilities,
    }
