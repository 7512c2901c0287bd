"""The application: routers, layers around them, and one way from an exception to an answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException as StarletteHTTPException

from flashdraft.core import VERSION
from flashdraft.errors import FlashdraftError
from flashdraft.server import service_routes
from flashdraft.server.answering.serving import Serving
from flashdraft.server.anthropic import messages
from flashdraft.server.http.asgi import shape_of
from flashdraft.server.http.body_limits import BodyLimits
from flashdraft.server.http.body_memory import BodyMemory
from flashdraft.server.http.connection_limits import ConcurrentRequestLimit
from flashdraft.server.http.disconnect import ClientDisconnectedError
from flashdraft.server.http.errors import as_api_error, error_response
from flashdraft.server.http.request_records import CLIENT_LEFT, RequestRecorder
from flashdraft.server.http.security import AccessControl
from flashdraft.server.openai import chat, completions, responses
from flashdraft.server.telemetry.logs import Sink, write_line
from flashdraft.server.telemetry.metrics import Metrics

_ROUTE_MODULES = (
    service_routes,
    chat,
    completions,
    responses,
    messages,
)


def create_app(serving: Serving, sink: Sink = write_line) -> FastAPI:
    """The server's application; `sink` takes a line of the log for every request."""
    app = FastAPI(
        title="flashdraft",
        version=VERSION,
        docs_url=None,  # those pages load scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
    )
    for module in _ROUTE_MODULES:
        app.include_router(module.router(serving))
    for kind in (FlashdraftError, RequestValidationError, StarletteHTTPException):
        app.add_exception_handler(kind, _answer_error)
    app.add_exception_handler(ClientDisconnectedError, _answer_nobody)
    document = app.openapi
    app.openapi = lambda: _name_models(document(), serving.model_names)  # type: ignore[method-assign]
    # the last one added is the outermost
    app.add_middleware(ConcurrentRequestLimit, settings=serving.settings)
    body_memory = app.state.body_memory = BodyMemory(serving.settings.max_body_memory_bytes)
    app.add_middleware(BodyLimits, settings=serving.settings, memory=body_memory)
    app.add_middleware(AccessControl, settings=serving.settings)
    app.add_middleware(RequestRecorder, metrics=cast(Metrics, serving.metrics), sink=sink)
    return app


def _name_models(document: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """The OpenAPI document with the names that `model` may have."""
    for schema in document["components"]["schemas"].values():
        if "model" in schema.get("properties", {}):
            schema["properties"]["model"]["enum"] = list(names)
    return document


async def _answer_error(request: Request, error: Exception) -> Response:
    if isinstance(error, StarletteHTTPException) and not isinstance(error, HTTPException):
        error = HTTPException(error.status_code, error.detail, dict(error.headers or {}))
    return error_response(as_api_error(error), shape_of(request.url.path))


async def _answer_nobody(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_LEFT)
