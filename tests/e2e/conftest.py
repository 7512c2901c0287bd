"""The web page's fixtures: a scripted server, a browser for the whole run, a fresh page a test."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.browser import Page, start_browser
from tests.e2e.scripted_server import Script, ScriptedServer


@pytest.fixture(scope="session")
def scripted_once() -> Iterator[ScriptedServer]:
    made = ScriptedServer()
    yield made
    made.stop()


@pytest.fixture
def scripted(scripted_once: ScriptedServer) -> ScriptedServer:
    """A server with the default script and nothing asked yet."""
    scripted_once.script = Script()
    scripted_once.questions.clear()
    scripted_once.num_abandoned = 0
    return scripted_once


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    made = start_browser(tmp_path_factory.mktemp("profile"))
    yield made
    made.quit()


@pytest.fixture
def page(browser: Any, scripted: ScriptedServer) -> Iterator[Page]:
    """The page, freshly opened with nothing remembered. No script may have failed at the end."""
    made = Page(browser, scripted.url)
    made.set_width(1200, 900)
    made.prefer("light")
    made.open()
    made.forget()
    made.open()
    browser.get_log("browser")
    yield made
    complaints = [entry["message"] for entry in browser.get_log("browser")]
    assert [c for c in complaints if "Failed to load resource" not in c] == []
