"""Routes that say which models are served, in the words of whichever API asks."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Request

from flashdraft.server.answering.serving import Serving
from flashdraft.server.http.errors import SERVICE_RESPONSES, CheckedRoute


def router(serving: Serving) -> APIRouter:
    """The routes, bound to a server."""
    routes = APIRouter(route_class=CheckedRoute, responses=SERVICE_RESPONSES)
    started_at = datetime.now(UTC)

    @routes.get("/v1/models")
    async def models(request: Request) -> dict[str, Any]:
        describe = _anthropic_model if _speaks_anthropic(request) else _openai_model
        data = [describe(serving, name, started_at) for name in serving.model_names]
        if _speaks_anthropic(request):
            ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]}
            return {"data": data, "has_more": False, **ends}
        return {"object": "list", "data": data}

    @routes.get("/v1/models/{model_id:path}")
    async def model(request: Request, model_id: str) -> dict[str, Any]:
        serving.model_name(model_id)
        describe = _anthropic_model if _speaks_anthropic(request) else _openai_model
        return describe(serving, model_id, started_at)

    return routes


def _speaks_anthropic(request: Request) -> bool:
    return "anthropic-version" in request.headers


def _openai_model(serving: Serving, name: str, created: datetime) -> dict[str, Any]:
    info = serving.engine.info
    return {
        "id": name,
        "object": "model",
        "created": int(created.timestamp()),
        "owned_by": "flashdraft",
        "root": info.model,
        "max_model_len": info.max_context,
        "sampling_defaults": serving.sampling_defaults,
        "capabilities": serving.capabilities,
    }


def _anthropic_model(serving: Serving, name: str, created: datetime) -> dict[str, Any]:
    stamp = created.isoformat(timespec="seconds").replace("+00:00", "Z")
    return {"type": "model", "id": name, "display_name": name, "created_at": stamp}
