"""A server from its parts: the engine's client, the application, uvicorn, and what signals do."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import os
import signal
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from flashdraft.errors import EngineLostError, FlashdraftError
from flashdraft.models.tokenizer import Tokenizer
from flashdraft.server.answering.serving import Serving
from flashdraft.server.app import create_app
from flashdraft.server.http.connection_limits import connection_class
from flashdraft.server.process.client import EngineClient, EngineInfo
from flashdraft.server.process.life import WORKER_COMMAND
from flashdraft.server.settings import ServerSettings
from flashdraft.server.telemetry.logs import Sink, structured_logging, write_line
from flashdraft.server.telemetry.metrics import Metrics
from flashdraft.server.telemetry.text_lines import IN_WORDS, write_in_words

FLUSH_S = 5  # for responses to reach their clients once the engine is done
SIGNALS = (signal.SIGINT, signal.SIGTERM)
MALLOC_ARENAS, MALLOC_TRIM = (
    (-8, 2),
    (-1, 1 << 20),
)  # glibc's M_ARENA_MAX, M_TRIM_THRESHOLD in bytes


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: a signal drains the engine first."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def make_server(app: ASGIApp, settings: ServerSettings) -> uvicorn.Server:
    """The HTTP server of an application, with this server's limits; the caller ends it."""
    return _Server(
        uvicorn.Config(
            app,
            http=connection_class(settings),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=FLUSH_S,
        )
    )


async def serve(
    listener: socket.socket,
    settings: ServerSettings,
    llm_arguments: Mapping[str, Any],
    tokenizer: Tokenizer,
    *,
    on_ready: Callable[[EngineInfo], None],
    on_stop: Callable[[bool], None],
    log_in_words: bool = False,
    command: Sequence[str] = WORKER_COMMAND,
) -> None:
    """Serve until a signal, then drain; a second signal ends the process at once.

    Answers from the beginning, while the model is being loaded; raises why it cannot be, and when
    the engine has died too often. `on_stop` hears of the first signal, and whether the model was
    loaded by then. `command` starts the engine's process. The log is lines of JSON, or with
    `log_in_words` for people.
    """
    sink: Sink = write_in_words if log_in_words else write_line
    command = [*command, IN_WORDS] if log_in_words else command
    # Connections inherit it. asyncio sets it only where a socket names its protocol, and without it
    # an answer's second piece waits for the client to acknowledge the first: 40 ms.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with structured_logging(sink):
        metrics = Metrics()
        engine = EngineClient(llm_arguments, settings, metrics, command=command)
        app = create_app(Serving(engine, tokenizer, settings, metrics), sink)
        server = make_server(app, settings)
        tokenizer.pool.warm()
        stop = asyncio.Event()
        _install_signals(stop, engine)
        answering = asyncio.create_task(server.serve(sockets=[listener]))
        starting = asyncio.create_task(engine.start())
        stopping = asyncio.create_task(stop.wait())
        losing = asyncio.create_task(engine.wait_given_up())
        try:
            await asyncio.wait({answering, starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                starting.result()
                _keep_memory_flat()
                on_ready(engine.info)
                await asyncio.wait(
                    {answering, stopping, losing}, return_when=asyncio.FIRST_COMPLETED
                )
            if losing.done():  # whoever supervises this process starts it again
                raise EngineLostError(losing.result())
            if not stop.is_set():
                raise FlashdraftError("The HTTP server has stopped by itself.")
            on_stop(starting.done())
            app.state.body_memory.shut_down()
            await engine.drain(settings.drain_timeout_s if starting.done() else 0.0)
        finally:
            app.state.body_memory.shut_down()
            server.should_exit = True
            for task in (starting, stopping, losing):
                task.cancel()
            await asyncio.gather(answering, starting, stopping, losing, return_exceptions=True)
            tokenizer.pool.close()
            await engine.stop()


def _keep_memory_flat() -> None:
    """What was loaded stays for good; what requests leave behind goes back to the system.

    By default every thread gets an arena of its own, which never shrinks, and full collections walk
    through everything that was imported, so that they come late.
    """
    gc.collect()
    gc.freeze()
    with contextlib.suppress(OSError, AttributeError):  # another C library
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        for parameter, value in (MALLOC_ARENAS, MALLOC_TRIM):
            mallopt(parameter, value)


def _install_signals(stop: asyncio.Event, engine: EngineClient) -> None:
    def handle(number: int) -> None:
        if stop.is_set():
            engine.kill()
            os._exit(128 + number)  # asked twice: whatever still runs is not waited for
        stop.set()

    for number in SIGNALS:
        asyncio.get_running_loop().add_signal_handler(number, handle, number)
