"""A live server in a thread, whose engine reads its answers from a script."""

from __future__ import annotations

import dataclasses
import threading
import time

import uvicorn

from flashdraft.server.answering.serving import Serving
from flashdraft.server.app import create_app
from flashdraft.server.settings import ServerSettings
from flashdraft.server.telemetry.metrics import Metrics
from tests.unit.server.scripted import ScriptedEngine, Step, make_tokenizer

KEY = "test-key"


class LiveServer:
    """The real server on a port of its own; `play` says what its model answers next."""

    def __init__(self, max_context: int = 4096) -> None:
        tokenizer = make_tokenizer()
        self.engine = ScriptedEngine(tokenizer, ["x"])
        self.engine.info = dataclasses.replace(self.engine.info, max_context=max_context)
        self.metrics = Metrics()
        self.settings = ServerSettings(api_key=KEY)
        serving = Serving(self.engine, tokenizer, self.settings, self.metrics)
        app = create_app(serving, sink=lambda line: None)
        self.server = uvicorn.Server(
            uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error")
        )
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()
        until = time.monotonic() + 20
        while not self.server.started and time.monotonic() < until:
            time.sleep(0.01)
        port = self.server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join(10)

    def play(self, *scripts: Step) -> ScriptedEngine:
        """Give the engine a new script."""
        self.engine.scripts = list(scripts)
        self.engine.requests.clear()
        self.engine.cancelled.clear()
        return self.engine
