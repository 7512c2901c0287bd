"""What lies around the routes: the layers in their order, and the answers to exceptions.

From the outside in: every request is recorded; who may not ask is refused; a body is read within
its limits; and no more requests than the limit go on at once. Routes are not known here.
"""

from __future__ import annotations

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException as StarletteHTTPException

from flashdraft.errors import FlashdraftError
from flashdraft.server.http.asgi import shape_of
from flashdraft.server.http.body_limits import BodyLimits
from flashdraft.server.http.body_memory import BodyMemory
from flashdraft.server.http.connection_limits import ConcurrentRequestLimit
from flashdraft.server.http.disconnect import ClientDisconnectedError
from flashdraft.server.http.errors import as_api_error, error_response
from flashdraft.server.http.request_records import CLIENT_LEFT, RequestRecorder
from flashdraft.server.http.security import AccessControl
from flashdraft.server.settings import ServerSettings
from flashdraft.server.telemetry.logs import Sink
from flashdraft.server.telemetry.metrics import Metrics


def add_layers(
    app: FastAPI, settings: ServerSettings, memory: BodyMemory, metrics: Metrics, sink: Sink
) -> None:
    """Put the layers around an application's routes; the last one added is the outermost."""
    app.add_middleware(ConcurrentRequestLimit, settings=settings)
    app.add_middleware(BodyLimits, settings=settings, memory=memory)
    app.add_middleware(AccessControl, settings=settings)
    app.add_middleware(RequestRecorder, metrics=metrics, sink=sink)


def add_error_answers(app: FastAPI) -> None:
    """Answer every exception that a route does not answer itself."""
    for kind in (FlashdraftError, RequestValidationError, StarletteHTTPException):
        app.add_exception_handler(kind, _answer_error)
    app.add_exception_handler(ClientDisconnectedError, _answer_nobody)


async def _answer_error(request: Request, error: Exception) -> Response:
    if isinstance(error, StarletteHTTPException) and not isinstance(error, HTTPException):
        error = HTTPException(error.status_code, error.detail, dict(error.headers or {}))
    return error_response(as_api_error(error), shape_of(request.url.path))


async def _answer_nobody(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_LEFT)
