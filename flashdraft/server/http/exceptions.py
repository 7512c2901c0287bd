"""Answers to exceptions that no route answers itself, and to requests for which there is no route.

What the public APIs have and this server has not is refused by name, with the reason; any other
path with those that were perhaps meant.
"""

from __future__ import annotations

from http import HTTPStatus

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException as StarletteHTTPException

from flashdraft.errors import FlashdraftError, did_you_mean, quoted
from flashdraft.server.http.asgi import shape_of
from flashdraft.server.http.disconnect import ClientDisconnectedError
from flashdraft.server.http.errors import ApiError, as_api_error, error_response
from flashdraft.server.http.request_records import CLIENT_LEFT

_MAX_PATH = 100  # characters of a path that is compared with those that there are
_NO_ROUTE = "no_such_route"
_NOT_SERVED = "not_served"
_EMBEDDINGS = (
    "Embeddings are not served: this server generates text. Ask a server that runs an embedding "
    "model."
)
_NO_STATE = "the server stores nothing that it could give back or work on later"
_OPERATORS = (
    "which models there are is the operator's affair, not a client's. Start another server with "
    "the model (flashdraft serve MODEL; flashdraft models lists some)."
)
# Paths of the public APIs that are not served, and those below them: the status, and why.
_REASONS: dict[str, tuple[int, str]] = {
    "/v1/embeddings": (404, _EMBEDDINGS),
    "/api/embed": (404, _EMBEDDINGS),
    "/api/embeddings": (404, _EMBEDDINGS),
    "/v1/audio": (404, "Audio is not served: this server generates text."),
    "/v1/images": (404, "Images are not served: this server generates text."),
    "/v1/moderations": (404, "Moderation is not served: this server generates text."),
    "/v1/batches": (404, f"Batches are not served: {_NO_STATE}. Send the requests one by one."),
    "/v1/messages/batches": (
        404,
        f"Batches are not served: {_NO_STATE}. Send the requests one by one.",
    ),
    "/v1/files": (404, f"Files are not served: {_NO_STATE}. Send text in the request."),
    "/v1/conversations": (404, f"Conversations are not served: {_NO_STATE}. Send them whole."),
    "/v1/responses": (404, f"Responses are not kept: {_NO_STATE}."),
    "/api/pull": (403, f"Models cannot be pulled over HTTP: {_OPERATORS}"),
    "/api/push": (403, f"Models cannot be pushed over HTTP: {_OPERATORS}"),
    "/api/create": (403, f"Models cannot be created over HTTP: {_OPERATORS}"),
    "/api/copy": (403, f"Models cannot be copied over HTTP: {_OPERATORS}"),
    "/api/delete": (403, f"Models cannot be deleted over HTTP: {_OPERATORS}"),
    "/api/blobs": (403, f"Files of models cannot be sent over HTTP: {_OPERATORS}"),
}


def add_error_answers(app: FastAPI) -> None:
    """Answer every exception that a route does not answer itself."""
    for kind in (FlashdraftError, RequestValidationError, StarletteHTTPException):
        app.add_exception_handler(kind, _answer_error)
    app.add_exception_handler(ClientDisconnectedError, _answer_nobody)


async def _answer_error(request: Request, error: Exception) -> Response:
    told = _no_route(request, error)
    if told is None:
        if isinstance(error, StarletteHTTPException) and not isinstance(error, HTTPException):
            error = HTTPException(error.status_code, error.detail, dict(error.headers or {}))
        told = as_api_error(error)
    return error_response(told, shape_of(request.scope))


async def _answer_nobody(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_LEFT)


def _no_route(request: Request, error: Exception) -> ApiError | None:
    """What is said where the framework found no route, or one with other methods."""
    if not isinstance(error, StarletteHTTPException) or error.status_code not in (404, 405):
        return None
    if error.detail != HTTPStatus(error.status_code).phrase:
        return None  # a route's own words
    path, method = request.scope["path"], request.scope["method"]
    if error.status_code == 405:
        allowed = dict(error.headers or {}).get("Allow", "another method")
        message = f"{quoted(path)} takes {allowed}, not {method}."
        return ApiError(405, message, headers=error.headers or {})
    for known, (status, reason) in _REASONS.items():
        if path == known or path.startswith(known + "/"):
            return ApiError(status, reason, code=_NOT_SERVED)
    paths = [one for one in request.app.state.methods if "{" not in one]
    return ApiError(404, _pointer(method, path, paths), code=_NO_ROUTE)


def _pointer(method: str, path: str, paths: list[str]) -> str:
    """That a path does not exist, and which ones do: the likeliest, else those of the same API."""
    api = path[: path.find("/", 1) + 1]  # "/v1/", "/api/"
    alike = [one for one in paths if api and one.startswith(api)]
    meant = did_you_mean(path[:_MAX_PATH], alike or paths)
    if not meant and alike:
        meant = f" There are {', '.join(alike)}."
    return f"There is no route {method} {quoted(path)}.{meant} GET /openapi.json lists all routes."
