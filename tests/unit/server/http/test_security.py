"""Who gets in: hosts, origins, keys; and what the page is allowed."""

from __future__ import annotations

import base64
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from flashdraft.errors import RequestError
from flashdraft.server.http.security import (
    FILE_HEADERS,
    PAGE_HEADERS,
    AccessControl,
    host_name,
)
from flashdraft.server.settings import ServerSettings
from tests.unit.server.asgi_client import Answer, call

OWN = ("host", "127.0.0.1:8000")


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"inside"})


def ask(
    *headers: tuple[str, str], path: str = "/v1/models", method: str = "GET", **s: Any
) -> Answer:
    answer = call(AccessControl(app, ServerSettings(**s)), method, path, headers)
    assert (answer.body == b"inside") == (answer.status == 200)
    return answer


# -- settings --------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.0.7", "example.com", ""])
def test_other_hosts_need_a_key_or_a_word(host: str) -> None:
    with pytest.raises(RequestError, match="--api-key"):
        ServerSettings(host=host)
    assert ServerSettings(host=host, no_auth=True).host == host
    assert ServerSettings(host=host, api_key="k").host == host


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_loopback_needs_none(host: str) -> None:
    assert ServerSettings(host=host).api_key is None


@pytest.mark.parametrize(
    "bad",
    [
        {"allow_origins": ("*",)},
        {"allow_origins": ("https://*.example.com",)},
        {"allow_origins": ("example.com",)},
        {"allow_origins": ("https://example.com/path",)},
        {"api_key": ""},
        {"api_key": "two words"},
        {"port": 65536},
        {"max_queue": -1},
        {"max_body_bytes": 0},
        {"max_body_bytes": 1000, "max_body_memory_bytes": 999},
    ],
)
def test_unusable_settings_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        ServerSettings(**bad)


# -- hosts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "host", ["127.0.0.1:8000", "localhost", "LOCALHOST:80", "[::1]:8000", "localhost.", "127.0.0.9"]
)
def test_own_names_get_in(host: str) -> None:
    assert ask(("host", host)).status == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "192.168.0.7", "0.0.0.0"],
)
def test_other_names_do_not(host: str) -> None:
    answer = ask(("host", host))
    assert answer.status == 403 and "--allow-host" in answer.json()["error"]["message"]
    assert ask(("host", host), path="/health").status == 403


@pytest.mark.parametrize("host", ["", "a b", "localhost:x", "user@localhost", "[::1", "a/b"])
def test_malformed_names_do_not(host: str) -> None:
    assert ask(("host", host)).status == 400


def test_the_host_header_must_be_there_once() -> None:
    assert ask().status == 400
    assert ask(OWN, ("host", "evil.example")).status == 400


def test_allowed_and_bound_hosts_get_in() -> None:
    assert ask(("host", "box.example:1"), allow_hosts=("Box.example",)).status == 200
    assert ask(("host", "evil.example"), allow_hosts=("*",)).status == 200
    bound = {"host": "box.example", "no_auth": True}
    assert ask(("host", "box.example"), **bound).status == 200
    everywhere = {"host": "0.0.0.0", "no_auth": True}
    assert ask(("host", "192.168.0.7:8000"), **everywhere).status == 200
    assert ask(("host", "evil.example"), **everywhere).status == 403


def test_host_names_lose_port_and_brackets() -> None:
    assert host_name(b"[FE80::1]:80") == "fe80::1"
    assert host_name(b"Example.COM.:1") == "example.com"


# -- origins ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://127.0.0.1:9", ""])
def test_pages_of_other_origins_are_refused(origin: str) -> None:
    for method in ("POST", "GET", "OPTIONS"):
        answer = ask(OWN, ("origin", origin), method=method)
        assert answer.status == 403
        assert "access-control-allow-origin" not in answer.headers


def test_the_own_page_is_not_foreign() -> None:
    answer = ask(OWN, ("origin", "http://127.0.0.1:8000"), method="POST")
    assert answer.status == 200 and "access-control-allow-origin" not in answer.headers


def test_no_cors_headers_without_an_origin() -> None:
    answer = ask(OWN, allow_origins=("https://good.example",))
    assert not [name for name in answer.headers if name.startswith("access-control")]


def test_an_allowed_origin_gets_its_headers_and_still_needs_the_key() -> None:
    allowed = {"allow_origins": ("https://good.example",), "api_key": "secret"}
    origin = ("origin", "https://good.example")
    preflight = ask(
        OWN,
        origin,
        ("access-control-request-method", "POST"),
        ("access-control-request-headers", "authorization,content-type"),
        method="OPTIONS",
        **allowed,
    )
    assert preflight.status == 204
    assert preflight.headers["access-control-allow-origin"] == "https://good.example"
    assert "authorization" in preflight.headers["access-control-allow-headers"]
    without = ask(OWN, origin, method="POST", **allowed)
    assert without.status == 401
    assert without.headers["access-control-allow-origin"] == "https://good.example"
    answer = ask(OWN, origin, ("x-api-key", "secret"), method="POST", **allowed)
    assert answer.status == 200
    assert answer.headers["access-control-allow-origin"] == "https://good.example"
    assert answer.headers["vary"] == "Origin"


# -- keys ------------------------------------------------------------------------------------------


def basic(user: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("authorization", "Bearer secret"),
        ("Authorization", "bearer  secret "),
        ("x-api-key", "secret"),
        ("authorization", basic("", "secret")),
        ("authorization", basic("anyone", "secret")),
    ],
)
def test_the_key_opens(name: str, value: str) -> None:
    assert ask(OWN, (name, value), api_key="secret").status == 200


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("authorization", "Bearer secre"),
        ("authorization", "Bearer secrets"),
        ("authorization", "Bearer"),
        ("authorization", "secret"),
        ("authorization", "Bearer s\xe9cret"),
        ("x-api-key", ""),
        ("authorization", "Basic secret"),
        ("authorization", basic("secret", "")),
        ("cookie", "secret"),
    ],
)
def test_anything_else_does_not(name: str, value: str) -> None:
    answer = ask(OWN, (name, value), api_key="secret")
    assert answer.status == 401 and "Bearer" in answer.headers["www-authenticate"]
    assert answer.json()["error"]["code"] == "invalid_api_key"


def test_every_path_but_health_needs_the_key() -> None:
    for path in (
        "/",
        "/metrics",
        "/version",
        "/v1/models",
        "/openapi.json",
        "/health/",
        "//health",
    ):
        assert ask(OWN, path=path, api_key="secret").status == 401
    assert ask(OWN, path="/health", api_key="secret").status == 200
    assert "Basic" in ask(OWN, path="/", api_key="secret").headers["www-authenticate"]


def test_refusals_speak_the_api_that_was_asked() -> None:
    answer = ask(OWN, path="/v1/messages", api_key="secret")
    assert answer.json()["type"] == "error"
    assert answer.json()["error"]["type"] == "authentication_error"


def test_websockets_are_closed() -> None:
    import asyncio

    sent: list[Message] = []

    async def scenario() -> None:
        async def send(message: Message) -> None:
            sent.append(message)

        async def receive() -> Message:
            return {"type": "websocket.connect"}

        gate = AccessControl(app, ServerSettings())
        await gate({"type": "websocket", "path": "/", "headers": []}, receive, send)

    asyncio.run(scenario())
    assert [message["type"] for message in sent] == ["websocket.close"]


# -- the page --------------------------------------------------------------------------------------


def test_the_page_may_run_its_own_scripts_alone() -> None:
    policy = PAGE_HEADERS["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy
    assert "script-src 'self';" in policy and "style-src 'self';" in policy
    assert "require-trusted-types-for 'script'" in policy
    assert "http" not in policy and "unsafe" not in policy
    # the worker's own policy: it has no network
    assert FILE_HEADERS["Content-Security-Policy"] == "default-src 'none'; script-src 'self'"
