"""A client that leaves takes its work with it, also where nothing is streamed.

The framework notices a client's leaving only while it streams to it. A handler that computes a
whole answer first runs its work through `run_until_disconnect`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.types import Receive

T = TypeVar("T")


class ClientDisconnectedError(Exception):
    """The client left before its answer was ready; nobody will read one."""


async def run_until_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The work's result; the work is cancelled, and that waited for, when the client leaves.

    The request's body must have been read. Raises ClientDisconnectedError in that case.
    """
    _forget_body(request)
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_wait_for_disconnect(request.receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnectedError
    finally:
        watcher.cancel()
        task.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


def _forget_body(request: Request) -> None:
    """Nobody reads the parsed body again, and the framework would keep it until the end."""
    parsed = request.__dict__.get("_json")
    if isinstance(parsed, dict):
        parsed.clear()


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
