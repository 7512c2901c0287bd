"""A hostile web page, another machine without the key: every route of the application, by itself.

The routes come from the application: one that is added later is attacked here without a word.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from fastapi import FastAPI

from flashdraft.server.answering.serving import Serving
from flashdraft.server.app import create_app
from flashdraft.server.http.security import OPEN_PATHS
from flashdraft.server.settings import ServerSettings
from flashdraft.server.telemetry.metrics import Metrics
from tests.unit.server.asgi_client import Answer, call
from tests.unit.server.scripted import MODEL, ScriptedEngine, make_tokenizer

OWN = ("host", "127.0.0.1:8000")
JSON = ("content-type", "application/json")
EVIL_HOSTS = ("evil.example", "127.0.0.1.evil.example", "localhost.evil.example:8000", "0.0.0.0")
EVIL_ORIGINS = ("https://evil.example", "null", "http://127.0.0.1:8001", "http://localhost", "")
# Enough for any route that answers: each takes what it knows and complains of the rest.
BODIES: tuple[dict[str, Any], ...] = (
    {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]},
    {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4},
    {"model": MODEL, "prompt": "hi"},
    {"model": MODEL, "input": "hi"},
)


class Target:
    """The whole application, and whether its engine was reached."""

    def __init__(self, **settings: Any) -> None:
        tokenizer, chosen = make_tokenizer(), ServerSettings(**settings)
        self.engine = ScriptedEngine(tokenizer, ["the quick"])
        serving = Serving(self.engine, tokenizer, chosen, Metrics())
        self.app: FastAPI = create_app(serving, lambda line: None)

    def ask(self, method: str, path: str, *headers: tuple[str, str], body: bytes = b"") -> Answer:
        return call(self.app, method, path, headers, [body])


def every_route() -> list[tuple[str, str]]:
    """The methods and paths of the application, and of some that it does not have."""
    methods: dict[str, set[str]] = Target().app.state.methods
    found = [
        (method, path.replace("{model_id:path}", MODEL).replace("{name:path}", "main.js"))
        for path, names in methods.items()
        for method in names
    ]
    assert not [path for _, path in found if "{" in path], "give the new parameter a value here"
    missing = [("GET", "/nothing"), ("POST", "/v1/embeddings"), ("DELETE", "/api/delete")]
    return sorted([*found, *missing])


ROUTES = every_route()


def test_the_routes_are_all_of_them() -> None:
    app = Target().app
    known = {path.replace(":path}", "}") for path in app.state.methods}
    assert app.openapi()["paths"].keys() <= known
    assert {"/", "/page/{name:path}", "/openapi.json", "/v1/messages"} <= app.state.methods.keys()
    direct = [path for route in app.routes if (path := getattr(route, "path", None))]
    assert set(direct) <= app.state.methods.keys()


def is_refused(target: Target, answer: Answer, status: int) -> None:
    assert answer.status == status
    assert not [name for name in answer.headers if name.startswith("access-control")]
    assert json.loads(answer.body)["error"]
    assert target.engine.requests == []


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_a_rebound_name_reaches_nothing(method: str, path: str) -> None:
    target = Target()
    for host in EVIL_HOSTS:
        for body in BODIES:
            data = json.dumps(body).encode()
            is_refused(target, target.ask(method, path, ("host", host), JSON, body=data), 403)
    is_refused(target, target.ask(method, path, OWN, ("host", "evil.example")), 400)
    is_refused(target, target.ask(method, path), 400)


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_a_page_of_another_origin_reaches_nothing(method: str, path: str) -> None:
    target = Target(allow_origins=("https://good.example",))
    for origin in EVIL_ORIGINS:
        for kind in ("application/json", "text/plain", "application/x-www-form-urlencoded"):
            headers = (OWN, ("origin", origin), ("content-type", kind))
            for body in BODIES:
                answer = target.ask(method, path, *headers, body=json.dumps(body).encode())
                is_refused(target, answer, 403)
        wanted = ("access-control-request-method", method)
        is_refused(target, target.ask("OPTIONS", path, OWN, ("origin", origin), wanted), 403)


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_without_the_key_nothing_is_reached(method: str, path: str) -> None:
    if path in OPEN_PATHS:
        return
    target = Target(api_key="secret")
    for given in ((), (("x-api-key", "wrong"),), (("authorization", "Bearer secre"),)):
        for body in BODIES:
            data = json.dumps(body).encode()
            is_refused(target, target.ask(method, path, OWN, JSON, *given, body=data), 401)


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_what_needs_no_preflight_starts_nothing(method: str, path: str) -> None:
    """Pictures, links and forms of a page are requests too, some of them without an Origin."""
    target = Target()
    if path in OPEN_PATHS:
        return  # the engine's state, which is the client's to tell
    if method == "POST":
        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
            for body in BODIES:
                data = json.dumps(body).encode()
                answer = target.ask(method, path, OWN, ("content-type", kind), body=data)
                assert 400 <= answer.status < 500 and target.engine.requests == [], kind
        assert target.ask(method, path, OWN, body=json.dumps(BODIES[0]).encode()).status >= 400
    else:
        target.ask(method, path, OWN)
    assert target.engine.requests == []


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_nothing_that_is_answered_can_be_taken_for_a_page(method: str, path: str) -> None:
    target = Target()
    if path in OPEN_PATHS:
        return
    answer = target.ask(method, path, OWN)
    assert answer.headers["x-content-type-options"] == "nosniff"
    if answer.headers.get("content-type", "").startswith("text/html"):
        assert path == "/" and "default-src 'none'" in answer.headers["content-security-policy"]


def test_the_bodies_would_start_something() -> None:
    target = Target()
    paths = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
    for number, path in enumerate((*paths, "/api/chat", "/api/generate")):
        for body in BODIES:
            target.ask("POST", path, OWN, JSON, body=json.dumps(body).encode())
        assert len(target.engine.requests) > number, path
