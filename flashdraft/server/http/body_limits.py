"""What a request's body may be, before anything parses it; and how long a client may not read.

Every body here is JSON of a bounded size, so it is read as a whole, checked, and handed on in one
piece. The size is checked while it arrives: a header that lies, or none, changes nothing. Where the
model takes pictures a body may have more, for them alone: what else it says is counted when it is
parsed (body_structure.py). What all bodies together may have until then is body_memory.py's.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import numpy as np
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from flashdraft.server.http.asgi import header, send_error
from flashdraft.server.http.body_memory import (
    BodyMemory,
    BodyMemoryFullError,
    ShuttingDownError,
    UnparsedBody,
)
from flashdraft.server.http.body_structure import (
    MAX_TOKEN_VALUES,
    MAX_VALUES,
    PICTURE_PATHS,
    TOKEN_PATHS,
    count_values,
    without_strings,
)
from flashdraft.server.http.connection_limits import BUSY_RETRY_S
from flashdraft.server.http.errors import SETTINGS, UNPARSED_BODY, ApiError
from flashdraft.server.settings import ServerSettings
from flashdraft.server.telemetry.logs import MAX_LOGGED_BODY, current_record

DISCARD_S = 10.0  # for the rest of a body that is too large, so that its sender hears the answer
DISCARD_FACTOR = 8  # of the limit; beyond that the connection is cut
_SCAN_IN_THREAD_BYTES = 64 * 1024
_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")  # 1 and -1 as signed bytes
_NO_BRACKETS = bytes(set(range(256)) - set(b"[{]}"))


class ClientTooSlowError(Exception):
    """The client does not read what it is sent."""


class _RefusedBodyError(Exception):
    """A body that is refused."""

    def __init__(self, error: ApiError) -> None:
        super().__init__(error.message)
        self.error = error


class BodyLimits:
    """Refuses bodies that are too large, too deep, too slow or no UTF-8; gives up slow readers."""

    def __init__(
        self,
        app: ASGIApp,
        settings: ServerSettings,
        memory: BodyMemory | None = None,
        takes_pictures: Callable[[], bool] = lambda: False,
    ) -> None:
        self._app = app
        self._settings = settings
        self._takes_pictures = takes_pictures
        self._memory = memory or BodyMemory(settings.max_body_memory_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        send = self._with_write_timeout(send)
        scope[SETTINGS] = self._settings  # for what counts a body's entries, once it is parsed
        unparsed: UnparsedBody | None = None
        try:
            body = await self._read_body(scope, receive)
            if body is None:
                return
            unparsed = scope[UNPARSED_BODY] = UnparsedBody(self._memory, len(body))
            await self._check(body, scope["path"])
            receive = _receive_body_first(body, receive)
            del body  # what answers the request drops it once it is parsed
            await self._app(scope, receive, send)
        except _RefusedBodyError as refused:
            await send_error(scope, send, refused.error)
        finally:
            if unparsed is not None:
                unparsed.release()

    async def _read_body(self, scope: Scope, receive: Receive) -> bytes | None:
        """The whole body; None if the client leaves before it is there."""
        limit = self._max_bytes(scope["path"])
        declared = header(scope, b"content-length")
        if declared is not None and declared.isdigit() and int(declared) > limit:
            if header(scope, b"expect") is None:
                await self._discard(receive)
            raise _RefusedBodyError(_too_large(limit))
        if header(scope, b"content-encoding") not in (None, b"identity"):
            raise _RefusedBodyError(ApiError(415, "Send the body without a Content-Encoding."))
        return await self._receive_all(receive, limit)

    def _max_bytes(self, path: str) -> int:
        settings = self._settings
        if path not in PICTURE_PATHS or not self._takes_pictures():
            return settings.max_body_bytes
        most = min(settings.max_picture_body_bytes, settings.max_body_memory_bytes)
        return max(settings.max_body_bytes, most)

    async def _receive_all(self, receive: Receive, limit: int) -> bytes | None:
        has_more = True
        try:
            async with self._memory.receive(self._settings.body_timeout_s) as incoming:
                while has_more and len(incoming.data) <= limit:
                    message = await receive()
                    if message["type"] != "http.request":
                        return None
                    has_more = message.get("more_body", False)
                    incoming.add(message.get("body", b""))
                if len(incoming.data) <= limit:
                    return bytes(incoming.data)
            refusal = _too_large(limit)
        except TimeoutError:
            raise _RefusedBodyError(
                ApiError(408, "The body did not arrive in time.", headers={"Connection": "close"})
            ) from None
        except ShuttingDownError:
            raise _RefusedBodyError(_shutting_down()) from None
        except BodyMemoryFullError:
            refusal = self._memory_full()
        if has_more:
            await self._discard(receive)
        raise _RefusedBodyError(refusal)

    async def _check(self, body: bytes, path: str) -> None:
        try:
            logged = body.decode("utf-8")[:MAX_LOGGED_BODY]
        except UnicodeDecodeError as error:
            raise _RefusedBodyError(
                ApiError(400, f"The body is not UTF-8: byte {error.start} begins no character.")
            ) from None
        max_values = MAX_TOKEN_VALUES if path in TOKEN_PATHS else MAX_VALUES
        if len(body) > _SCAN_IN_THREAD_BYTES:
            refusal = await asyncio.to_thread(self._check_structure, body, max_values)
        else:
            refusal = self._check_structure(body, max_values)
        if refusal is not None:
            raise _RefusedBodyError(refusal)
        record = current_record()
        if self._settings.log_prompts and record is not None and logged:
            record.body = logged

    def _check_structure(self, body: bytes, max_values: int) -> ApiError | None:
        """What is wrong with the body's structure, if anything; parsing it comes later."""
        limit = self._settings.max_json_depth
        if is_deeper_than(body, limit):
            return ApiError(400, f"The body's JSON is nested more than {limit} levels deep.")
        if count_values(body) <= max_values:  # those in strings too: as of nearly every honest body
            return None
        count = count_values(without_strings(body))
        if count <= max_values:
            return None
        return ApiError(
            413,
            f"The body has {count} JSON values; at most {max_values}. Send fewer, or longer texts.",
            code="body_too_large",
        )

    async def _discard(self, receive: Receive) -> None:
        left = DISCARD_FACTOR * self._settings.max_body_bytes
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DISCARD_S):
                while left > 0:
                    message = await receive()
                    left -= len(message.get("body", b""))
                    if message["type"] != "http.request" or not message.get("more_body", False):
                        return

    def _memory_full(self) -> ApiError:
        limit = self._settings.max_body_memory_bytes
        return ApiError(
            503,
            f"The bodies of requests on their way are more than {limit} bytes together, and this "
            "one gives way; send it again.",
            code="busy",
            headers={"Retry-After": str(BUSY_RETRY_S), "Connection": "close"},
        )

    def _with_write_timeout(self, send: Send) -> Send:
        timeout_s = self._settings.write_timeout_s

        async def send_in_time(message: Message) -> None:
            try:
                async with asyncio.timeout(timeout_s):
                    await send(message)
            except TimeoutError:
                raise ClientTooSlowError from None

        return send_in_time


def _too_large(limit: int) -> ApiError:
    return ApiError(
        413,
        f"The body is larger than {limit} bytes.",
        code="body_too_large",
        headers={"Connection": "close"},
    )


def _shutting_down() -> ApiError:
    return ApiError(
        503,
        "The server is shutting down and takes no more requests.",
        code="engine_unavailable",
        headers={"Retry-After": str(BUSY_RETRY_S), "Connection": "close"},
    )


def is_deeper_than(body: bytes, limit: int) -> bool:
    """Whether brackets outside strings nest deeper than a limit; needs no valid JSON."""
    if body.count(b"[") + body.count(b"{") <= limit:  # as of nearly every honest body
        return False
    steps = without_strings(body).translate(_STEPS, _NO_BRACKETS)
    depths = np.cumsum(np.frombuffer(steps, np.int8), dtype=np.int64)
    return bool(len(depths) and depths.max() > limit)


def _receive_body_first(body: bytes, receive: Receive) -> Receive:
    """The body in one piece, then whatever comes: the client's leaving."""
    waiting = [body]  # only until it is taken: it may be large, and an answer takes long

    async def receive_again() -> Message:
        if not waiting:
            return await receive()
        return {"type": "http.request", "body": waiting.pop(), "more_body": False}

    return receive_again
