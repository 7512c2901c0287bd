"""One file over HTTP: continued where an earlier fetch ended, and checked by its digest.

It knows no repository and no cache. The requests are those of the Hub's client, with its proxies
and certificates; a token stays with the host that it is for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urljoin, urlsplit

from huggingface_hub import constants, get_session, hf_raise_for_status
from huggingface_hub import errors as hub_errors

from flashdraft.errors import CheckpointError
from flashdraft.models.files.digests import Digest, new_hash

_WAITS_S = (1.0, 2.0, 4.0, 8.0)  # before asking again, as long as nothing comes
_MAX_REDIRECTS = 5
_MAX_RESTARTS = 2  # of a file whose server does not continue
_REDIRECTS = (301, 302, 303, 307, 308)
_BLOCK_BYTES = 1 << 20
_RANGE_REFUSED = 416


class Stopped(Exception):
    """Another part of the same fetch has failed or was interrupted."""


class Wanted(NamedTuple):
    """A file as its publisher has it; without a digest only its size can be checked."""

    label: str
    url: str
    num_bytes: int
    digest: Digest | None


class Listener(NamedTuple):
    """Who hears of a transfer."""

    on_bytes: Callable[[int], None]  # that came; less than nothing for those that come again
    is_stopped: Callable[[], bool]


class _Part:
    """What came of a file so far, and its digest."""

    def __init__(self, path: Path, wanted: Wanted, listener: Listener) -> None:
        self._wanted, self._listener = wanted, listener
        self._file = path.open("ab+")  # appends wherever reading was
        self.num_bytes, self._hash = 0, self._new_hash()
        self.num_restarts = 0
        self._read()

    def _new_hash(self) -> Any:
        digest = self._wanted.digest
        return None if digest is None else new_hash(digest.kind, self._wanted.num_bytes)

    def _read(self) -> None:
        self._file.seek(0)
        while block := self._file.read(_BLOCK_BYTES):
            if self._listener.is_stopped():
                raise Stopped
            self._count(block)

    def _count(self, block: bytes) -> None:
        self.num_bytes += len(block)
        if self._hash is not None:
            self._hash.update(block)

    def append(self, block: bytes) -> None:
        self._file.write(block)
        self._count(block)
        self._listener.on_bytes(len(block))

    def restart(self) -> None:
        """Forget it all."""
        self.num_restarts += 1
        self._file.truncate(0)
        self._listener.on_bytes(-self.num_bytes)
        self.num_bytes, self._hash = 0, self._new_hash()

    @property
    def found(self) -> str | None:
        return None if self._hash is None else self._hash.hexdigest()

    def close(self) -> None:
        self._file.close()


def fetch_file(wanted: Wanted, part: Path, headers: Mapping[str, str], listener: Listener) -> None:
    """Complete the file at `part`; what came stays there, whatever happens, unless it is wrong.

    Raises CheckpointError for content that is not what was published, and what the network raises.
    """
    came = _Part(part, wanted, listener)
    try:
        for is_last in (False, True):
            _complete(came, wanted, headers, listener)
            if wanted.digest is None or came.found == wanted.digest.value:
                return
            found = came.found
            came.restart()  # an earlier part may be to blame; all of it again, once
            if is_last:
                raise CheckpointError(
                    f"{wanted.label} came damaged, twice: it has {wanted.digest.kind}:{found}, the "
                    f"Hub has {wanted.digest}. Nothing of it was kept; try again, and look at what "
                    "lies between (a proxy, HF_ENDPOINT)."
                )
    finally:
        came.close()
        if came.num_bytes == 0 < wanted.num_bytes:
            part.unlink(missing_ok=True)


def _complete(came: _Part, wanted: Wanted, headers: Mapping[str, str], listener: Listener) -> None:
    num_idle = 0
    if came.num_bytes > wanted.num_bytes:
        came.restart()
    furthest = came.num_bytes  # ever: what comes again is no progress
    while came.num_bytes < wanted.num_bytes:
        num_restarts = came.num_restarts
        try:
            for block in _blocks(came, wanted.url, headers):
                if listener.is_stopped():
                    raise Stopped
                came.append(block)
                if came.num_bytes > wanted.num_bytes:
                    raise _too_long(came, wanted)
            problem: Exception = ConnectionError("the answer ended early")
        except _LostError as lost:
            problem = lost.reason
        if came.num_bytes >= wanted.num_bytes:
            return
        if came.num_restarts > num_restarts and not came.num_bytes:
            continue  # that was no answer: all of it is asked for, before anything is given up
        num_idle = 0 if came.num_bytes > furthest else num_idle + 1
        furthest = max(furthest, came.num_bytes)
        if num_idle > len(_WAITS_S):
            raise problem
        _wait(_WAITS_S[max(num_idle - 1, 0)], listener)


def _too_long(came: _Part, wanted: Wanted) -> CheckpointError:
    came.restart()
    return CheckpointError(
        f"{wanted.label} came damaged: more than the {wanted.num_bytes} bytes that the Hub says it "
        "has. Nothing of it was kept; try again, and look at what lies between (a proxy, "
        "HF_ENDPOINT)."
    )


class _LostError(Exception):
    """The connection failed; asking again may help."""

    def __init__(self, reason: Exception) -> None:
        super().__init__(str(reason))
        self.reason = reason


def _blocks(came: _Part, url: str, headers: Mapping[str, str]) -> Iterator[bytes]:
    """What follows the part, or everything where the server does not continue."""
    start = came.num_bytes
    try:
        with _answer(url, headers, start) as response:
            if response.status_code == _RANGE_REFUSED and start:
                _start_over(came)
                return
            hf_raise_for_status(response)
            if start and not _continues(response, start):
                _start_over(came)
                if response.status_code != 200:  # some other piece: ask for all of it
                    return
            yield from response.iter_bytes()
    except hub_errors.HfHubHTTPError as error:
        if error.response.status_code < 500:
            raise
        raise _LostError(error) from error
    except OSError:
        raise  # of the disk; the network's errors are none
    except Exception as error:  # the network's have no base that every version of the client has
        raise _LostError(error) from error


def _start_over(came: _Part) -> None:
    if came.num_restarts >= _MAX_RESTARTS:
        raise ConnectionError("the answers break off, and are not continued where they did")
    came.restart()


@contextmanager
def _answer(url: str, headers: Mapping[str, str], start: int) -> Iterator[Any]:
    """The answer behind all redirects; what identifies us goes to the first host alone."""
    host = _origin(url)
    common = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={start}-"} if start else {})
    for _ in range(_MAX_REDIRECTS + 1):
        is_home = _origin(url) == host
        sent = {
            name: value
            for name, value in headers.items()
            if is_home or name.lower() not in ("authorization", "cookie")
        }
        with get_session().stream(
            "GET",
            url,
            headers={**sent, **common},
            follow_redirects=False,
            timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT,
        ) as response:
            if response.status_code not in _REDIRECTS:
                yield response
                return
            url = urljoin(url, response.headers.get("location", ""))
    raise ConnectionError(f"more than {_MAX_REDIRECTS} redirects")


def _origin(url: str) -> tuple[str, str | None, int | None]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port


def _continues(response: Any, start: int) -> bool:
    said = response.headers.get("content-range", "")
    return response.status_code == 206 and said.startswith(f"bytes {start}-")


def _wait(seconds: float, listener: Listener) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if listener.is_stopped():
            raise Stopped
        time.sleep(min(0.1, seconds))
