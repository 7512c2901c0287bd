"""What lies around the routes: the layers in their order.

From the outside in: every request is recorded; who may not ask is refused; a body is read within
its limits; and no more requests than the limit go on at once. Routes are not known here.
"""

from __future__ import annotations

from collections.abc import Callable

from fastapi import FastAPI

from flashdraft.server.http.body_limits import BodyLimits
from flashdraft.server.http.body_memory import BodyMemory
from flashdraft.server.http.connection_limits import ConcurrentRequestLimit
from flashdraft.server.http.request_records import RequestRecorder
from flashdraft.server.http.security import AccessControl
from flashdraft.server.settings import ServerSettings
from flashdraft.server.telemetry.logs import Sink
from flashdraft.server.telemetry.metrics import Metrics


def add_layers(
    app: FastAPI,
    settings: ServerSettings,
    memory: BodyMemory,
    metrics: Metrics,
    sink: Sink,
    takes_pictures: Callable[[], bool],
) -> None:
    """Put the layers around an application's routes; the last one added is the outermost."""
    app.add_middleware(ConcurrentRequestLimit, settings=settings)
    app.add_middleware(BodyLimits, settings=settings, memory=memory, takes_pictures=takes_pictures)
    app.add_middleware(AccessControl, settings=settings)
    app.add_middleware(RequestRecorder, metrics=metrics, sink=sink)
