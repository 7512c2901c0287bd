"""Where a file's bytes come from on behalf of others: data: URLs, and hosts that are allowed.

Who sends a URL chooses what this machine asks for, so hosts are named by whoever runs it, their
addresses are checked once and then dialled, and nothing leads anywhere else.
"""

from __future__ import annotations

import binascii
import contextlib
import http.client
import ipaddress
import queue
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple
from urllib.parse import urlsplit

from flashdraft.core import VERSION
from flashdraft.errors import RequestError, quoted, shortened
from flashdraft.media.kinds import PICTURE, Kind
from flashdraft.media.limits import MAX_BYTES, MIB

_PARAMETERS = r"(;[\w.+-]+=[^;,]+)*;base64"  # a film's may name its codecs
_MAX_HEAD = 200  # characters before the comma
_MAX_TEXT = (MAX_BYTES + 2) // 3 * 4
_MAX_URL = 8192
_PORTS = {"http": 80, "https": 443}
_MAX_DIALLED = 3  # addresses of one host
_PIECE = 1 << 16
_ENTRY = re.compile(
    r"(\*\.)?([a-z0-9_-]+(?:\.[a-z0-9_-]+)*|\[[0-9a-f:.]+\])(:[0-9]{1,5})?", re.ASCII
)
# Of what Python's ipaddress calls global: ways into other networks, and networks of protocols
_SPECIAL_V4 = tuple(map(ipaddress.IPv4Network, ("192.0.0.0/24", "192.88.99.0/24")))
_SPECIAL_V6 = tuple(
    map(ipaddress.IPv6Network, ("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20"))
)
_GLOBAL_V6 = ipaddress.IPv6Network("2000::/3")  # without the mapped and the translated

Resolve = Callable[[str, int], Sequence[str]]
Connect = Callable[[str, int, float], socket.socket]


def read_data_url(url: str, kind: Kind = PICTURE) -> bytes:
    """The bytes of `data:image/…;base64,…`. What it says of their format is not believed."""
    head, comma, text = url[: _MAX_HEAD + 1].partition(",")
    wanted = f"data:{kind.media_types}{_PARAMETERS}"
    if not comma or not re.fullmatch(wanted, head, re.ASCII | re.IGNORECASE):
        raise RequestError(
            f"A {kind.noun}'s URL is {_brief(url)}; it must be '{kind.example}' and the file in "
            f"base64 ({kind.formats}). Send the {kind.noun} itself."
        )
    if len(url) - len(head) - 1 > _MAX_TEXT:
        raise RequestError(
            f"A {kind.noun}'s data: URL has {len(url)} characters; at most {MAX_BYTES // MIB} MiB "
            f"are taken. {kind.smaller}"
        )
    text = url[len(head) + 1 :]
    try:
        if len(text) % 4 or text.endswith("==="):  # which the library does not mind
            raise ValueError("its length or its padding is wrong")
        return binascii.a2b_base64(text.encode("ascii"), strict_mode=True)
    except ValueError as error:
        what = "it has characters beyond ASCII" if isinstance(error, UnicodeError) else str(error)
        raise RequestError(
            f"A {kind.noun}'s data: URL is no base64: {shortened(what)}. Encode the whole file in "
            "standard base64, in one line, with its padding."
        ) from None


def _brief(url: str) -> str:
    return quoted(url if len(url) <= 60 else url[:60] + "…")


class _Entry(NamedTuple):
    """One that is allowed; "*.name" stands for all names below it."""

    name: str
    is_suffix: bool
    port: int | None  # None = those of http and https

    def allows(self, host: str, port: int) -> bool:
        is_named = host.endswith(f".{self.name}") if self.is_suffix else host == self.name
        return is_named and (port in _PORTS.values() if self.port is None else port == self.port)


class _Place(NamedTuple):
    """What a URL means, read once and by one reader, and what is wanted there."""

    kind: Kind
    url: str
    scheme: str
    host: str
    port: int
    target: str  # path and query


class MediaFetcher:
    """Fetches files by http and https from allowed hosts; by default there are none.

    `allowed_domains` are names, "example.com" or "*.example.com" (what is below it), with a port
    where it is not 80 or 443. `resolve` and `connect` stand for the system's.
    """

    def __init__(
        self,
        allowed_domains: Sequence[str] = (),
        *,
        max_s: float = 10.0,
        max_bytes: int = MAX_BYTES,
        resolve: Resolve | None = None,
        connect: Connect | None = None,
    ) -> None:
        self._entries = [_entry(text) for text in allowed_domains]
        self._max_s = max_s
        self._max_bytes = max_bytes
        self._resolve = resolve or _resolved
        self._connect = connect or _connected

    def fetch(self, url: str, kind: Kind = PICTURE) -> bytes:
        """The bytes at a URL, within all limits together. Raises RequestError."""
        place = self._place(url, kind)
        deadline = time.monotonic() + self._max_s
        try:
            addresses = self._addresses(place, deadline)
            with _Line(self._dial(place, addresses, deadline), deadline) as line:
                data = self._ask(place, line)
        except TimeoutError:
            raise self._error(
                place,
                f"it took longer than {self._max_s:g} s in all",
                f"Send the {kind.noun} itself",
            ) from None
        except (OSError, http.client.HTTPException) as error:
            what = shortened(str(error) or type(error).__name__)
            raise self._error(
                place, what, f"Check the URL, or send the {kind.noun} itself"
            ) from None
        return data

    # -- before anything is sent -----------------------------------------------------------------

    def _place(self, url: str, kind: Kind) -> _Place:
        if not self._entries:
            raise RequestError(
                f"A {kind.noun}'s URL is {_brief(url)}; nothing is fetched from other machines "
                f"here unless their domains are allowed. Send the {kind.noun} itself, as "
                f"'{kind.example}…'."
            )
        try:
            place = _read_url(url, kind)
        except ValueError as error:
            raise RequestError(
                f"A {kind.noun}'s URL is {_brief(url)}, which is not fetched: {error}. Write "
                f"https://host/path, or send the {kind.noun} itself."
            ) from None
        if not any(entry.allows(place.host, place.port) for entry in self._entries):
            raise self._error(
                place,
                f"{place.host}, port {place.port}, is not among the allowed domains",
                f"Send the {kind.noun} itself, or have the domain allowed",
            )
        return place

    def _addresses(self, place: _Place, deadline: float) -> list[str]:
        found = _in_time(lambda: self._resolve(place.host, place.port), deadline)
        if not found:
            raise OSError("its host has no address")
        if not all(map(is_global, found)):
            raise self._error(
                place,
                "its host has an address that is not one of the public internet",
                f"Send the {place.kind.noun} itself",
            )
        return list(dict.fromkeys(found))[:_MAX_DIALLED]

    def _dial(self, place: _Place, addresses: Sequence[str], deadline: float) -> socket.socket:
        failure: OSError | None = None
        for address in addresses:
            try:
                return self._connect(address, place.port, _left(deadline))
            except OSError as error:
                _left(deadline)
                failure = error
        assert failure is not None, "there is an address"
        raise failure

    def _error(self, place: _Place, what: str, remedy: str) -> RequestError:
        return RequestError(
            f"A {place.kind.noun} cannot be fetched from {_brief(place.url)}: {what}. {remedy}."
        )

    # -- the question and the answer ------------------------------------------------------------

    def _ask(self, place: _Place, line: _Line) -> bytes:
        if place.scheme == "https":
            line.encrypt(place.host)
        asked = http.client.HTTPConnection(place.host, place.port)
        if (place.scheme, place.port) == ("https", _PORTS["https"]):
            asked.default_port = place.port  # it is not named then
        asked.sock = line.socket
        headers = {
            "Accept": place.kind.accepted,
            "Accept-Encoding": "identity",
            "Connection": "close",
            "User-Agent": f"flashdraft/{VERSION}",
        }
        with contextlib.closing(asked):
            try:
                asked.request("GET", place.target, headers=headers)
                with asked.getresponse() as answer:
                    self._check_answer(place, answer)
                    return self._read(place, answer)
            finally:
                line.check()  # what a line does that was cut looks like many things

    def _check_answer(self, place: _Place, answer: http.client.HTTPResponse) -> None:
        if 300 <= answer.status < 400:
            raise self._error(
                place,
                f"it leads elsewhere (status {answer.status}), and is not followed",
                f"Give the URL where the {place.kind.noun} is",
            )
        if answer.status != 200:
            raise self._error(
                place, f"its host answers with status {answer.status}", "Check the URL"
            )
        if answer.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise self._error(place, "it comes compressed", "Send the picture itself")
        if answer.length is not None and answer.length > self._max_bytes:
            raise self._too_long(place)

    def _read(self, place: _Place, answer: http.client.HTTPResponse) -> bytes:
        announced, data = answer.length, bytearray()
        while piece := answer.read(_PIECE):
            data += piece
            if len(data) > self._max_bytes:
                raise self._too_long(place)
        if announced is not None and len(data) != announced:
            raise http.client.IncompleteRead(b"", announced - len(data))
        return bytes(data)

    def _too_long(self, place: _Place) -> RequestError:
        return self._error(
            place,
            f"it has more than {self._max_bytes / MIB:g} MiB, the most that is taken",
            place.kind.smaller.rstrip("."),
        )


class _Line:
    """A connection that is cut at its deadline, however slowly it still says something."""

    def __init__(self, connected: socket.socket, deadline: float) -> None:
        self.socket = connected
        self._end = connected.dup()  # of the same connection; encryption takes the other one over
        self._is_late = False
        self._timer = threading.Timer(max(0.0, deadline - time.monotonic()), self._cut)
        self._timer.daemon = True

    def __enter__(self) -> _Line:
        self.socket.settimeout(None)  # the timer's is the one that counts
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        self._timer.join()  # no descriptor is closed under its hands
        self.socket.close()
        self._end.close()

    def _cut(self) -> None:
        self._is_late = True
        with contextlib.suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)

    def check(self) -> None:
        """Raise TimeoutError where it has been cut."""
        if self._is_late:
            raise TimeoutError

    def encrypt(self, host: str) -> None:
        """Speak TLS with a host that proves its name."""
        try:
            context = ssl.create_default_context()
            self.socket = context.wrap_socket(self.socket, server_hostname=host)
        finally:
            self.check()


def is_global(address: str) -> bool:
    """Whether an address is one of the public internet, in its own form."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return False
    if not found.is_global or found.is_multicast or found.is_reserved:
        return False
    if isinstance(found, ipaddress.IPv4Address):
        return not any(found in network for network in _SPECIAL_V4)
    return found in _GLOBAL_V6 and not any(found in network for network in _SPECIAL_V6)


def _entry(text: str) -> _Entry:
    match = _ENTRY.fullmatch(text.lower())
    if match is None or int((match[3] or ":1")[1:]) not in range(1, 65536):
        raise RequestError(
            f"An allowed domain is {quoted(text)}; it must be a host's name, like 'example.com', "
            "'*.example.com' for all names below it, or 'example.com:8080' with a port."
        )
    return _Entry(match[2].strip("[]"), bool(match[1]), int(match[3][1:]) if match[3] else None)


def _read_url(url: str, kind: Kind) -> _Place:
    """Raises ValueError, with the end of a sentence."""
    if len(url) > _MAX_URL:
        raise ValueError(f"it has {len(url)} characters; at most {_MAX_URL} are taken")
    if not all("!" <= letter <= "~" and letter != "\\" for letter in url):
        raise ValueError("it has spaces, backslashes or characters beyond ASCII")
    parts = urlsplit(url)
    if parts.scheme not in _PORTS:
        raise ValueError("only http and https are")
    if "@" in parts.netloc:
        raise ValueError("it has a user's name or a password in it")
    host, port = parts.hostname, parts.port  # a port that is no number raises
    if not host:
        raise ValueError("it names no host")
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return _Place(
        kind, url, parts.scheme, host, _PORTS[parts.scheme] if port is None else port, target
    )


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _in_time(find: Callable[[], Sequence[str]], deadline: float) -> Sequence[str]:
    """What is found before the deadline; the system's resolver knows none."""
    results: queue.SimpleQueue[Sequence[str] | OSError | UnicodeError] = queue.SimpleQueue()

    def run() -> None:
        try:
            results.put(find())
        except (OSError, UnicodeError) as error:
            results.put(error)

    threading.Thread(target=run, daemon=True).start()
    try:
        found = results.get(timeout=_left(deadline))
    except queue.Empty:
        raise TimeoutError from None
    if isinstance(found, OSError | UnicodeError):
        raise OSError("its host's name cannot be resolved")
    return found


def _resolved(host: str, port: int) -> list[str]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]


def _connected(address: str, port: int, max_s: float) -> socket.socket:
    return socket.create_connection((address, port), max_s)  # no name: nothing is resolved again
