"""What serve says where: one line in a pipe, and what can be done next in a terminal."""

from __future__ import annotations

import io

import pytest

from flashdraft.cli.display import Screen
from flashdraft.cli.serving.notes import is_log_in_words, say_ready
from flashdraft.server.settings import ServerSettings


def ready(address: str, settings: ServerSettings, is_terminal: bool = True) -> str:
    screen = Screen(io.StringIO(), io.StringIO(), err_is_terminal=is_terminal)
    say_ready("tiny", address, settings, screen)
    assert isinstance(screen.err, io.StringIO)
    return screen.err.getvalue()


def test_a_terminal_is_told_of_the_page_and_of_clients() -> None:
    said = ready("http://127.0.0.1:8000", ServerSettings())
    assert said.splitlines()[0] == "Serving tiny on http://127.0.0.1:8000"
    assert "http://127.0.0.1:8000/\n" in said and said.count("flashdraft connect\n") == 1
    assert max(map(len, said.splitlines())) <= 50


@pytest.mark.parametrize(
    ("address", "url"),
    [
        ("http://0.0.0.0:9000", "http://127.0.0.1:9000"),
        ("http://[::]:9000", "http://[::1]:9000"),
        ("http://[fe80::1]:9000", "http://[fe80::1]:9000"),
    ],
)
def test_addresses_are_those_that_this_machine_finds(address: str, url: str) -> None:
    said = ready(address, ServerSettings(api_key="secret"))
    assert f"{url}/\n" in said and f"flashdraft connect --url {url} --api-key KEY" in said
    assert "secret" not in said


def test_elsewhere_it_is_one_line() -> None:
    said = ready("http://127.0.0.1:8000", ServerSettings(), is_terminal=False)
    assert said == "Serving tiny on http://127.0.0.1:8000\n"


@pytest.mark.parametrize(
    ("log_format", "is_terminal", "in_words"),
    [
        ("auto", True, True),
        ("auto", False, False),
        ("text", False, True),
        ("json", True, False),
    ],
)
def test_the_log_is_for_whoever_reads_it(
    log_format: str, is_terminal: bool, in_words: bool
) -> None:
    screen = Screen(io.StringIO(), io.StringIO(), out_is_terminal=is_terminal)
    assert is_log_in_words(ServerSettings(log_format=log_format), screen) == in_words
