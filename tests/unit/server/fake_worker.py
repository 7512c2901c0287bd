"""An engine's process that misbehaves on command: `python fake_worker.py FD ARGUMENTS`.

It imports nothing of flashdraft: it starts fast, and the wire's format is written down twice.
ARGUMENTS: "behaviour" (see `misbehave`), "lives" (a file that counts the process's lives: only the
first life misbehaves, unless the behaviour says always), "step_s" (time of a step), "max_context".
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import struct
import sys
import threading
import time
from pathlib import Path
from typing import Any

INFO = {
    "model": "fake",
    "drafter": None,
    "max_context": 64,
    "max_batch": 2,
    "vocab_size": 300,
    "eos_token_ids": [1],
    "device": "cpu",
    "dtype": "float32",
    "generation_config": {},
    "supports_grammar": False,
}
STATS = {
    "num_decoding": 1,
    "num_prefill_tokens": 0,
    "num_drafted": 3,
    "num_accepted": 1,
    "verify_lengths": [3],
    "depths": [3],
    "draft_s": 0.001,
    "verify_s": 0.002,
    "commit_s": 0.0,
}


class FakeWorker:
    def __init__(self, descriptor: int, arguments: dict[str, Any]) -> None:
        self.connection = socket.socket(fileno=descriptor)
        lives = Path(arguments["lives"])
        life = int(lives.read_text()) + 1 if lives.exists() else 1
        lives.write_text(str(life))
        behaviour = arguments.get("behaviour", "normal")
        is_bad = life == 1 or behaviour.startswith("always ")
        self.behaviour = behaviour.removeprefix("always ") if is_bad else "normal"
        self.step_s = arguments.get("step_s", 0.005)
        self.info = {**INFO, "max_context": arguments.get("max_context", INFO["max_context"])}
        self.buffer = b""
        self.pictures: list[str] = []
        self.sending = threading.Lock()
        self.running: dict[str, dict[str, Any]] = {}

    def send(self, message: dict[str, Any]) -> None:
        body = json.dumps(message).encode()
        with self.sending:
            self.connection.sendall(struct.pack(">I", len(body)) + body)

    def beat(self) -> None:
        while True:
            time.sleep(0.5)
            self.send({"type": "alive"})

    def run(self) -> None:
        self.send({"type": "loading", "model": "fake"})
        if self.behaviour == "fails":
            self.send({"type": "failed", "kind": "CheckpointError", "message": "Broken weights."})
            sys.exit(3)
        if self.behaviour == "exits":
            sys.exit(7)
        gauges = {"running": 0, "waiting": 0, "pages_used": 0, "pages_total": 10}
        self.send({"type": "ready", "info": self.info, "gauges": gauges})
        threading.Thread(target=self.beat, daemon=True).start()
        while self.take():
            if self.running and self.behaviour != "hangs":
                time.sleep(self.step_s)
                self.step()

    def take(self) -> bool:
        idle = not self.running or self.behaviour == "hangs"
        while select.select([self.connection], [], [], None if idle else 0)[0]:
            data = self.connection.recv(1 << 16)
            if not data:
                return False
            self.buffer += data
            while len(self.buffer) >= 4:
                (length,) = struct.unpack(">I", self.buffer[:4])
                if len(self.buffer) < 4 + length:
                    break
                body = self.buffer[4 : 4 + length]
                if body[0] == 0:  # what goes with bytes: a length, the message, the bytes
                    (end,) = struct.unpack(">I", body[1:5])
                    self.obey(json.loads(body[5 : 5 + end]), body[5 + end :])
                else:
                    self.obey(json.loads(body))
                self.buffer = self.buffer[4 + length :]
            idle = False
        return True

    def obey(self, message: dict[str, Any], data: bytes = b"") -> None:
        if message["type"] == "picture":
            assert len(data) == 3 * message["width"] * message["height"]
            self.pictures.append(message["key"])
            return
        if message["type"] == "cancel":
            if message["id"] in self.running:
                self.running[message["id"]]["reason"] = "cancelled"
            return
        request, pictures, self.pictures = message["request"], self.pictures, []
        assert {key for _, key in request["pictures"]} == set(pictures)
        if request["prompt_ids"][0] == 99:
            kind = "ContextLengthError" if len(request["prompt_ids"]) > 1 else "RequestError"
            self.send(
                {"type": "refused", "id": request["id"], "kind": kind, "message": "I refuse."}
            )
            return
        left = request["params"]["max_tokens"]
        self.running[request["id"]] = {"left": left, "count": 0, "reason": None, "new": True}

    def step(self) -> None:
        events, started = [], []
        for name, state in list(self.running.items()):
            if state.pop("new", False):
                started.append([name, 0.01])
            event: dict[str, Any] = {"id": name, "tokens": [], "drafted": "", "pieces": []}
            if state["reason"] is None:
                state["count"] += 1
                event |= {"tokens": [state["count"]], "drafted": "1"}
                if state["count"] == state["left"]:
                    state["reason"] = "length"
            event["text"] = "".join(f"t{token} " for token in event["tokens"])
            if state["reason"] is not None:
                event["generation"] = self.generation(state)
                del self.running[name]
            events.append(event)
        gauges = {"running": len(self.running), "waiting": 0, "pages_used": 1, "pages_total": 10}
        message = {"type": "step", "events": events, "stats": STATS, "started": started}
        self.send({**message, "gauges": gauges})
        if any(state["count"] >= 2 for state in self.running.values()):
            self.misbehave()

    def generation(self, state: dict[str, Any]) -> dict[str, Any]:
        count = state["count"]
        stats = {"prompt_tokens": 3, "cached_tokens": 1, "steps": count, "drafted": 3 * count}
        stats |= {"accepted": count, "decode_tokens": count, "histogram": [[1, count]]}
        return {
            "text": "".join(f"t{token} " for token in range(1, count + 1)),
            "finish_reason": state["reason"],
            "stats": {**stats, "preemptions": 0, "ttft_s": 0.01, "decode_s": 0.1},
            "error": None,
            "prompt_logprobs": None,
        }

    def misbehave(self) -> None:
        if self.behaviour == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.behaviour == "garbage":
            self.connection.sendall(struct.pack(">I", 8) + b"not json")
        elif self.behaviour == "huge":
            self.connection.sendall(b"\xff\xff\xff\xff")
        elif self.behaviour == "stalls":
            time.sleep(600)


if __name__ == "__main__":
    FakeWorker(int(sys.argv[1]), json.loads(sys.argv[2])).run()
