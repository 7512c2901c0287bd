"""The outermost layer of the server: every request gets an id and a record, which is logged.

Whatever happens inside, a request ends with an answer, a line in the log and a count. It knows no
routes: which one answered is what the framework leaves in the scope.
"""

from __future__ import annotations

import logging

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from flashdraft.server.http.asgi import send_error
from flashdraft.server.http.body_limits import ClientTooSlowError
from flashdraft.server.http.disconnect import ClientDisconnectedError
from flashdraft.server.http.errors import ApiError
from flashdraft.server.telemetry.logs import RequestRecord, Sink, begin_record
from flashdraft.server.telemetry.metrics import Metrics
from flashdraft.server.telemetry.prometheus import OTHER

CLIENT_LEFT = 499
UNLOGGED_ROUTES = ("/health", "/metrics")  # machines ask them all the time: counted alone

log = logging.getLogger(__name__)


class RequestRecorder:
    """Records, logs and counts requests; answers 500 where nothing inside did."""

    def __init__(self, app: ASGIApp, metrics: Metrics, sink: Sink) -> None:
        self._app = app
        self._metrics = metrics
        self._sink = sink

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # From 2.4 on the framework no longer watches for a client's leaving while it streams, and
        # would see it with the next token only: late for one that waits in the queue.
        scope["asgi"] = {**scope.get("asgi", {}), "spec_version": "2.3"}
        record = begin_record(scope["method"], scope["path"])
        try:
            await self._answer(scope, receive, self._with_record(record, send), record)
        except BaseException as error:
            record.error = record.error or type(error).__name__
            raise
        finally:
            self._log_and_count(scope, record)

    async def _answer(
        self, scope: Scope, receive: Receive, send: Send, record: RequestRecord
    ) -> None:
        try:
            await self._app(scope, receive, send)
        except (ClientDisconnectedError, ClientTooSlowError) as error:
            record.error = type(error).__name__  # nobody reads: the connection is cut
        except Exception as error:
            log.exception("request %s failed", record.id)
            record.error = f"{type(error).__name__}: {error}"
            if record.status is not None:
                raise
            failure = ApiError(500, f"The server failed on request {record.id}; its log says how.")
            await send_error(scope, send, failure)

    def _with_record(self, record: RequestRecord, send: Send) -> Send:
        async def send_recorded(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                name = (b"x-request-id", record.id.encode("ascii"))
                more = [name, (b"x-content-type-options", b"nosniff")]
                message = {**message, "headers": [*message.get("headers", ()), *more]}
            await send(message)
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                record.is_complete = True

        return send_recorded

    def _log_and_count(self, scope: Scope, record: RequestRecord) -> None:
        route = scope.get("route")
        record.route = getattr(route, "path", None)
        status = record.status if record.is_complete else CLIENT_LEFT
        self._metrics.responses.add(1, record.route or OTHER, str(status))
        if record.route not in UNLOGGED_ROUTES:
            self._sink(record.line())
