"""One question to an OpenAI endpoint, streamed: sent, waited for, read, and timed.

Plain sockets of the standard library: nothing to install, and nothing between the clock and the
wire. Answers that fail say why; an endpoint that is gone is told from one that refuses.
"""

from __future__ import annotations

import http.client
import json
import ssl
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from flashdraft.bench.results import DRAFTS, Reply
from flashdraft.errors import EngineLostError, FlashdraftError, RequestError

TIMEOUT_S = 300.0  # without a byte
ALIVE_S = 10.0  # for a look whether the server is there
MAX_WAIT_S = 60.0  # that a server may ask for before the next attempt
MAX_ATTEMPTS = 10
MAX_COUNT = 10_000_000  # tokens or steps of one answer
_BUSY = (429, 503)
_NOT_ANSWERED = (OSError, http.client.HTTPException)


class AnswerError(FlashdraftError):
    """This question got no answer; the next one may."""


class BusyError(FlashdraftError):
    """The server asks to come back later."""

    def __init__(self, message: str, wait_s: float | None) -> None:
        super().__init__(message)
        self.wait_s = wait_s


class StoppedError(FlashdraftError):
    """The run was stopped; nobody waits for this answer."""


@dataclass(frozen=True)
class Endpoint:
    """Where a server is, and how to get in."""

    url: str  # without /v1
    api_key: str | None = None
    timeout_s: float = TIMEOUT_S

    @classmethod
    def parse(cls, url: str, api_key: str | None = None) -> Endpoint:
        """An endpoint from what a user types: with or without /v1 at its end."""
        text = url if "://" in url else f"http://{url}"
        try:
            parts = urlsplit(text)
            is_good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:  # a port that is no number
            is_good = False
        if not is_good:
            raise RequestError(f"The URL is {url!r}; expected one like http://127.0.0.1:8000.")
        return cls(text.rstrip("/").removesuffix("/v1").rstrip("/"), api_key)

    def request(
        self, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """Send a request; the connection must be closed by who reads the response."""
        parts = urlsplit(self.url)
        assert parts.hostname is not None
        connection: http.client.HTTPConnection
        if parts.scheme == "https":
            context = ssl.create_default_context()
            connection = http.client.HTTPSConnection(
                parts.hostname, parts.port, timeout=timeout_s, context=context
            )
        else:
            connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=timeout_s)
        headers = {"Accept": "text/event-stream, application/json, */*"}
        if self.api_key is not None:
            headers["Authorization"] = f"Bearer {self.api_key}"
        payload = None
        if body is not None:
            payload = json.dumps(body).encode()
            headers["Content-Type"] = "application/json"
        try:
            connection.request(method, parts.path + path, payload, headers)
            return connection, connection.getresponse()
        except BaseException:
            connection.close()
            raise

    def get(self, path: str) -> tuple[int, str]:
        """Status and text of a page."""
        try:
            connection, response = self.request("GET", path, None, ALIVE_S)
            try:
                return response.status, response.read().decode("utf-8", "replace")
            finally:
                connection.close()
        except _NOT_ANSWERED as error:
            raise EngineLostError(
                f"{self.url} cannot be reached ({_reason(error)}); is the server running there?"
            ) from None

    def is_alive(self) -> bool:
        """Whether anything answers there."""
        try:
            return self.get("/v1/models")[0] < 500
        except EngineLostError:
            return False

    def ask(self, body: Mapping[str, Any], stop: threading.Event) -> StreamedAnswer:
        """One streamed chat completion, read to its end."""
        answer = StreamedAnswer()
        try:
            connection, response = self.request(
                "POST", "/v1/chat/completions", body, self.timeout_s
            )
            try:
                if response.status != 200:
                    raise _refusal(response)
                for event in _events(response):
                    if stop.is_set():
                        raise StoppedError("The run was stopped.")
                    answer.add(event)
            finally:
                connection.close()
        except TimeoutError:
            raise AnswerError(f"nothing came for {self.timeout_s:g} s") from None
        except _NOT_ANSWERED as error:
            raise self._lost(f"the connection broke ({_reason(error)})") from None
        if not answer.is_complete:
            raise self._lost("the stream stopped before its end")
        return answer

    def _lost(self, what: str) -> FlashdraftError:
        """The answer failed: alone, or because the server is gone?"""
        if self.is_alive():
            return AnswerError(what)
        return EngineLostError(f"The server at {self.url} is gone: {what}.")


@dataclass
class StreamedAnswer:
    """What has been read of a streamed answer."""

    begun_at: float = field(default_factory=time.perf_counter)
    content: list[str] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    chunks: list[tuple[float, int, int | None]] = field(default_factory=list)
    usage: Mapping[str, Any] = field(default_factory=dict)
    statistics: Mapping[str, Any] = field(default_factory=dict)  # flashdraft's own field
    is_complete: bool = False

    def add(self, event: Mapping[str, Any] | None) -> None:
        """Take an event of the stream; None is its mark of the end."""
        now = time.perf_counter()
        if event is None:
            self.is_complete = True
            return
        if event.get("error"):
            raise AnswerError(f"the stream failed: {_message(event)}")
        usage = _object("usage", event.get("usage"))
        self.usage = usage or self.usage
        count = _count(usage, "completion_tokens")
        choices = event.get("choices") or []
        if not isinstance(choices, list):
            raise AnswerError(_unreadable("choices", choices, "list"))
        length = 0
        for choice in choices:
            choice = _object("a choice", choice)
            delta = _object("delta", choice.get("delta"))
            thought = _text(delta, "reasoning_content") or _text(delta, "reasoning")
            content = _text(delta, "content")
            self.text += [thought, content]
            self.content.append(content)
            length += len(thought) + len(content)
            told = _object("flashdraft", event.get("flashdraft") or choice.get("flashdraft"))
            self.statistics = told if "steps" in told else self.statistics
        before = self.chunks[-1][2] or 0 if self.chunks else 0
        has_tokens = bool(choices) and count is not None and count > before
        if length or has_tokens:  # tokens may come before their text, which is held back
            self.chunks.append((now, length, count))

    def reply(self) -> Reply:
        """The finished answer; without text and tokens it is none."""
        tokens = _count(self.usage, "completion_tokens")
        if not self.chunks or tokens is None:
            missing = "a usage at its end" if self.chunks else "any text"
            raise AnswerError(f"the stream had not {missing}")
        stats = self.statistics
        histogram = _histogram(_object("histogram", stats.get("histogram")))
        details = _object("prompt_tokens_details", self.usage.get("prompt_tokens_details"))
        return Reply(
            text="".join(self.text),
            content="".join(self.content),
            seconds=self.chunks[-1][0] - self.begun_at,
            ttft_s=self.chunks[0][0] - self.begun_at,
            prompt_tokens=_count(self.usage, "prompt_tokens") or 0,
            output_tokens=tokens,
            token_gaps=self._gaps(tokens),
            cached_tokens=_count(details, "cached_tokens") or 0,
            steps=_count(stats, "steps"),
            histogram=histogram if stats else None,
            drafts={name: _count(stats, name) or 0 for name in DRAFTS},
        )

    def _gaps(self, num_tokens: int) -> list[float]:
        """Seconds before every later token: a chunk's shared by its tokens.

        Where the server does not count along, a chunk's tokens are taken to be in proportion to
        its characters.
        """
        gaps: list[float] = []
        rest = sum(length for _, length, _ in self.chunks[1:])
        for earlier, later in zip(self.chunks, self.chunks[1:], strict=False):
            seconds = later[0] - earlier[0]
            if earlier[2] is not None and later[2] is not None:
                count = later[2] - earlier[2]
            else:
                share = later[1] / rest if rest else 0.0
                count = max(1, round(share * (num_tokens - 1)))
            gaps += [seconds / count] * count if count > 0 else []
        return gaps


# -- what a server says, of whatever form ---------------------------------------------------------


def _unreadable(name: str, value: Any, wanted: str) -> str:
    return f"the answer cannot be read: {name} is {repr(value)[:80]}, no {wanted}"


def _object(name: str, value: Any) -> Mapping[str, Any]:
    """An object of the stream; none where it is null or absent."""
    if value is not None and not isinstance(value, Mapping):
        raise AnswerError(_unreadable(name, value, "object"))
    return value or {}


def _text(holder: Mapping[str, Any], name: str) -> str:
    value = holder.get(name)
    if value is not None and not isinstance(value, str):
        raise AnswerError(_unreadable(name, value, "text"))
    return value or ""


def _count(holder: Mapping[str, Any], name: str) -> int | None:
    value = holder.get(name)
    if value is not None and not _is_count(value):
        raise AnswerError(_unreadable(name, value, f"count from 0 to {MAX_COUNT}"))
    return value


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_COUNT


def _histogram(told: Mapping[str, Any]) -> dict[int, int]:
    """Decode steps by tokens committed, as flashdraft tells them."""
    if not all(n.isdecimal() and len(n) < 5 and _is_count(count) for n, count in told.items()):
        raise AnswerError(_unreadable("histogram", told, "object of counts by length"))
    return {int(n): count for n, count in told.items()}


def _events(response: http.client.HTTPResponse) -> Iterator[Mapping[str, Any] | None]:
    """The stream's events; None for its end."""
    while line := response.readline():
        for event in events_of(line):
            yield event
            if event is None:
                return


def events_of(line: bytes) -> Iterator[Mapping[str, Any] | None]:
    """The event in a line of a stream, if there is one; None is the mark of the end."""
    if not line.startswith(b"data:"):
        return
    data = line.removeprefix(b"data:").strip()
    if data == b"[DONE]":
        yield None
        return
    try:
        event = json.loads(data)
    except (ValueError, RecursionError):
        raise AnswerError(f"the stream has an event that is no JSON: {data[:80]!r}") from None
    if isinstance(event, Mapping):
        yield event


def _refusal(response: http.client.HTTPResponse) -> FlashdraftError:
    text = response.read().decode("utf-8", "replace")
    return refusal(response.status, text, response.headers.get("Retry-After"))


def refusal(status: int, text: str, retry_after: str | None) -> FlashdraftError:
    """What an answer other than 200 means."""
    try:
        said = _message(json.loads(text))
    except (ValueError, RecursionError):
        said = text[:200]
    what = f"HTTP {status}: {said}"
    if status in _BUSY:
        return BusyError(what, _seconds(retry_after))
    if status in (401, 403):
        return RequestError(f"The server lets nobody in without the right key ({what}): --api-key.")
    return AnswerError(what)


def _seconds(header: str | None) -> float | None:
    """A Retry-After in seconds; a date, which hardly anyone sends, is not read."""
    try:
        return max(0.0, float(header)) if header is not None else None
    except ValueError:
        return None


def _message(event: Any) -> str:
    error = event.get("error", event) if isinstance(event, Mapping) else event
    said = error.get("message") if isinstance(error, Mapping) else error
    return str(said if said is not None else error)[:300]


def _reason(error: BaseException) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
