"""Pictures from data: URLs and from hosts that are allowed; everything else is refused in words."""

from __future__ import annotations

import re
import socket
import threading
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from flashdraft.errors import RequestError
from flashdraft.media import sources
from flashdraft.media.limits import MAX_BYTES
from flashdraft.media.sources import MediaFetcher, is_global, read_data_url

PUBLIC = "93.184.215.14"
HOST = "pictures.example.com"
URL = f"http://{HOST}/a.png"
PNG = b"\x89PNG\r\n\x1a\n" + bytes(1000)


# -- data: URLs ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "head",
    ["data:image/png;base64,", "DATA:image/Jpeg;BASE64,", "data:image/svg+xml;name=a.b;base64,"],
)
def test_a_data_url_is_its_bytes(head: str) -> None:
    for count in range(5):
        data = bytes(range(250, 250 + count))
        assert read_data_url(head + b64encode(data).decode()) == data


@pytest.mark.parametrize(
    "url",
    [
        "",
        "data:",
        "data:image/png;base64",
        "data:image/png,AAAA",
        "data:text/plain;base64,AAAA",
        "data:;base64,AAAA",
        "data:image/png;base64;base64 ,AAAA",
        " data:image/png;base64,AAAA",
        "data:image/" + "p" * 200 + ";base64,AAAA",
        "https://example.com/a.png",
        "file:///etc/passwd",
        "javascript:data:image/png;base64,AAAA",
        "x" * 100_000,
    ],
)
def test_what_is_no_data_url(url: str) -> None:
    with pytest.raises(RequestError) as raised:
        read_data_url(url)
    assert "it must be 'data:image/png;base64,' and the file in base64" in str(raised.value)
    assert str(raised.value).endswith("Send the picture itself.") and len(str(raised.value)) < 250


@pytest.mark.parametrize(
    "text",
    [
        "A",
        "AA",
        "AAA",
        "AAAA=",
        "AAAA====",
        "AA=",
        "A===",
        "AA==AA==",
        "AA\nAA",
        "AA AA",
        "AA-_",
        "AA%2B",
        "AAAé",
        "=AAA",
        "é",
    ],
)
def test_base64_is_read_strictly(text: str) -> None:
    with pytest.raises(RequestError) as raised:
        read_data_url(f"data:image/png;base64,{text}")
    assert str(raised.value).startswith("A picture's data: URL is no base64: ")
    assert "Encode the whole file in standard base64" in str(raised.value)


def test_a_long_one_is_refused_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "A" * (4 * (MAX_BYTES // 3 + 1) + 4)
    monkeypatch.setattr(sources, "binascii", None)
    with pytest.raises(RequestError, match="at most 40 MiB are taken. Make it smaller"):
        read_data_url(f"data:image/png;base64,{text}")


# -- hosts that stand in for the internet -------------------------------------------------------


class Server:
    """One that says what it is told to each who comes, from a thread of its own."""

    def __init__(self, serve: Callable[[socket.socket], None]) -> None:
        self.asked = list[bytes]()
        self.dialled = list[tuple[str, int]]()
        self._serve = serve
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection, suppress(OSError):
                connection.settimeout(10)
                self.asked.append(connection.recv(1 << 16))
                self._serve(connection)

    def connect(self, address: str, port: int, max_s: float) -> socket.socket:
        """To here, whatever the address is."""
        self.dialled.append((address, port))
        return socket.create_connection(self._listener.getsockname(), max_s)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(15)
        assert not self._thread.is_alive()


@contextmanager
def serving(serve: Callable[[socket.socket], None] | bytes) -> Iterator[Server]:
    server = Server(serve if callable(serve) else lambda connection: connection.sendall(serve))
    try:
        yield server
    finally:
        server.close()


def answer(body: bytes, status: str = "200 OK", *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", *(headers or (f"Content-Length: {len(body)}",)), "", ""]
    return "\r\n".join(lines).encode() + body


def fetcher(server: Server | None = None, *domains: str, **settings: Any) -> MediaFetcher:
    def connect(*_: object) -> socket.socket:
        raise AssertionError("nothing may be dialled")

    settings.setdefault("resolve", lambda host, port: [PUBLIC])
    settings.setdefault("connect", connect if server is None else server.connect)
    return MediaFetcher(domains or (HOST,), **settings)


def refusal(made: MediaFetcher, url: str = URL) -> str:
    before = threading.active_count()
    with pytest.raises(RequestError) as raised:
        made.fetch(url)
    assert threading.active_count() <= before
    return str(raised.value)


# -- what is fetched -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    [
        answer(PNG),
        answer(PNG, "200 OK", "Connection: close"),
        answer(b"3e8\r\n" + PNG[:1000] + b"\r\n8\r\n" + PNG[1000:] + b"\r\n0\r\n\r\n", "200 OK",
               "Transfer-Encoding: chunked"),
        answer(PNG, "200 OK", "Content-Type: text/html", f"Content-Length: {len(PNG)}"),
    ],
)  # fmt: skip
def test_a_picture_is_fetched(content: bytes) -> None:
    with serving(content) as server:
        assert fetcher(server).fetch(f"http://{HOST}/a%20b.png?c=d&e#f") == PNG
    lines = server.asked[0].decode().split("\r\n")
    assert lines[0] == "GET /a%20b.png?c=d&e HTTP/1.1"
    assert {f"Host: {HOST}", "Accept-Encoding: identity", "Connection: close"} <= set(lines)
    assert server.dialled == [(PUBLIC, 80)]


def test_what_the_environment_says_of_proxies_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    with serving(answer(PNG)) as server:
        assert fetcher(server).fetch(URL) == PNG


def test_a_name_is_resolved_once_and_its_address_dialled() -> None:
    asked = list[tuple[str, int]]()

    def resolve(host: str, port: int) -> list[str]:
        asked.append((host, port))
        return [PUBLIC] if len(asked) == 1 else ["127.0.0.1"]  # as one does that rebinds

    with serving(answer(PNG)) as server:
        assert fetcher(server, resolve=resolve).fetch(URL) == PNG
    assert asked == [(HOST, 80)] and server.dialled == [(PUBLIC, 80)]


def test_the_next_address_is_dialled_where_one_is_deaf() -> None:
    with serving(answer(PNG)) as server:

        def connect(address: str, port: int, max_s: float) -> socket.socket:
            if address == "1.1.1.1":
                raise ConnectionRefusedError("refused")
            return server.connect(address, port, max_s)

        made = fetcher(server, resolve=lambda *_: ["1.1.1.1", PUBLIC], connect=connect)
        assert made.fetch(URL) == PNG


def test_tls_asks_for_the_hosts_name_and_its_proof() -> None:
    """The greeting names the host; who answers in plain text is not believed."""
    with serving(answer(PNG)) as server:
        why = refusal(fetcher(server), f"https://{HOST}/a.png")
    assert HOST.encode() in server.asked[0] and server.asked[0][0] == 22  # a handshake
    assert server.dialled == [(PUBLIC, 443)]
    assert "SSL" in why and why.endswith("Check the URL, or send the picture itself.")
    assert sources.ssl.create_default_context().check_hostname


# -- what is not fetched ---------------------------------------------------------------------------


def test_nothing_is_fetched_by_default() -> None:
    why = refusal(MediaFetcher())
    assert "nothing is fetched from other machines here unless their domains are allowed" in why
    assert why.endswith("Send the picture itself, as 'data:image/png;base64,…'.")


@pytest.mark.parametrize(
    ("domains", "url", "is_allowed"),
    [
        (["example.com"], "http://example.com/", True),
        (["Example.COM"], "http://EXAMPLE.com:80/", True),
        (["example.com"], "http://example.com:443/", True),
        (["example.com"], "http://a.example.com/", False),
        (["example.com"], "http://example.com.evil.net/", False),
        (["example.com"], "http://evil-example.com/", False),
        (["example.com"], "http://example.com./", False),
        (["*.example.com"], "http://a.b.example.com/", True),
        (["*.example.com"], "http://example.com/", False),
        (["*.example.com"], "http://evilexample.com/", False),
        (["example.com"], "http://example.com:8080/", False),
        (["example.com"], "http://example.com:0/", False),
        (["example.com"], "http://example.com:22/", False),
        (["example.com:8080"], "http://example.com:8080/", True),
        (["example.com:8080"], "http://example.com/", False),
        (["example.com"], "http://evil.net/?example.com", False),
        (["example.com"], "http://evil.net#@example.com", False),
        (["example.com"], "http://2130706433/", False),
        (["example.com"], "http://0x7f.1/", False),
        (["example.com"], "http://[::1]/", False),
    ],
)
def test_only_allowed_hosts_are_asked(domains: list[str], url: str, is_allowed: bool) -> None:
    with serving(answer(PNG)) as server:
        made = fetcher(server, *domains)
        if is_allowed:
            assert made.fetch(url) == PNG
        else:
            assert "is not" in (why := refusal(made, url))
            assert "is not among the allowed domains. Send the picture" in why or "@" in url
            assert server.dialled == []


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("ftp://pictures.example.com/a", "only http and https are"),
        ("file:///etc/passwd", "only http and https are"),
        ("/etc/passwd", "only http and https are"),
        ("//pictures.example.com/a", "only http and https are"),
        ("gopher://pictures.example.com/", "only http and https are"),
        ("data:image/png;base64,AAAA", "only http and https are"),
        ("http://me:secret@pictures.example.com/", "a user's name or a password"),
        ("http://pictures.example.com@evil.net/", "a user's name or a password"),
        ("http://@pictures.example.com/", "a user's name or a password"),
        ("http://pictures.example.com:x/", "[Pp]ort"),
        ("http://pictures.example.com:99999/", "[Pp]ort"),
        ("http:///a.png", "it names no host"),
        ("http://[::1/", "Invalid IPv6"),
        ("http://pictures.example.com\\@evil.net/", "spaces, backslashes or"),
        ("http://pictures.example.com/ HTTP/1.1\r\nHost: evil.net", "spaces, backslashes or"),
        ("http://pictures.exa\tmple.com/", "spaces, backslashes or"),
        ("http://pictures.example.com/é", "characters beyond ASCII"),
        ("http://ⓟictures.example.com/", "characters beyond ASCII"),
        ("http://pictures.example.com/" + "a" * 9000, "it has 90.. characters; at most 8192"),
    ],
)
def test_urls_that_are_not_read(url: str, why: str) -> None:
    with pytest.raises(RequestError, match=f"is not fetched: .*{why}.*Write https://host/path"):
        fetcher().fetch(url)


NOT_PUBLIC = [
    *("127.0.0.1", "127.9.9.9", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254"),
    *("0.0.0.0", "0.1.2.3", "100.64.0.1", "192.0.0.8", "192.0.0.200", "192.0.2.1", "198.18.0.1"),
    *("192.88.99.1", "198.51.100.1", "203.0.113.9", "224.0.0.1", "224.0.1.1", "239.1.1.1"),
    *("240.0.0.1", "255.255.255.255", "::1", "::", "::ffff:10.0.0.1", "::ffff:93.184.215.14"),
    *("::7f00:1", "64:ff9b::a00:1", "64:ff9b::5db8:d70e", "64:ff9b:1::1", "2002:a00:1::"),
    *("2001::1", "2001:db8::1", "3fff::1", "fe80::1", "fe80::1%eth0", "fc00::1", "fd00:ec2::254"),
    *("fec0::1", "ff02::1", "ff0e::1", "100::1", "localhost", "0177.0.0.1", "2130706433", ""),
]


@pytest.mark.parametrize("address", NOT_PUBLIC)
def test_addresses_that_are_not_public(address: str) -> None:
    for found in ([address], [PUBLIC, address], [address, PUBLIC]):
        why = refusal(fetcher(resolve=lambda *_, found=found: found))
        assert "its host has an address that is not one of the public internet. Send the" in why


@pytest.mark.parametrize("address", [PUBLIC, "8.8.8.8", "2606:4700::1111", "2a00:1450:4001::e"])
def test_addresses_that_are_public(address: str) -> None:
    assert is_global(address)


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "2130706433", "0x7f000001", "0177.0.0.1", "127.1", "localhost", "[::1]"]
)
def test_the_systems_resolver_is_not_believed_either(host: str) -> None:
    """Hosts that are allowed by name, and are this machine in one of its spellings."""
    why = refusal(MediaFetcher([host]), f"http://{host}/")
    assert "not one of the public internet" in why or "cannot be resolved" in why


@pytest.mark.parametrize(
    "entry", ["", "*", "*.", "https://example.com", "a/b", "a*.com", "a.com:0", "a.com:99999", "é"]
)
def test_domains_that_are_none(entry: str) -> None:
    with pytest.raises(RequestError, match="must be a host's name, like 'example.com'"):
        MediaFetcher([entry])


def test_names_without_an_address() -> None:
    def resolve(host: str, port: int) -> list[str]:
        raise socket.gaierror("unknown")

    assert "cannot be resolved. Check the URL" in refusal(fetcher(resolve=resolve))
    assert "has no address" in refusal(fetcher(resolve=lambda *_: []))


# -- answers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (
            answer(b"", "302 Found", "Location: http://169.254.169.254/", "Content-Length: 0"),
            r"it leads elsewhere \(status 302\), and is not followed. Give the URL where",
        ),
        (answer(b"", "404 Not Found"), "answers with status 404. Check the URL"),
        (answer(PNG, "206 Partial Content"), "answers with status 206"),
        (answer(PNG, "200 OK", "Content-Encoding: gzip"), "it comes compressed"),
        (answer(b"", "200 OK", "Content-Length: 5000"), "more than 0.00390625 MiB, the most that"),
        (answer(bytes(5000), "200 OK", "Connection: close"), "more than 0.00390625 MiB"),
        (answer(PNG, "200 OK", "Content-Length: 2000"), "IncompleteRead.*Check the URL"),
        (answer(b"800\r\nabc", "200 OK", "Transfer-Encoding: chunked"), "IncompleteRead"),
        (b"SSH-2.0-OpenSSH_9\r\n", "SSH-2.0"),
        (b"", "closed connection without response"),
        (b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 1000 + b"\r\n", "more than 100 headers"),
        (b"HTTP/1.1 200 OK\r\na: " + b"b" * 100_000, "more than 65536 bytes"),
    ],
)
def test_answers_that_are_no_picture(content: bytes, why: str) -> None:
    with serving(content) as server:
        found = refusal(fetcher(server, max_bytes=4096))
        assert re.search(why, found), found
        assert found.startswith(f"A picture cannot be fetched from '{URL}': ")
    assert len(server.asked) == 1  # it is not asked again, nor elsewhere


def endless(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
    while True:
        connection.sendall(bytes(1 << 16))


def test_an_endless_body_ends_at_the_limit() -> None:
    with serving(endless) as server:
        assert "more than 2 MiB" in refusal(fetcher(server, max_bytes=2 << 20))


def dripping(begin: bytes, drop: bytes) -> Callable[[socket.socket], None]:
    def serve(connection: socket.socket) -> None:
        connection.sendall(begin)
        while True:
            connection.sendall(drop)
            time.sleep(0.1)

    return serve


@pytest.mark.parametrize("scheme", ["http", "https"])
@pytest.mark.parametrize(
    "serve",
    [
        dripping(b"HTTP/1.1 200 OK\r\n\r\n", b"x"),
        dripping(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n", b"x"),
        dripping(b"HTTP/1.1 200 OK\r\na: ", b"b"),
        dripping(b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
        dripping(b"\x16\x03\x03\x3f\xff", b"\x02"),  # a long record of a handshake
        lambda connection: time.sleep(3),
    ],
)
def test_time_is_limited_in_all(serve: Callable[[socket.socket], None], scheme: str) -> None:
    with serving(serve) as server:
        begin = time.monotonic()
        why = refusal(fetcher(server, max_s=0.6), f"{scheme}://{HOST}/")
        assert time.monotonic() - begin < 3
        assert "longer than 0.6 s in all. Send the picture itself." in why or scheme == "https"


def test_a_slow_resolver_is_not_waited_for() -> None:
    def resolve(host: str, port: int) -> list[str]:
        time.sleep(1.5)
        return [PUBLIC]

    begin = time.monotonic()
    with pytest.raises(RequestError, match="longer than 0.3 s in all"):
        fetcher(resolve=resolve, max_s=0.3).fetch(URL)
    assert time.monotonic() - begin < 1.2


def test_no_connection_stays_open() -> None:
    opened = list[socket.socket]()
    with serving(answer(PNG)) as server:

        def connect(*arguments: Any) -> socket.socket:
            opened.append(server.connect(*arguments))
            return opened[-1]

        made = fetcher(server, connect=connect)
        made.fetch(URL)
        refusal(fetcher(server, connect=connect, max_bytes=10))
        refusal(fetcher(server, connect=connect), f"https://{HOST}/")
    assert [one.fileno() for one in opened] == [-1, -1, -1]
