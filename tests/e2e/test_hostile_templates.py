"""A server whose model has a hostile chat template answers everything else, and ends when told."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.test_serve_process import Running, runs, serving, until
from tests.tiny import CHAT_TEMPLATE, make_tiny_checkpoint
from tests.unit.text.template_bombs import FREEZERS

pytestmark = pytest.mark.alone  # limits in wall time, of several processes

MAX_HEALTH_S = 1.0
NAME = "tiny"


def template() -> str:
    """Every bomb by its number, and what an honest template does for all else."""
    text = "{% set said = messages[-1]['content'] %}{% if false %}"
    for number, bomb in enumerate(FREEZERS):
        text += f"{{% elif said == 'bomb {number}' %}}{bomb}"
    return text + "{% else %}" + CHAT_TEMPLATE + "{% endif %}"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = make_tiny_checkpoint(tmp_path_factory.mktemp("hostile") / NAME)
    (folder / "chat_template.jinja").write_text(template())
    with serving(folder, tmp_path_factory.mktemp("server")) as running:
        yield running


def chat(server: Running, text: str) -> tuple[int, Any]:
    messages = [{"role": "user", "content": text}]
    body = {"model": NAME, "messages": messages, "max_tokens": 2, "temperature": 0}
    return server.ask("/v1/chat/completions", body)


class HealthWatch(threading.Thread):
    """Asks for the health again and again, and remembers the longest it took."""

    def __init__(self, server: Running) -> None:
        super().__init__(daemon=True)
        self._server = server
        self._ended = threading.Event()
        self.longest_s = 0.0
        self.statuses: set[int] = set()

    def run(self) -> None:
        while not self._ended.is_set():
            begin = time.monotonic()
            self.statuses.add(self._server.ask("/health")[0])
            self.longest_s = max(self.longest_s, time.monotonic() - begin)
            time.sleep(0.02)

    def end(self) -> None:
        self._ended.set()
        self.join(30)


def test_hostile_templates_freeze_nothing(server: Running) -> None:
    assert chat(server, "hello")[0] == 200
    watch = HealthWatch(server)
    watch.start()
    refused: dict[int, tuple[int, Any]] = {}

    def explode(numbers: range) -> None:
        for number in numbers:
            refused[number] = chat(server, f"bomb {number}")

    threads = [
        threading.Thread(target=explode, args=(range(first, len(FREEZERS), 2),))
        for first in range(2)
    ]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        status, answer = chat(server, "hello")
        assert status == 200, answer
    watch.end()
    assert len(refused) == len(FREEZERS) >= 33
    for number, (status, answer) in refused.items():
        assert status == 400, (number, answer)
        assert "chat template" in answer["error"]["message"], (number, answer)
    assert watch.statuses == {200}
    assert watch.longest_s < MAX_HEALTH_S


def test_a_killed_process_of_the_tokenizer_is_replaced(server: Running) -> None:
    def texts() -> list[int]:
        return [pid for pid in server.children if runs(pid, "flashdraft.text.child")]

    until(lambda: len(texts()) == 2)
    before = set(texts())
    for pid in before:
        os.kill(pid, signal.SIGKILL)

    def are_replaced() -> bool:
        assert chat(server, "hello")[0] == 200  # the next question makes up for a failed start
        return len(texts()) == 2 and not before & set(texts())

    until(are_replaced)


def test_a_server_that_renders_a_bomb_ends_on_a_signal(server: Running) -> None:
    """Last in this file: it ends the server."""

    def explode() -> None:
        with contextlib.suppress(OSError, http.client.HTTPException):  # the server goes
            chat(server, "bomb 0")

    bombs = [threading.Thread(target=explode, daemon=True) for _ in range(2)]
    for bomb in bombs:
        bomb.start()
    time.sleep(0.5)
    children = server.children
    begin = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(20) == 0
    assert time.monotonic() - begin < 15
    until(lambda: not any(runs(pid, "flashdraft") for pid in children))
    for bomb in bombs:
        bomb.join(10)
        assert not bomb.is_alive()  # it was answered or lost its connection
