"""Routes about the server's state: health, version, metrics."""

from __future__ import annotations

from typing import cast

from fastapi import APIRouter
from fastapi.responses import JSONResponse, PlainTextResponse

from flashdraft.core import VERSION
from flashdraft.server.answering.serving import Serving
from flashdraft.server.http.errors import SERVICE_RESPONSES, CheckedRoute
from flashdraft.server.process.client import EngineClient, EngineState
from flashdraft.server.telemetry.metrics import Metrics
from flashdraft.server.telemetry.prometheus import CONTENT_TYPE


def router(serving: Serving) -> APIRouter:
    """The routes, bound to a server."""
    routes = APIRouter(route_class=CheckedRoute, responses=SERVICE_RESPONSES)
    engine = cast(EngineClient, serving.engine)
    metrics = cast(Metrics, serving.metrics)

    @routes.get("/health", responses={503: {"description": "The engine takes no requests."}})
    async def health() -> JSONResponse:
        is_ready = engine.state is EngineState.READY
        content = {"status": engine.state.value, "detail": engine.detail}
        headers = {} if is_ready else {"Retry-After": "5"}
        return JSONResponse(content, status_code=200 if is_ready else 503, headers=headers)

    @routes.get("/version")
    async def version() -> dict[str, str]:
        return {"version": VERSION}

    @routes.get("/metrics", response_class=PlainTextResponse)
    async def show_metrics() -> PlainTextResponse:
        return PlainTextResponse(metrics.render(), media_type=CONTENT_TYPE)

    return routes
