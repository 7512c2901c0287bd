"""From an exception to an answer with the right status, in the shape of the API that was asked.

One table of statuses for all; the APIs' shapes differ only in how they are written.
A router made with `route_class` answers every failure of its handlers that way, by itself.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from flashdraft.engine.sampling.grammar import GrammarTooComplexError
from flashdraft.errors import (
    CapacityError,
    ContextLengthError,
    EngineLostError,
    FlashdraftError,
    QueueFullError,
    RequestError,
    quoted,
)
from flashdraft.server.http.body_structure import check_structure
from flashdraft.server.http.disconnect import ClientDisconnectedError
from flashdraft.server.http.field_errors import FIELD
from flashdraft.server.http.field_errors import FieldError as FieldError
from flashdraft.server.http.fields import REMEDIES
from flashdraft.server.settings import ServerSettings
from flashdraft.text import exact_json
from flashdraft.text.exact_json import Inserts

logger = logging.getLogger(__name__)

SETTINGS = "flashdraft.settings"  # the limits' place in a request's scope
UNPARSED_BODY = "flashdraft.body"  # and that of what counts the body until it is parsed
_RETRY_AFTER_S = 5.0  # where nobody knows better

_LINE_ENDS = "\x85\u2028\u2029"  # to Python's splitlines, which clients read streams with

_MAX_COMPLAINTS = 64  # looked at, of those that pydantic has

_OPENAI_KINDS = {429: "rate_limit_error", 401: "authentication_error", 403: "permission_error"}
_ANTHROPIC_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class UnknownModelError(RequestError):
    """The body names a model that is not served here (HTTP 404)."""


class GenerationFailedError(Exception):
    """The engine accepted a request and could not finish it (HTTP 500)."""


@dataclass(frozen=True)
class ApiError:
    """A failure as a client hears of it."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


Shape = Callable[[ApiError], dict[str, Any]]


def openai_shape(error: ApiError) -> dict[str, Any]:
    """OpenAI's error object."""
    usual = "server_error" if error.status >= 500 else "invalid_request_error"
    kind = _OPENAI_KINDS.get(error.status, usual)
    return {
        "error": {
            "message": error.message,
            "type": kind,
            "param": error.param,
            "code": error.code,
        }
    }


def anthropic_shape(error: ApiError) -> dict[str, Any]:
    """Anthropic's error object."""
    usual = "api_error" if error.status >= 500 else "invalid_request_error"
    kind = _ANTHROPIC_KINDS.get(error.status, usual)
    return {"type": "error", "error": {"type": kind, "message": error.message}}


def ollama_shape(error: ApiError) -> dict[str, Any]:
    """Ollama's error object."""
    return {"error": error.message}


def _failures(shape: Shape) -> dict[int | str, dict[str, Any]]:
    """What the OpenAPI document says of failures; naming 4XX keeps the framework's 422 out."""
    example = shape(ApiError(400, "What was wrong, the limit, and the remedy."))
    error: dict[str, Any] = {"type": "string"}
    if isinstance(example["error"], dict):
        error = {
            "type": "object",
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
            "required": list(example["error"]),
        }
    schema = {"type": "object", "properties": {"error": error}, "required": list(example)}
    content = {"application/json": {"schema": schema, "example": example}}
    return {
        "4XX": {"description": "The request is refused.", "content": content},
        "5XX": {"description": "The server or its engine failed.", "content": content},
    }


def _documented(
    shape: Shape, stream: str = "text/event-stream", event: Sequence[str] = ("data",)
) -> dict[int | str, dict[str, Any]]:
    answer = {
        "application/json": {"schema": {"type": "object"}},
        stream: {"schema": {"type": "object", "required": list(event)}},
    }
    told = {"description": "The answer, or its events where stream is set.", "content": answer}
    return {200: told, **_failures(shape)}


OPENAI_RESPONSES = _documented(openai_shape)
ANTHROPIC_RESPONSES = _documented(anthropic_shape)
OLLAMA_RESPONSES = _documented(ollama_shape, "application/x-ndjson", ("model", "done"))
SERVICE_RESPONSES = _failures(openai_shape)
OLLAMA_SERVICE_RESPONSES = _failures(ollama_shape)


def json_text(data: Any) -> str:
    """JSON as every answer has it, also where it repeats what a client sent: a lone surrogate,
    which UTF-8 does not have, becomes the escape it came as, and NaN, which JSON has not, null.
    It is one line for everybody: what some clients take for a line's end (U+2028) is escaped, lest
    an answer write lines of its own into a stream. `Written` parts are JSON text already."""
    inserts = Inserts()
    try:
        text = json.dumps(
            data, ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=inserts
        )
    except ValueError:
        inserts = Inserts()
        finite = json.loads(json.dumps(data, default=inserts), parse_constant=lambda _: None)
        text = json.dumps(finite, ensure_ascii=False, separators=(",", ":"))
    text = inserts.fill(text)
    for end in _LINE_ENDS:
        if end in text:
            text = text.replace(end, f"\\u{ord(end):04x}")
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def json_response(
    data: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """An HTTP answer of JSON."""
    return Response(json_text(data), status, dict(headers or {}), "application/json")


def error_response(error: ApiError, shape: Shape) -> Response:
    """The HTTP answer for a failure."""
    return json_response(shape(error), error.status, error.headers)


def as_api_error(error: Exception) -> ApiError:
    """What a client is told of an exception. What is nobody's business is logged and not told."""
    if isinstance(error, RequestValidationError):
        return _validation_error(error)  # whose text would be all of its complaints
    message = str(error)
    if isinstance(error, UnknownModelError):
        return ApiError(404, message, "model", "model_not_found")
    if isinstance(error, ContextLengthError):
        return ApiError(400, message, None, "context_length_exceeded")
    if isinstance(error, GrammarTooComplexError):
        return ApiError(400, message, None, "grammar_too_complex")
    if isinstance(error, RequestError):
        return ApiError(400, message, field_of(error))
    if isinstance(error, QueueFullError):
        return ApiError(429, message, None, "queue_full", _retry_after(error.retry_after_s))
    if isinstance(error, EngineLostError):
        return ApiError(503, message, None, "engine_unavailable", _retry_after(error.retry_after_s))
    if isinstance(error, CapacityError):
        return ApiError(503, message, None, "no_capacity", _retry_after(None))
    if isinstance(error, GenerationFailedError):
        return ApiError(500, message, None, "generation_failed")
    if isinstance(error, HTTPException):
        return ApiError(error.status_code, str(error.detail), headers=error.headers or {})
    if isinstance(error, FlashdraftError):
        return ApiError(500, message)
    logger.error("a request failed unexpectedly", exc_info=error)
    return ApiError(500, "The server failed on this request; its log says how.")


def _retry_after(seconds: float | None) -> dict[str, str]:
    return {"Retry-After": str(math.ceil(_RETRY_AFTER_S if seconds is None else max(1, seconds)))}


def field_of(error: RequestError) -> str | None:
    """The field that an error is about; messages of core begin with it."""
    if isinstance(error, FieldError):
        return error.param or None
    found = re.match(r"([a-z][a-z_0-9]*(?:\[\d+\]|\.\w+)*) (?:is|has|must|needs) ", str(error))
    return found.group(1) if found else None


def _validation_error(error: RequestValidationError) -> ApiError:
    """The most specific of pydantic's complaints, with the place in the body."""
    complaints = error.errors()[:_MAX_COMPLAINTS]
    if any(one["type"] == "json_invalid" for one in complaints):
        detail = complaints[0].get("ctx", {}).get("error", "")
        return ApiError(400, f"The body is not valid JSON: {detail}.")
    if isinstance(error.body, bytes) or error.body is None:
        return ApiError(
            400,
            "The body must be a JSON object, sent with the header Content-Type: application/json.",
        )
    # A union complains once for each of its members; the member that fits best gets furthest.
    best = max(complaints, key=lambda one: len(_path(one, error.body)))
    place = _place(_path(best, error.body))
    return ApiError(400, _complaint(best, place), place or None)


def _path(complaint: Mapping[str, Any], body: Any) -> list[str | int]:
    """The place in the body; pydantic's own names of union members are left out."""
    path: list[str | int] = []
    location = complaint["loc"][1:]
    if complaint["type"] == FIELD:
        location = (*location, complaint["ctx"]["field"])
    for number, part in enumerate(location):
        is_last = number == len(location) - 1
        is_index = isinstance(body, list) and isinstance(part, int) and part < len(body)
        if is_index or (isinstance(body, Mapping) and part in body):
            path.append(part)
            body = body[part]
        elif is_last and complaint["type"] in ("missing", FIELD):
            path.append(part)
    return path


def _place(path: Sequence[str | int]) -> str:
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return place.removeprefix(".")


def _complaint(complaint: Mapping[str, Any], place: str) -> str:
    kind = complaint["type"]
    if kind == "extra_forbidden":
        remedy = REMEDIES.get(place, "leave it out (docs/server.md lists what is supported).")
        return f"{place} is not supported: {remedy}"
    if kind == "missing":
        return f"{place} is missing; it is required."
    if kind == FIELD:
        return f"{place} {complaint['msg']}"
    text = str(complaint["msg"]).removeprefix("Value error, ")
    shown = quoted(complaint.get("input"))
    where = place or "The body"
    return f"{where}: {text[:1].lower()}{text[1:]} (it is {shown})."


async def _check_body(request: Request) -> None:
    """Refuse a body by its structure; one that is no JSON is left to whoever reads it next."""
    if request.method != "POST":
        return
    try:
        body = exact_json.read(await request.body())
    except (ValueError, RecursionError):
        return
    request._json = body  # what `request.json()` would have kept, its numbers as they were written
    if request._body:
        request._body = b" "  # no more than that there is one: an answer takes long
    unparsed = request.scope.get(UNPARSED_BODY)
    if unparsed is not None:
        unparsed.release()
    check_structure(body, request.scope.get(SETTINGS) or ServerSettings())


class CheckedRoute(APIRoute):
    """Routes whose bodies are counted before they are validated."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler, after the check."""
        handle = super().get_route_handler()

        async def checked(request: Request) -> Response:
            await _check_body(request)
            return await handle(request)

        return checked


def route_class(shape: Shape, on_failure: Callable[[str, ApiError], None]) -> type[APIRoute]:
    """Routes that answer every exception in the API's shape; `on_failure` hears of each."""

    class ShapedRoute(CheckedRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handle = super().get_route_handler()
            path = self.path

            async def shaped(request: Request) -> Response:
                try:
                    return await handle(request)
                except ClientDisconnectedError:
                    raise  # there is nobody to tell
                except Exception as error:
                    told = as_api_error(error)
                    on_failure(path, told)
                    return error_response(told, shape)

            return shaped

    return ShapedRoute
