"""Chromium with the web page open. selenium is imported when it is used, and not before."""

from __future__ import annotations

import importlib
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


class Keys:
    """Keys without a character of their own, as WebDriver numbers them."""

    NULL = "\ue000"  # lets go of those held down
    TAB = "\ue004"
    ENTER = "\ue007"
    SHIFT = "\ue008"
    CONTROL = "\ue009"
    ESCAPE = "\ue00c"
    ARROW_UP = "\ue013"


def start_browser(profile: Path) -> Any:
    """A headless Chromium, or a skipped test where there is none."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="the page's tests need selenium")
    binary = shutil.which("chromium") or shutil.which("chromium-browser")
    driver = shutil.which("chromedriver")
    if binary is None or driver is None:
        pytest.skip("the page's tests need Chromium and its driver (chromium, chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for flag in [*FLAGS, f"--user-data-dir={profile}"]:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    return webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))


class Page:
    """A browser with the page open."""

    def __init__(self, driver: Any, url: str) -> None:
        self.driver = driver
        self.url = url
        self.handle = driver.current_window_handle  # of its tab

    def open(self, path: str = "/") -> None:
        self.driver.get("about:blank")
        self.driver.get(self.url + path)
        self.wait(lambda: self.text("#model") != "connecting" or self.is_shown("#key-dialog"))

    def forget(self) -> None:
        """Everything that the page has kept in the browser."""
        self.run("localStorage.clear(); sessionStorage.clear()")
        self.driver.get("about:blank")  # lets go of the database
        self.driver.get(f"{self.url}/page/theme.js")  # the same origin, and no page
        self.driver.execute_async_script(
            "const done = arguments[0]; const r = indexedDB.deleteDatabase('flashdraft'); "
            "r.onsuccess = r.onerror = r.onblocked = () => done()"
        )

    def find(self, selector: str) -> Any:
        return self.driver.find_element("css selector", selector)

    def all(self, selector: str) -> list[Any]:
        return self.driver.find_elements("css selector", selector)

    def text(self, selector: str) -> str:
        return str(self.find(selector).get_property("textContent"))

    def is_shown(self, selector: str) -> bool:
        return any(element.is_displayed() for element in self.all(selector))

    def click(self, selector: str) -> None:
        self.find(selector).click()

    def click_action(self, label: str) -> None:
        next(b for b in self.all(".turn:last-child button") if b.text.startswith(label)).click()

    def run(self, script: str) -> Any:
        return self.driver.execute_script(script)

    def wait(self, condition: Callable[[], object], seconds: float = 15) -> None:
        """Until the condition holds; what it asks for may not be there yet."""
        end = time.monotonic() + seconds
        while not _holds(condition):
            assert time.monotonic() < end, f"waited {seconds} s in vain"
            time.sleep(0.02)

    def ask(self, question: str) -> None:
        self.find("#question").send_keys(question, Keys.ENTER)

    def wait_for_end(self) -> None:
        self.wait(lambda: self.text("#send") == "Send")

    def answer(self) -> str:
        return self.text(".turn:last-child .answer")

    def set_width(self, width: int, height: int) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def prefer(self, theme: str) -> None:
        feature = {"name": "prefers-color-scheme", "value": theme}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})

    def background(self) -> str:
        return str(self.run("return getComputedStyle(document.body).backgroundColor"))


def _holds(condition: Callable[[], object]) -> bool:
    exceptions = importlib.import_module("selenium.common.exceptions")
    try:
        return bool(condition())
    except (exceptions.NoSuchElementException, exceptions.StaleElementReferenceException):
        return False
