"""A server that serves the web page's files and plays answers by script, in the shape of ours.

It stands in where a test needs an answer, a pace or a failure that no model gives on demand.
"""

from __future__ import annotations

import json
import random
import re
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from flashdraft.server.http.security import FILE_HEADERS, PAGE_HEADERS

PAGE = Path(__file__).parents[2] / "flashdraft" / "server" / "page"
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
MAX_TREE, DEPTH = 31, 8  # tokens of a tree, and of its longest way
OTHERS = (
    " the",
    " a",
    ",",
    " of",
    " to",
    "\n",
    " and",
    ".",
    " in",
    " it",
    " which",
    " then",
    " so",
)
ACCEPTED = (3, 1, 5, 0, 2, 7, 1, 4)  # drafts accepted, step by step


@dataclass
class Failure:
    """An answer that is no answer."""

    status: int
    message: str = "scripted"
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Script:
    """What happens to the next questions; tests change it as they go."""

    content: str = "A short answer."
    plain_content: str | None = None  # to questions with verify 0; the same by default
    reasoning: str = ""
    trees: bool = False  # its steps have branches, which are told where a question asks
    others: tuple[str, ...] = OTHERS  # tokens that were tried beside those of the answer
    step_s: float = 0.0
    steps_before_cut: int | None = None  # then the connection ends, without [DONE]
    failures: list[Failure] = field(default_factory=list)  # one for each question to come
    is_ready: bool = True  # /health
    capabilities: tuple[str, ...] = ("completion", "thinking")
    context: int = 8192
    model: str = "scripted"
    key: str | None = None


class ScriptedServer(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.script = Script()
        self.questions: list[dict[str, Any]] = []
        self.num_abandoned = 0  # answers whose reader went away
        self._thread = threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def stop(self) -> None:
        self.shutdown()
        self.server_close()
        self._thread.join()

    def handle_error(self, *_: object) -> None:
        """A reader that goes away is part of the tests."""


def chunks(script: Script, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The chunks of one answer: one for each step, then the statistics, then the usage."""
    options = body.get("flashdraft", {})
    is_plain = options.get("verify") == 0
    content = script.content
    if is_plain and script.plain_content is not None:
        content = script.plain_content
    words = [("reasoning_content", word) for word in _words(script.reasoning)]
    words += [("content", word) for word in _words(content)]
    words = words[: body.get("max_tokens")]
    yield _chunk({"role": "assistant", "content": ""})
    step = start = accepted = 0
    histogram: dict[int, int] = {}
    while start < len(words):
        drafts = 0 if is_plain or step == 0 else ACCEPTED[step % len(ACCEPTED)]
        taken = words[start : start + drafts + 1]
        tokens = [{"text": w, "drafted": i < drafts} for i, (_, w) in enumerate(taken)]
        delta: dict[str, str] = {}
        for channel, word in taken:
            delta[channel] = delta.get(channel, "") + word
        extra = {"flashdraft": {"tokens": tokens, "step": step}} if options.get("tokens") else {}
        if script.trees and drafts and options.get("trees"):
            later = [word for _, word in words[start : start + DEPTH]]
            extra["flashdraft"]["trees"] = [
                make_tree(later, min(drafts, len(taken)), step, script.others)
            ]
        yield _chunk(delta) | extra
        accepted += min(drafts, len(taken))
        histogram[len(taken)] = histogram.get(len(taken), 0) + (step > 0)
        start, step = start + len(taken), step + 1
    steps = max(step - 1, 1)
    decode_s = steps * max(script.step_s, 0.01)
    statistics = {
        "steps": steps,
        "drafted": 0 if is_plain else 7 * steps,
        "accepted": accepted,
        "mean_accepted_length": max(len(words) - 1, 0) / steps,
        "histogram": histogram,
        "ttft_s": 0.05,
        "decode_s": decode_s,
        "tokens_per_s": max(len(words) - 1, 0) / decode_s,
        "cached_tokens": 0,
    }
    reason = "length" if len(words) == body.get("max_tokens") else "stop"
    yield _chunk({}, reason) | {"flashdraft": statistics}
    yield {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": len(words)}}


def make_tree(
    words: list[str], num_accepted: int, seed: int, others: tuple[str, ...]
) -> dict[str, Any]:
    """A tree of 31 tokens or so: the accepted words, and others beside them and behind."""
    pick = random.Random(seed)
    texts, parents, path, ends = list[str](), list[int](), list[int](), {0: 0}
    for place, word in enumerate(words[:num_accepted]):
        if pick.random() < 0.3:  # the drafter had found another one likelier
            texts.append(pick.choice(others))
            parents.append(path[-1] if path else 0)
            ends[len(texts)] = place + 1
        texts.append(word)
        parents.append(path[-1] if path else 0)
        path.append(len(texts))
        ends[len(texts)] = place + 1
    while len(texts) < MAX_TREE:
        parent = pick.choice([*ends, len(texts), len(texts)])
        if ends[parent] >= DEPTH:
            continue
        texts.append(pick.choice(others))
        parents.append(parent)
        ends[len(texts)] = ends[parent] + 1
    return {"at": 0, "texts": texts, "parents": parents, "path": path}


def _words(text: str) -> list[str]:
    return re.findall(r"\s*[\w']+|\s*[^\w\s]|\s+", text)


def _chunk(delta: Mapping[str, str], reason: str | None = None) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "finish_reason": reason}
    return {"id": "c", "object": "chat.completion.chunk", "model": "scripted", "choices": [choice]}


class _Handler(BaseHTTPRequestHandler):
    server: ScriptedServer

    def do_GET(self) -> None:
        if self.path == "/health":
            self._send(200 if self.server.script.is_ready else 503, b"{}", "application/json")
        elif self.path == "/v1/models":
            if self._is_allowed():
                defaults = {"temperature": 0.2, "top_p": 0.9, "max_tokens": 1024}
                model = {
                    "id": self.server.script.model,
                    "sampling_defaults": defaults,
                    "max_model_len": self.server.script.context,
                    "capabilities": self.server.script.capabilities,
                }
                body = json.dumps({"object": "list", "data": [model]})
                self._send(200, body.encode(), "application/json")
        else:
            name = "index.html" if self.path == "/" else self.path.removeprefix("/page/")
            path = PAGE / name
            if ".." in name or path.suffix not in TYPES or not path.is_file():
                self._send(404, b"", "text/plain")
            else:
                kind = f"{TYPES[path.suffix]}; charset=utf-8"
                headers = PAGE_HEADERS if name == "index.html" else FILE_HEADERS
                self._send(200, path.read_bytes(), kind, headers)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.questions.append(body)
        script = self.server.script
        if not self._is_allowed():
            return
        if body["model"] != script.model:
            self._fail(Failure(404, "no such model"))
            return
        if script.failures:
            self._fail(script.failures.pop(0))
            return
        try:
            self._play(script, body)
        except ConnectionError:
            self.server.num_abandoned += 1

    def _play(self, script: Script, body: Mapping[str, Any]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        for i, chunk in enumerate(chunks(script, body)):
            if i == script.steps_before_cut:
                return
            self._write(json.dumps(chunk))
            time.sleep(script.step_s)
        self._write("[DONE]")

    def _write(self, data: str) -> None:
        # in two pieces, cut inside a character: the network does that too
        event = f"data: {data}\n\n".encode()
        for piece in (event[: len(event) // 2], event[len(event) // 2 :]):
            self.wfile.write(piece)
            self.wfile.flush()

    def _is_allowed(self) -> bool:
        key = self.server.script.key
        if key is None or self.headers["Authorization"] == f"Bearer {key}":
            return True
        self._fail(Failure(401, "no such key"))
        return False

    def _fail(self, failure: Failure) -> None:
        error = {"message": failure.message, "type": "t", "param": None, "code": None}
        body = json.dumps({"error": error}).encode()
        self._send(failure.status, body, "application/json", failure.headers)

    def _send(
        self, status: int, body: bytes, kind: str, headers: Mapping[str, str] | None = None
    ) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": kind, **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass
