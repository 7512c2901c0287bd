"""The web page against the real `flashdraft serve`, on a tiny random checkpoint with an API key."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.browser import Keys, Page
from tests.tiny import make_tiny_checkpoint, make_tiny_drafter

pytestmark = pytest.mark.alone  # Chromium takes both processors

KEY = "k3y"
HOME = "\ue011"
START_S = 60


@pytest.fixture(scope="module")
def address(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where the server listens. `browser` comes first: without one there is nothing to start."""
    folder = make_tiny_checkpoint(tmp_path_factory.mktemp("page") / "tiny")
    drafter = make_tiny_drafter(folder.parent / "drafter")
    log = folder.parent / "log"
    command = [sys.executable, "-m", "flashdraft", "serve", str(folder), "--port", "0"]
    command += ["--draft", str(drafter), "--tree", "15"]
    with log.open("w") as output:
        process = subprocess.Popen(
            [*command, "--dtype", "float32", "--api-key", KEY], stdout=output, stderr=output
        )
    try:
        yield _address_in(log, process)
    finally:
        process.terminate()
        process.wait()


def _address_in(log: Path, process: subprocess.Popen[bytes]) -> str:
    end = time.monotonic() + START_S
    while time.monotonic() < end and process.poll() is None:
        if found := re.search(r"Serving \S+ on http://(\S+)", log.read_text()):
            return found[1]
        time.sleep(0.05)
    raise AssertionError(log.read_text())


@pytest.fixture
def live(browser: Any, address: str) -> Iterator[Page]:
    # answers the browser's own question for the key, which it remembers
    browser.get(f"http://me:{KEY}@{address}")
    made = Page(browser, f"http://{address}")
    made.set_width(1200, 900)
    browser.get("about:blank")
    browser.get_log("browser")
    made.open()
    yield made
    assert browser.get_log("browser") == []
    made.run("localStorage.clear(); sessionStorage.clear()")


def test_a_question_is_answered_and_counted(live: Page) -> None:
    live.click("#open-settings")
    live.find("[name=max_tokens]").send_keys("60")
    live.click("#settings .primary")
    live.click("#colour")
    live.ask("the quick brown fox")
    live.wait_for_end()
    assert live.text("#model") == "tiny" and not live.is_shown(".error")
    assert "tok/s" in live.text(".gauge") and "tokens a step" in live.text(".gauge")
    columns = """
    return [...document.querySelectorAll(".strip i")].map(({ style }) =>
      Number(style.getPropertyValue("--accepted")) + Number(style.getPropertyValue("--own")))"""
    shown = sum(live.run(columns))
    counted = int(re.findall(r"(\d+) tokens(?! a)", live.text(".gauge"))[0])
    assert counted - 1 <= shown <= counted  # a stop token is counted and has nothing to show


def test_the_trees_of_its_steps_are_drawn(live: Page) -> None:
    live.click("#colour")
    live.ask("the quick brown fox")
    live.wait(lambda: live.all(".strip [data-step]"))
    live.wait_for_end()
    live.find(".strip").send_keys(HOME)
    assert re.match(r"\d+ tokens tried, (none|\d+) accepted", live.text(".tree-words"))
    tried = int(live.text(".tree-words").split()[0])
    assert 1 < tried <= 15
    assert len(live.all(".tree-drawing g:not(.before, .own)")) == tried


def test_an_answer_can_be_stopped_and_asked_again(live: Page) -> None:
    live.ask("the quick brown fox")
    live.wait(lambda: live.is_shown(".live"))
    live.find("#question").send_keys(Keys.ESCAPE)
    live.wait_for_end()
    live.click_action("Retry")
    live.wait_for_end()
    assert len(live.all(".turn")) == 1 and not live.is_shown(".error")


@pytest.mark.parametrize("order", ["one after", "at the same"])
def test_both_runs_of_a_race_write_the_same(live: Page, order: str) -> None:
    live.open("/#race")
    live.find("#race-order").send_keys(order)
    live.find("#race-length").send_keys("128")
    live.click("#race-start")
    live.wait(lambda: live.is_shown("#verdict[data-state=done]"), 60)
    assert "Identical text." in live.text("#verdict")
    assert live.text("#lane-plain .answer") == live.text("#lane-drafted .answer") != ""


def test_a_question_that_does_not_fit_is_refused_in_the_servers_words(live: Page) -> None:
    live.run("question.value = 'fox '.repeat(2000)")
    live.find("#question").send_keys(Keys.ENTER)
    live.wait(lambda: live.is_shown(".error"))
    assert "refused" in live.text(".error") and "1024" in live.text(".error .detail")
    live.driver.get_log("browser")  # the browser reports the status 400 itself
