"""A server that speaks OpenAI's chat API as it is told to: for a client's tests.

    with OpenAIServer(kind="vllm") as server:
        server.script = [answer("Hello", " world"), refuse(429, retry_after="0")]

Every question takes the next of the script, the last one again and again.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Act = Callable[["Handler", dict[str, Any]], None]


class Handler(BaseHTTPRequestHandler):
    """One connection; the server is an OpenAIServer's."""

    server: Server

    def do_GET(self) -> None:
        told = self.server.told
        told.paths.append(self.path)
        told.keys.append(self.headers.get("Authorization"))
        if self.path == "/v1/models":
            models = [{"id": name, "owned_by": told.kind} for name in told.models]
            self.reply(told.models_status, json.dumps({"data": models}))
        elif self.path == "/metrics" and told.metrics is not None:
            self.reply(200, told.metrics())
        else:
            self.reply(404, "{}")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        told = self.server.told
        with told.lock:
            told.questions.append(body)
            act = told.script.pop(0) if len(told.script) > 1 else told.script[0]
            told.running.add(self)
            told.most_running = max(told.most_running, len(told.running))
        try:
            act(self, body)
        finally:
            self.is_answered()

    def is_answered(self) -> None:
        """Whoever reads the end of this answer may ask again: no longer one in flight."""
        with self.server.told.lock:
            self.server.told.running.discard(self)

    def reply(self, status: int, text: str, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    def stream(self, events: Iterator[dict[str, Any] | str]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for event in events:
            text = event if isinstance(event, str) else json.dumps(event)
            if text == "[DONE]":
                self.is_answered()
            self.wfile.write(f"data: {text}\n\n".encode())
            self.wfile.flush()

    def log_message(self, format: str, *arguments: Any) -> None:
        """Nothing: tests read what was asked."""


class Server(ThreadingHTTPServer):
    """Knows who tells it what to say."""

    daemon_threads = True

    def __init__(self, told: OpenAIServer) -> None:
        self.told = told
        super().__init__(("127.0.0.1", 0), Handler)


class OpenAIServer:
    """The server, what it is to say, and what it was asked."""

    def __init__(self, kind: str = "openai", models: Sequence[str] = ("tiny",)) -> None:
        self.kind, self.models, self.models_status = kind, list(models), 200
        self.script: list[Act] = [answer("Hello", " world")]
        self.metrics: Callable[[], str] | None = None
        self.questions: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.keys: list[str | None] = []
        self.lock = threading.Lock()
        self.running: set[Handler] = set()
        self.most_running = 0
        self._server = Server(self)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> OpenAIServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Be gone: connections are refused from now on."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
            self._server.server_close()


def chunk(text: str, count: int | None, reason: str | None = None, **more: Any) -> dict[str, Any]:
    """A chunk of a stream; `count` is how many tokens there are so far."""
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": reason, **more}
    usage = None if count is None else {"prompt_tokens": 10, "completion_tokens": count}
    return {"choices": [choice], "usage": usage}


def answer(
    *texts: str,
    counts: Sequence[int] | None = None,
    pause_s: float = 0.0,
    tokens: int | None = None,
    cached: int = 0,
    statistics: dict[str, Any] | None = None,
) -> Act:
    """Answers with these pieces; `counts` tokens each, told along the way if given."""

    def events() -> Iterator[dict[str, Any] | str]:
        yield {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
        so_far = 0
        for place, text in enumerate(texts):
            so_far += 1 if counts is None else counts[place]
            time.sleep(pause_s if place else 0.0)
            yield chunk(text, None if counts is None else so_far)
        yield chunk("", None, "stop", flashdraft=statistics)
        usage = {"prompt_tokens": 10, "completion_tokens": tokens or so_far}
        yield {
            "choices": [],
            "usage": {**usage, "prompt_tokens_details": {"cached_tokens": cached}},
        }
        yield "[DONE]"

    return lambda handler, body: handler.stream(events())


def refuse(status: int, message: str = "no", retry_after: str | None = None) -> Act:
    """Refuses with an error of OpenAI's form."""
    headers = {} if retry_after is None else {"Retry_After": retry_after}
    text = json.dumps({"error": {"message": message}})
    return lambda handler, body: handler.reply(status, text, **headers)


def stream_of(*events: dict[str, Any] | str) -> Act:
    """A stream of exactly these events, and then the connection's end."""
    return lambda handler, body: handler.stream(iter(events))


def hang(seconds: float) -> Act:
    """Says nothing for so long."""
    return lambda handler, body: time.sleep(seconds)
