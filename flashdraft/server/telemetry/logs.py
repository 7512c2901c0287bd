"""Structured logs: one JSON object a line for every request, on stdout. No prompts unless asked.
What modules and libraries have to say (Python's logging) becomes such lines too. In words they are
text_lines.py's.

A request's record travels in a context variable, so that whoever learns something about it (the
engine's client: tokens and times) can write it down without being handed the record.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from flashdraft.core import Generation

MAX_LOGGED_BODY = 64 * 1024
MAX_LOGGED_PATH = 200
_CLIENT_LEFT = "socket.send() raised exception."  # asyncio's; the request's own line says it
Sink = Callable[[dict[str, Any]], None]

_current: ContextVar[RequestRecord | None] = ContextVar("flashdraft_request", default=None)


@dataclass
class RequestRecord:
    """What is known of one HTTP request."""

    method: str
    path: str
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    began: float = field(default_factory=time.monotonic)
    route: str | None = None
    status: int | None = None  # None: the client left before there was an answer
    is_complete: bool = False
    is_broken: bool = False  # a stream that has ended with an error
    generations: list[Generation] = field(default_factory=list)
    ttft_s: float | None = None
    error: str | None = None
    body: str | None = None  # only with log_prompts

    def line(self) -> dict[str, Any]:
        """The record as it is logged."""
        stats = [generation.stats for generation in self.generations]
        content: dict[str, Any] = {
            "time": _now(),
            "event": "request",
            "id": self.id,
            "method": self.method,
            "route": self.route,
            "status": self.status,
            "complete": self.is_complete and not self.is_broken,
            "duration_s": round(time.monotonic() - self.began, 4),
        }
        if self.route is None:
            content["path"] = self.path[:MAX_LOGGED_PATH]
        if self.generations:
            steps, decoded = (sum(getattr(s, n) for s in stats) for n in ("steps", "decode_tokens"))
            decode_s = max(one.decode_s for one in stats)
            content |= {
                "prompt_tokens": stats[0].prompt_tokens,
                "cached_tokens": stats[0].cached_tokens,
                "completion_tokens": sum(len(g.token_ids) for g in self.generations),
                "finish_reasons": [g.finish_reason.value for g in self.generations],
                "steps": steps,
                "drafted": sum(one.drafted for one in stats),
                "accepted": sum(one.accepted for one in stats),
                "tokens_per_s": round(decoded / decode_s, 2) if decode_s > 0 else 0.0,
                "mean_accepted_length": round(decoded / steps, 4) if steps else 0.0,
            }
        for name in ("ttft_s", "error", "body"):
            value = getattr(self, name)
            if value is not None:
                content[name] = round(value, 4) if isinstance(value, float) else value
        return content


def begin_record(method: str, path: str) -> RequestRecord:
    """A new record, and the current one of this request's tasks."""
    record = RequestRecord(method, path)
    _current.set(record)
    return record


def current_record() -> RequestRecord | None:
    """The record of the request that is being served here; None outside one."""
    return _current.get()


def write_line(content: dict[str, Any]) -> None:
    """Print one line of JSON on stdout."""
    with contextlib.suppress(OSError):  # the reader of the log has gone; the server goes on
        print(json.dumps(content, allow_nan=False, default=str), flush=True, file=sys.stdout)


class SinkHandler(logging.Handler):
    """Python's logging as lines of the server's log."""

    def __init__(self, sink: Sink) -> None:
        super().__init__(logging.WARNING)
        self._sink = sink

    def emit(self, record: logging.LogRecord) -> None:
        try:
            content = {
                "time": _now(),
                "event": "log",
                "level": record.levelname.lower(),
                "logger": record.name,
                "message": record.getMessage().strip(),
            }
            if content["message"] == _CLIENT_LEFT:
                return
            request = current_record()
            if request is not None:
                content["id"] = request.id
            if record.exc_info:
                content["exception"] = logging.Formatter().formatException(record.exc_info)
            self._sink(content)
        except Exception:  # a message that does not fit its arguments ends nothing
            self.handleError(record)


@contextlib.contextmanager
def structured_logging(sink: Sink) -> Iterator[None]:
    """Send this process's logging to a sink, for as long as it serves."""
    handler = SinkHandler(sink)
    root, ours = logging.getLogger(), logging.getLogger("flashdraft")
    set_aside = list(ours.handlers)  # the command line's: nothing is said twice
    for one in set_aside:
        ours.removeHandler(one)
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)
        for one in set_aside:
            ours.addHandler(one)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
