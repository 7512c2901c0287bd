"""What `flashdraft serve` says: where it is, and in a terminal what can be done with it there."""

from __future__ import annotations

import socket

from flashdraft.cli.clients import DEFAULT_URL
from flashdraft.cli.display import Screen
from flashdraft.errors import printable
from flashdraft.server.settings import ServerSettings, url_here, url_of


def address_of(listener: socket.socket) -> str:
    """What a socket listens on, as a URL."""
    host, port = listener.getsockname()[:2]
    return url_of(host, port)


def is_log_in_words(settings: ServerSettings, screen: Screen) -> bool:
    """Whether requests are logged for people: stdout, where the log goes, has somebody reading."""
    if settings.log_format == "auto":
        return screen.out_is_terminal
    return settings.log_format == "text"


def say_ready(model: str, address: str, settings: ServerSettings, screen: Screen) -> None:
    """The server answers; in a terminal also where its page is, and how clients find it."""
    screen.note(f"Serving {printable(model)} on {address}")
    if not screen.err_is_terminal:
        return
    host, _, port = address.removeprefix("http://").rpartition(":")
    url = url_here(host.strip("[]"), int(port))
    connect = "flashdraft connect"
    connect += "" if url == DEFAULT_URL else f" --url {url}"
    connect += "" if settings.api_key is None else " --api-key KEY"
    screen.note(f"  chat in a browser: {url}/\n  set up a client:   {connect}\n  end it: Ctrl-C")
