"""The front's end of a worker's socket, and a worker in a thread of this process."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

from flashdraft.core import GrammarSpec, Request, SamplingParams, TokenEvent
from flashdraft.killable import frames
from flashdraft.killable.frames import FrameReader, Message
from flashdraft.llm import LLM
from flashdraft.server.process import wire
from flashdraft.server.process.wire import History
from flashdraft.server.process.worker import Worker

PROMPT = [5, 17, 40, 41, 42, 60, 61]


class Front:
    """The other end of the socket."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.messages: list[Message] = []
        self.histories: dict[str, History] = {}
        self._frames = FrameReader()

    def send(self, *messages: Message) -> None:
        self.connection.sendall(b"".join(map(frames.pack, messages)))

    def read_until(self, found: Callable[[Message], bool]) -> Message:
        while True:
            for message in self.messages:
                if found(message):
                    return message
            data = self.connection.recv(1 << 16)
            assert data, "the worker has gone"
            self.messages += self._frames.feed(data)

    def answers(self, *names: str) -> dict[str, list[TokenEvent]]:
        """The events of these requests, read until each has its last."""
        events: dict[str, list[TokenEvent]] = {name: [] for name in names}
        waiting = set(names)

        def is_last(message: Message) -> bool:
            for content in message.get("events", ()):
                if "generation" in content:
                    waiting.discard(content["id"])
            return not waiting

        self.read_until(is_last)
        for message in self.messages:
            for content in message.get("events", ()):
                event = wire.event_from_dict(content)
                history = self.histories.setdefault(event.request_id, History())
                events.setdefault(event.request_id, []).append(history.complete(event))
        return events


@contextlib.contextmanager
def running(llm: LLM, send_buffer: int = 1 << 18) -> Iterator[Front]:
    ours, theirs = socket.socketpair()
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    theirs.settimeout(20)
    failures: list[BaseException] = []

    def run() -> None:
        try:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # as serve has it
                Worker(theirs, llm.engine).run()
        except BaseException as error:
            failures.append(error)
        finally:
            theirs.close()

    thread = threading.Thread(target=run)
    thread.start()
    ours.settimeout(20)
    try:
        yield Front(ours)
    finally:
        ours.close()  # the worker ends with it
        thread.join(20)
        assert not thread.is_alive() and failures == []
        while llm.engine.has_work:  # what a test left behind
            for sequence in (*llm.engine.scheduler.running, *llm.engine.scheduler.waiting):
                llm.engine.cancel(sequence.request.id)
            llm.engine.step()
        llm.engine.check_integrity()


def submit(
    name: str,
    prompt: list[int] | None = None,
    verify: int | None = None,
    grammar: GrammarSpec | None = None,
    **params: Any,
) -> Message:
    settings = SamplingParams(**{"max_tokens": 20, "ignore_eos": True, **params})
    request = Request(name, PROMPT if prompt is None else prompt, settings, 7, verify, grammar)
    return {"type": "submit", "request": wire.request_to_dict(request)}
