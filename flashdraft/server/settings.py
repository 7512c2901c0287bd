"""The server's settings: where it listens, who may ask, and how much. Defaults stand here alone.

What the model is and how it runs are arguments of `LLM`; they are not in here.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

from flashdraft.errors import RequestError
from flashdraft.media.sources import MediaFetcher

_EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}
LOG_FORMATS = ("auto", "text", "json")
MIB = 1024 * 1024
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s*]+", re.IGNORECASE)


@dataclass(frozen=True)
class ServerSettings:
    """Addresses, credentials and limits of one server. Times are in seconds."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    no_auth: bool = False  # serve other machines without a key
    allow_hosts: tuple[str, ...] = ()  # more names in the Host header; "*" takes any
    allow_origins: tuple[str, ...] = ()  # web pages of other origins that may ask
    served_model_names: tuple[str, ...] = ()  # what clients call the model, the first one leading
    log_prompts: bool = False
    log_format: str = "auto"  # "text" for people, "json" for programs; auto asks the terminal
    open_objects: bool = False  # objects of schemas may have more than their properties

    max_body_bytes: int = 8 * MIB
    max_picture_body_bytes: int = 32 * MIB  # of one that may hold pictures; its text has the above
    max_body_memory_bytes: int = 128 * MIB  # of all bodies until they are parsed
    max_pictures: int = 16  # of a request
    max_picture_memory_bytes: int = 512 * MIB  # of all requests' pictures: waiting, and open
    picture_timeout_s: float = 60.0  # to open all pictures of a request
    allow_media_domains: tuple[str, ...] = ()  # whose pictures are fetched where clients say so
    max_json_depth: int = 64
    max_messages: int = 2048
    max_n: int = 16
    max_stop: int = 16
    max_logit_bias: int = 1024
    max_schema_bytes: int = 64 * 1024
    max_schema_depth: int = 32
    max_regex_bytes: int = 4096
    max_tokens_default: int | None = None  # of an answer; None = as fits the model
    template_kwargs: tuple[str, ...] = ("enable_thinking", "preserve_thinking")

    max_queue: int = 256  # requests that wait; one more is refused with 429
    max_buffered_tokens: int = 16384  # that a client has not read; then its request is cancelled
    max_connections: int = 512  # requests answered at once; one more is refused with 503
    max_sockets: int = 4096  # open ones; of those without a whole request the oldest goes first
    request_timeout_s: float = 3600.0
    head_timeout_s: float = 10.0  # for a request's head to arrive; silent connections end with it
    body_timeout_s: float = 60.0  # for a request's body to arrive
    write_timeout_s: float = 60.0  # for a client to read anything at all of what is sent
    drain_timeout_s: float = 30.0
    engine_timeout_s: float = 300.0  # without a step while there is work: the engine hangs
    max_restarts: int = 5  # of the engine in a row

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise RequestError(f"port is {self.port}; it must be from 0 (any free one) to 65535.")
        if self.api_key is not None and not _is_usable_key(self.api_key):
            raise RequestError(
                "The API key is empty or has spaces or other than printable ASCII; give a usable "
                "one, or none at all: no --api-key, and FLASHDRAFT_API_KEY unset."
            )
        if self.api_key is None and not self.no_auth and not is_loopback(self.host):
            raise RequestError(
                f"host is {self.host!r}: other machines could use this server, and there is no API "
                "key. Give --api-key (or FLASHDRAFT_API_KEY), or --no-auth if that is intended."
            )
        for origin in self.allow_origins:
            if not _ORIGIN.fullmatch(origin):
                raise RequestError(
                    f"allow_origins holds {origin!r}; an origin looks like https://example.com, "
                    "without a path, and there is no wildcard."
                )
        MediaFetcher(self.allow_media_domains)  # refuses what is no host
        for name in ("max_queue", "max_restarts", "max_pictures"):
            self._require_at_least(name, 0)
        for name in (
            "max_body_bytes",
            "max_picture_body_bytes",
            "max_body_memory_bytes",
            "max_picture_memory_bytes",
            "max_json_depth",
            "max_buffered_tokens",
            "max_connections",
            "max_sockets",
        ):
            self._require_at_least(name, 1)
        if self.max_body_memory_bytes < self.max_body_bytes:
            raise RequestError(
                f"max_body_memory_bytes is {self.max_body_memory_bytes}, less than one body may "
                f"have (max_body_bytes, {self.max_body_bytes}); raise the one or lower the other."
            )

    def _require_at_least(self, name: str, least: int) -> None:
        value = getattr(self, name)
        if type(value) is not int or value < least:
            raise RequestError(f"{name} is {value!r}; it must be an integer of at least {least}.")


def url_of(host: str, port: int) -> str:
    """The address of a server that listens on a host."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def url_here(host: str, port: int) -> str:
    """Where this machine finds what listens on a host, which may stand for all of them."""
    return url_of(_EVERYWHERE.get(host, host), port)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a host name or address."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _is_usable_key(key: str) -> bool:
    return bool(key) and all("!" <= character <= "~" for character in key)
