"""The two servers that clients are tried against, each started once.

One is `flashdraft serve` with the default pair. The other has a script in place of the model, for
what needs a cleverer one: an agent that decides to call, an editor of files.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.clients.client_processes import Report, is_complete, run_script
from tests.conftest import DEFAULT_TARGET
from tests.e2e.live_server import LiveServer
from tests.unit.server.scripted import MODEL

START_S = 120
MAX_CONTEXT = 32_768  # the scripted model has a token a byte, and aider says much


class Address(NamedTuple):
    url: str
    model: str


@pytest.fixture(scope="session")
def default_pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Address]:
    errors = tmp_path_factory.mktemp("server") / "err.log"
    command = [sys.executable, "-m", "flashdraft", "serve", DEFAULT_TARGET, "--port", "0"]
    with errors.open("w") as sink:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=sink)
    try:
        yield Address(_address(process, errors), DEFAULT_TARGET)
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _address(process: subprocess.Popen[bytes], errors: Path) -> str:
    until = time.monotonic() + START_S
    while time.monotonic() < until and process.poll() is None:
        if found := re.search(r"Serving \S+ on (\S+)", errors.read_text()):
            return found[1]
        time.sleep(0.1)
    raise AssertionError(f"the server did not start:\n{errors.read_text()}")


@pytest.fixture(scope="session")
def scripted() -> Iterator[LiveServer]:
    server = LiveServer(MAX_CONTEXT)
    yield server
    server.stop()


Ask = Callable[[str, str, list[str]], Report]


def _asker(address: Callable[[], Address]) -> Ask:
    def ask(environment: str, script: str, aspects: list[str]) -> Report:
        if not is_complete(environment):
            pytest.skip(f"the clients of {environment!r} are not installed; run `make clients`")
        return run_script(environment, script, *address(), aspects)

    return ask


@pytest.fixture(scope="session")
def ask_default(request: pytest.FixtureRequest) -> Ask:
    """Runs a client's script against the default pair, which starts once there is a client."""
    return _asker(lambda: request.getfixturevalue("default_pair"))


@pytest.fixture
def ask_scripted(scripted: LiveServer) -> Ask:
    """Runs a client's script against a server that plays `scripted`'s answers."""
    return _asker(lambda: Address(scripted.url, MODEL))
