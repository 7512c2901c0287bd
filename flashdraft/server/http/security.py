"""Who may ask: the Host header, web pages of other origins, the API key; and the page's headers.

A web page somewhere can make a browser on this machine talk to 127.0.0.1. Its own name in the Host
header (DNS rebinding) and its Origin give it away; both are refused unless they were allowed.
Requests without an Origin, which is every client that is not a browser, are not concerned.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import ipaddress
import re
from collections.abc import Iterator

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from flashdraft.server.http.asgi import header, header_values, send_answer, send_error
from flashdraft.server.http.errors import ApiError
from flashdraft.server.settings import ServerSettings, is_loopback

OPEN_PATHS = ("/health",)  # need no key
PAGE_FILES = "/page/"
ANY_HOST = "*"
_LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([^\s:/\\@\[\]]+))(?::\d{1,5})?")
_PREFLIGHT_MAX_AGE = "600"
_PAGE_POLICY = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "img-src": "data:",  # the icon, and pictures of the user's own
    "connect-src": "'self'",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
    "require-trusted-types-for": "'script'",  # no text becomes markup, whoever tries
    "trusted-types": "flashdraft",  # for the one worker's address
}
_FILE_POLICY = {"default-src": "'none'", "script-src": "'self'"}  # the worker's too: no network
_FOR_ALL = {"Cache-Control": "no-cache", "Cross-Origin-Resource-Policy": "same-origin"}


def _written(policy: dict[str, str]) -> str:
    return "; ".join(f"{name} {value}" for name, value in policy.items())


# The web page may run its own scripts and talk to this server, no more.
PAGE_HEADERS = {
    "Content-Security-Policy": _written(_PAGE_POLICY),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-DNS-Prefetch-Control": "off",  # names in an answer's links are asked for by nobody
    "X-Frame-Options": "DENY",
    **_FOR_ALL,
}
FILE_HEADERS = {"Content-Security-Policy": _written(_FILE_POLICY), **_FOR_ALL}


class AccessControl:
    """Hands on the requests of those who may ask, and refuses the others."""

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app = app
        self._settings = settings
        self._hosts = _LOOPBACK_NAMES | {name.lower() for name in settings.allow_hosts}
        self._hosts |= {settings.host.lower()}
        self._origins = frozenset(origin.lower() for origin in settings.allow_origins)
        self._key_digest = None if settings.api_key is None else _digest(settings.api_key.encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        refusal = self._check_host(scope) or self._check_origin(scope)
        if refusal is None and self._is_foreign(scope):
            if scope["method"] == "OPTIONS" and header(scope, b"access-control-request-method"):
                await self._answer_preflight(scope, send)
                return
            send = self._with_origin(scope, send)
        refusal = refusal or self._check_key(scope)
        if refusal is not None:
            await send_error(scope, send, refusal)
        else:
            await self._app(scope, receive, send)

    def _check_host(self, scope: Scope) -> ApiError | None:
        values = header_values(scope, b"host")
        name = host_name(values[0]) if len(values) == 1 else None
        if name is None:
            return ApiError(400, "The request needs one valid Host header.")
        if ANY_HOST in self._hosts or name in self._hosts or self._is_own_address(name):
            return None
        return ApiError(
            403,
            f"The host {name!r} is not one of this server's names. If it is meant to be, start the "
            f"server with --allow-host {name}.",
            code="host_not_allowed",
        )

    def _is_own_address(self, name: str) -> bool:
        """An address cannot be rebound like a name; it must only be one we listen on."""
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return False
        return address.is_loopback or not is_loopback(self._settings.host)

    def _check_origin(self, scope: Scope) -> ApiError | None:
        if not self._is_foreign(scope) or _origin(scope) in self._origins:
            return None
        return ApiError(
            403,
            f"Web pages of {_origin(scope)!r} may not use this server. If they are meant to, start "
            "it with --allow-origin and that origin.",
            code="origin_not_allowed",
        )

    def _is_foreign(self, scope: Scope) -> bool:
        """Whether a page that this server did not serve is asking."""
        origin = _origin(scope)
        host = (header(scope, b"host") or b"").decode("latin-1").lower()
        return origin is not None and origin.partition("://")[2] != host

    def _check_key(self, scope: Scope) -> ApiError | None:
        if self._key_digest is None or scope["path"] in OPEN_PATHS:
            return None
        for given in _given_keys(scope):
            if hmac.compare_digest(_digest(given), self._key_digest):
                return None
        # A browser that opens the page asks its user for the key; programs send a header.
        is_page = scope["path"] == "/" or scope["path"].startswith(PAGE_FILES)
        scheme = "Basic" if is_page else "Bearer"
        return ApiError(
            401,
            "The API key is missing or wrong; send it as 'Authorization: Bearer KEY' or "
            "'x-api-key: KEY'.",
            code="invalid_api_key",
            headers={"WWW-Authenticate": f'{scheme} realm="flashdraft"'},
        )

    async def _answer_preflight(self, scope: Scope, send: Send) -> None:
        wanted = (header(scope, b"access-control-request-headers") or b"").decode("latin-1")
        headers = {
            "Access-Control-Allow-Origin": _origin_as_sent(scope),
            "Access-Control-Allow-Methods": "GET, POST",
            "Access-Control-Max-Age": _PREFLIGHT_MAX_AGE,
            "Vary": "Origin",
        }
        if wanted:
            headers["Access-Control-Allow-Headers"] = wanted
        await send_answer(send, 204, b"", headers)

    def _with_origin(self, scope: Scope, send: Send) -> Send:
        origin = _origin_as_sent(scope).encode("latin-1")

        async def send_with_origin(message: Message) -> None:
            if message["type"] == "http.response.start":
                more = [(b"access-control-allow-origin", origin), (b"vary", b"Origin")]
                message = {**message, "headers": [*message.get("headers", ()), *more]}
            await send(message)

        return send_with_origin


def host_name(value: bytes) -> str | None:
    """The name in a Host header, without its port; None if it is malformed."""
    match = _HOST.fullmatch(value.decode("latin-1").lower())
    if match is None:
        return None
    return (match[1] or match[2]).rstrip(".")


def _origin_as_sent(scope: Scope) -> str:
    return (header(scope, b"origin") or b"").decode("latin-1")


def _origin(scope: Scope) -> str | None:
    return _origin_as_sent(scope).lower() if header_values(scope, b"origin") else None


def _given_keys(scope: Scope) -> Iterator[bytes]:
    yield from header_values(scope, b"x-api-key")
    for value in header_values(scope, b"authorization"):
        scheme, _, rest = value.strip().partition(b" ")
        if scheme.lower() == b"bearer":
            yield rest.strip()
        elif scheme.lower() == b"basic":
            try:
                yield base64.b64decode(rest.strip(), validate=True).partition(b":")[2]
            except binascii.Error:
                continue


def _digest(key: bytes) -> bytes:
    """Of equal length for keys of any length, so that comparing takes equal time."""
    return hashlib.sha256(key).digest()
