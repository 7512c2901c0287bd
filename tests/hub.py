"""A Hub of the tests' own: it lists repositories, redirects to another host, and can misbehave."""

from __future__ import annotations

import hashlib
import http.server
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants

COMMIT = "c" * 40
INDEX = "model.safetensors.index.json"
LARGE = (".safetensors", ".gguf")


class FakeHub:
    """What it has, how it behaves, and what it was asked."""

    def __init__(self) -> None:
        self.models: dict[str, dict[str, bytes]] = {}
        self.commits: dict[str, str] = {}
        self.architectures: dict[str, str] = {}  # of GGUF files, as listed
        self.refusals: dict[str, tuple[int, dict[str, str]]] = {}  # by repository, of its files
        self.listing_refusal: tuple[int, dict[str, str]] | None = None
        self.asked: list[tuple[str, str, dict[str, str]]] = []  # host, path, headers
        self.ignores_range = False
        self.wrong_range = False
        self.refuses_range = False
        self.cuts: list[int] = []  # after how many bytes the next answers of weights break off
        self.statuses: list[int] = []  # of the next answers of weights
        self.damage: list[bytes] = []  # put in place of the first bytes of the next answers
        self.wrong_sizes: dict[str, int] = {}  # as listed
        self.hold: threading.Event | None = None  # weights stop in the middle until it is set
        self.is_holding = threading.Event()
        self.url = self.cdn = ""

    def add(self, repository: str, **files: bytes) -> dict[str, bytes]:
        """A model of two shards, with files that nobody needs, and others by name."""
        names = ("model-1.safetensors", "model-2.safetensors")
        index = {"weight_map": dict(zip("ab", names, strict=True))}
        content = {
            "config.json": b'{"model_type": "llama"}',
            "tokenizer.json": b"{}",
            INDEX: json.dumps(index).encode(),
            names[0]: bytes(range(256)) * 300,
            names[1]: repository.encode() * 100,
            "consolidated.safetensors": b"the same again" * 1000,
            "original/params.json": b"{}",
            "README.md": b"words",
            "pytorch_model.bin": b"pickled",
        }
        self.models[repository] = content | files
        return self.models[repository]

    def weights_asked(self) -> list[str | None]:
        """The ranges that were asked for, of the first shard."""
        return [
            headers.get("range")
            for host, path, headers in self.asked
            if host == "cdn" and path.endswith("model-1.safetensors")
        ]

    def tree(self, repository: str) -> bytes:
        """As the client's own download asks for it."""
        files = json.loads(self.listing(repository))["siblings"]
        kept = [
            {"type": "file", "path": one["rfilename"], "size": one["size"], "oid": one["blobId"]}
            for one in files
        ]
        for entry, one in zip(kept, files, strict=True):
            if "lfs" in one:
                entry["lfs"] = {**one["lfs"], "oid": one["lfs"]["sha256"]}
        return json.dumps(kept).encode()

    def listing(self, repository: str) -> bytes:
        siblings, kind = [], self.architectures.get(repository)
        for name, content in self.models[repository].items():
            size = self.wrong_sizes.get(name, len(content))
            entry: dict[str, Any] = {"rfilename": name, "size": size, "blobId": git_digest(content)}
            if name.endswith(LARGE):
                sha256 = hashlib.sha256(content).hexdigest()
                entry["lfs"] = {"size": size, "sha256": sha256, "pointerSize": 134}
            siblings.append(entry)
        return json.dumps(
            {
                "id": repository,
                "sha": self.commits.get(repository, COMMIT),
                "siblings": siblings,
                "tags": ["license:gemma"],
            }
            | ({"gguf": {"architecture": kind}} if kind is not None else {})
        ).encode()


def git_digest(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class _Handler(http.server.BaseHTTPRequestHandler):
    """Answers for the Hub, or for the host that has the large files."""

    hub: FakeHub
    host: str

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.hub.asked.append((self.host, path, headers))
        if listed := re.fullmatch(r"/api/models/([\w.-]+/[\w.-]+)(/revision/\w+)?", path):
            self.list_files(listed[1])
        elif tree := re.fullmatch(r"/api/models/([\w.-]+/[\w.-]+)/tree/\w+", path):
            self.answer(200, {"Content-Type": "application/json"}, self.hub.tree(tree[1]))
        elif wanted := re.fullmatch(r"/([\w.-]+/[\w.-]+)/resolve/(\w+)/(.+)", path):
            self.deliver(wanted[1], wanted[3])
        else:
            self.answer(404)

    do_HEAD = do_GET

    def list_files(self, repository: str) -> None:
        if self.hub.listing_refusal is not None:
            self.answer(*self.hub.listing_refusal)
        elif repository not in self.hub.models:
            self.answer(404, {"X-Error-Code": "RepoNotFound"})
        else:
            body = self.hub.listing(repository)
            self.answer(200, {"Content-Type": "application/json"}, body)

    def deliver(self, repository: str, name: str) -> None:
        if repository in self.hub.refusals:
            self.answer(*self.hub.refusals[repository])
            return
        content = self.hub.models[repository][name]
        known = {"X-Repo-Commit": self.hub.commits.get(repository, COMMIT)}
        known |= {"ETag": f'"{git_digest(content)}"', "X-Linked-Size": str(len(content))}
        if self.host == "hub" and name.endswith(LARGE):
            known["X-Linked-Etag"] = f'"{hashlib.sha256(content).hexdigest()}"'
            self.answer(302, known | {"Location": f"{self.hub.cdn}{self.path}"})
            return
        if self.command == "HEAD":
            self.answer(200, known | {"Content-Length": str(len(content))})
            return
        is_first = name.endswith(("model-1.safetensors", ".gguf"))
        if is_first and self.hub.statuses:
            self.answer(self.hub.statuses.pop(0))
            return
        self.send(content, is_first)

    def send(self, content: bytes, is_first: bool) -> None:
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        start = int(asked[1]) if asked and not self.hub.ignores_range else 0
        status, headers = 200, {}
        if start >= len(content) > 0 or (start and self.hub.refuses_range):
            self.answer(416)
            return
        if start:
            start -= self.hub.wrong_range
            status = 206
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        body = content[start:]
        if is_first and self.hub.damage:
            wrong = self.hub.damage.pop(0)
            body = wrong + body[len(wrong) :]
        headers["Content-Length"] = str(len(body))
        self.start(status, headers)
        if is_first and self.hub.cuts:
            self.wfile.write(body[: self.hub.cuts.pop(0)])
            self.wfile.flush()
            self.close_connection = True
            return
        if is_first and self.hub.hold is not None:
            self.wfile.write(body[:1000])
            self.wfile.flush()
            self.hub.is_holding.set()
            self.hub.hold.wait(60)
            body = body[1000:]
        self.wfile.write(body)

    def answer(self, status: int, headers: dict[str, str] | None = None, body: bytes = b"") -> None:
        self.start(status, {"Content-Length": str(len(body))} | (headers or {}))
        if self.command != "HEAD":
            self.wfile.write(body)

    def start(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


@contextmanager
def serve_hub() -> Iterator[FakeHub]:
    """A Hub and the other host that it redirects to."""
    hub = FakeHub()
    servers = []
    for host in ("hub", "cdn"):
        handler = type("Handler", (_Handler,), {"hub": hub, "host": host})
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        servers.append(server)
    hub.url, hub.cdn = (f"http://127.0.0.1:{server.server_port}" for server in servers)
    try:
        yield hub
    finally:
        if hub.hold is not None:
            hub.hold.set()
        for server in servers:
            server.shutdown()
            server.server_close()


@contextmanager
def hub_in_use(monkeypatch: pytest.MonkeyPatch, home: Path) -> Iterator[FakeHub]:
    """A Hub that this process's client asks, with a cache and a home of its own."""
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    monkeypatch.setenv("FLASHDRAFT_HOME", str(home / "flashdraft"))
    with serve_hub() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        template = f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))
        huggingface_hub.close_session()
        yield hub
        huggingface_hub.close_session()
