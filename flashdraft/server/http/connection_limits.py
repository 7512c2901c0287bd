"""How many connections may be open, how many requests answered at once, how long a head may take.

A connection waits for its client until a request has arrived whole; such ones have a time limit,
and where too many are open the oldest of them is closed first. What counts against
`max_connections` is requests that are being answered. Routes and keys are not known here.
"""

from __future__ import annotations

import asyncio
import resource
from http import HTTPStatus
from typing import Any

import h11
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from flashdraft.server.http.asgi import send_error
from flashdraft.server.http.errors import ApiError, json_text, openai_shape
from flashdraft.server.settings import ServerSettings

MAX_HEAD_BYTES = 64 * 1024  # from the request line to the blank line, which is counted too
BUSY_RETRY_S = 2
DISCARD_REFUSED_S = 2.0  # in which what still comes of a refused request is thrown away
OTHER_OPEN_FILES = 128  # descriptors that are not connections: the engine's pipes, logs, libraries
_ALWAYS_ANSWERED = ("/health", "/metrics")  # what says that the server is busy


class ConcurrentRequestLimit:
    """Refuses one request more than may be answered at once; health is always told."""

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app = app
        self._limit = settings.max_connections
        self._num_running = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in _ALWAYS_ANSWERED:
            await self._app(scope, receive, send)
            return
        if self._num_running >= self._limit:
            message = f"{self._limit} requests are being answered, the most at once; try again."
            headers = {"Retry-After": str(BUSY_RETRY_S)}
            await send_error(scope, send, ApiError(503, message, code="busy", headers=headers))
            return
        self._num_running += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._num_running -= 1


def connection_class(settings: ServerSettings) -> type[H11Protocol]:
    """uvicorn's protocol with this server's limits; connections of one class share their count."""
    limit = max(1, min(settings.max_sockets, _max_open_files() - OTHER_OPEN_FILES))
    open_connections: dict[_LimitedConnection, None] = {}  # in the order they came

    class Connection(_LimitedConnection):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            self.conn = _HttpWithHeadLimit()
            self.settings = settings
            self.open_connections = open_connections
            self.max_open = limit
            self.app = self.cut_if_unanswered(self.app)

    return Connection


def _max_open_files() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 2**31 if soft == resource.RLIM_INFINITY else soft


class _HttpWithHeadLimit(h11.Connection):
    """HTTP with one limit for a request's head, in however many pieces it arrives.

    h11's own is for what is not complete yet: a head that arrives at once would pass it.
    """

    def __init__(self) -> None:
        super().__init__(h11.SERVER, MAX_HEAD_BYTES)
        self.is_head_too_large = False
        self._num_bytes = 0  # from where this request begins

    def receive_data(self, data: bytes) -> None:
        self._num_bytes += len(data)
        super().receive_data(data)

    def start_next_cycle(self) -> None:
        super().start_next_cycle()
        self._num_bytes = len(self.trailing_data[0])  # of a request that came early

    def next_event(self) -> Any:
        is_head = self.their_state is h11.IDLE
        try:
            event = super().next_event()
        except h11.RemoteProtocolError as error:
            self.is_head_too_large = is_head and error.error_status_hint == 431
            raise
        if isinstance(event, h11.Request):
            size = self._num_bytes - len(self.trailing_data[0])
            self.is_head_too_large = size > MAX_HEAD_BYTES
            if self.is_head_too_large:
                raise h11.RemoteProtocolError(f"A head of {size} bytes.", error_status_hint=431)
        return event


class _LimitedConnection(H11Protocol):
    """A connection that does not wait for ever, and answers what is no HTTP in the API's shape."""

    conn: _HttpWithHeadLimit
    settings: ServerSettings
    open_connections: dict[_LimitedConnection, None]
    max_open: int
    _head_timer: asyncio.TimerHandle | None = None
    _close_timer: asyncio.TimerHandle | None = None
    _is_refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.open_connections) >= self.max_open:
            oldest = next((one for one in self.open_connections if one.waits_for_client), None)
            if oldest is not None:
                oldest.close_now()
        self.open_connections[self] = None
        self._limit_head_time()

    def connection_lost(self, exc: Exception | None) -> None:
        self.open_connections.pop(self, None)
        for timer in (self._head_timer, self._close_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        super().data_received(data)
        self._limit_head_time()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._abort_unless_read()

    def cut_if_unanswered(self, app: Any) -> Any:
        """The application; a connection whose request it leaves unanswered is cut: nobody reads."""

        async def run(scope: Any, receive: Any, send: Any) -> None:
            cycle = self.cycle
            try:
                await app(scope, receive, send)
                if not cycle.response_complete and not cycle.disconnected:
                    cycle.disconnected = True
                    self.close_now()
            except asyncio.CancelledError:  # the server ends, and its patience has
                cycle.disconnected = True
                self.close_now()
            finally:
                self.loop.call_soon(self._watch_if_closing)  # once uvicorn has closed it

        return run

    @property
    def is_idle(self) -> bool:
        """No request's head has come since the last answer."""
        return self.cycle is None or self.cycle.response_complete

    @property
    def waits_for_client(self) -> bool:
        """There is no whole request here."""
        return self.is_idle or self.cycle.more_body

    def close_now(self) -> None:
        """Close it now, whatever is still to be written."""
        self.open_connections.pop(self, None)
        self.transport.abort()

    def _limit_head_time(self) -> None:
        """Start the time limit of a request's head, which nothing but a whole one stops."""
        if not self.is_idle:
            if self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(self.settings.head_timeout_s, self.close_now)

    def _watch_if_closing(self) -> None:
        if self.transport.is_closing():
            self._abort_unless_read()

    def _abort_unless_read(self, left: int | None = None) -> None:
        """A closed connection's last bytes wait for its reader, but only while it reads."""
        size = self.transport.get_write_buffer_size()
        if left is not None and size >= left:
            self.transport.abort()
        elif size:
            timeout_s = self.settings.write_timeout_s
            self._close_timer = self.loop.call_later(timeout_s, self._abort_unless_read, size)

    def _unsupported_upgrade_warning(self) -> None:
        """A request to become something else is answered as if it were none."""

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP, and end a request whose body turns out to be none."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.abort()
            return
        error = ApiError(400, "This is not a valid HTTP request.")
        if self.conn.is_head_too_large:
            most = f"{MAX_HEAD_BYTES} bytes; send shorter headers or a shorter address"
            error = ApiError(431, f"The request's line and headers have more than {most}.")
        self._refuse(error)

    def _refuse(self, error: ApiError) -> None:
        """Answer before there is a request, and close once the client has had time to read it."""
        body = json_text(openai_shape(error)).encode()
        headers = [
            ("content-type", "application/json"),
            ("content-length", str(len(body))),
            ("connection", "close"),
        ]
        reason = HTTPStatus(error.status).phrase.encode()
        events = (
            h11.Response(status_code=error.status, headers=headers, reason=reason),
            h11.Data(data=body),
            h11.EndOfMessage(),
        )
        for event in events:
            self.transport.write(self.conn.send(event) or b"")
        # closed with bytes unread, the system would take back what was written
        self._is_refused = True
        self.transport.write_eof()
        self._close_timer = self.loop.call_later(DISCARD_REFUSED_S, self._close_refused)

    def _close_refused(self) -> None:
        self.transport.close()
        self._abort_unless_read()
