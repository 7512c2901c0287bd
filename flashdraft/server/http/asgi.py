"""Small things that every ASGI layer here needs: headers, an answer made by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from starlette.types import Scope, Send

from flashdraft.server.http.errors import (
    ApiError,
    Shape,
    anthropic_shape,
    json_text,
    ollama_shape,
    openai_shape,
)

ANTHROPIC_PATHS = "/v1/messages"
ANTHROPIC_VERSION = b"anthropic-version"  # a header that its clients always send
OLLAMA_PATHS = "/api/"


def header_values(scope: Scope, name: bytes) -> list[bytes]:
    """Every value that a request gives for a header; the name in small letters."""
    return [value for key, value in scope["headers"] if key.lower() == name]


def header(scope: Scope, name: bytes) -> bytes | None:
    """The first value of a header."""
    values = header_values(scope, name)
    return values[0] if values else None


def shape_of(scope: Scope) -> Shape:
    """How the API that a request belongs to writes a failure."""
    path = scope["path"]
    if path.startswith(OLLAMA_PATHS):
        return ollama_shape
    if path.startswith(ANTHROPIC_PATHS) or header(scope, ANTHROPIC_VERSION) is not None:
        return anthropic_shape
    return openai_shape


async def send_error(scope: Scope, send: Send, error: ApiError) -> None:
    """Answer a request with a failure."""
    await send_answer(
        send,
        error.status,
        json_text(shape_of(scope)(error)).encode(),
        {"content-type": "application/json", **error.headers},
    )


async def send_answer(send: Send, status: int, body: bytes, headers: Mapping[str, str]) -> None:
    """Answer a request as a whole."""
    fields: Sequence[tuple[bytes, bytes]] = [
        (name.lower().encode("latin-1"), value.encode("latin-1"))
        for name, value in {**headers, "content-length": str(len(body))}.items()
    ]
    await send({"type": "http.response.start", "status": status, "headers": fields})
    await send({"type": "http.response.body", "body": body})
