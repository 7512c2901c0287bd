"""A child for the tests of the pool: it does as it is told."""

from __future__ import annotations

import os
import signal
import sys
import time

from flashdraft.killable.child import RefusalError, serve
from flashdraft.killable.frames import Message

KEPT: list[bytearray] = []


def answer(message: Message) -> Message:
    match message["type"]:
        case "load":
            if message.get("refuse"):
                raise RefusalError("checkpoint", "I will not")
            while message.get("spin"):
                pass
            if message.get("die"):
                os.kill(os.getpid(), signal.SIGKILL)
            return {"pid": os.getpid()}
        case "echo":
            return {"value": message["value"], "pid": os.getpid()}
        case "weigh":
            return {"value": message["data"].hex(), "pid": os.getpid()}
        case "environment":
            kept = dict(os.environ)
            return {"environment": kept, "path": sys.path, "modules": sorted(sys.modules)}
        case "spin":
            while True:
                pass
        case "sleep":
            time.sleep(message["seconds"])
        case "allocate":
            bytearray(message["bytes"])
        case "keep":
            KEPT.append(bytearray(os.urandom(1)) * message["bytes"])
        case "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "die":
            os.kill(os.getpid(), signal.SIGKILL)
        case "flood":
            return {"value": "x" * message["bytes"]}
        case "say":
            os.write(2, b"x" * message["bytes"])
        case "write":
            with open(message["path"], "w") as file:
                file.write("x")
    return {"pid": os.getpid()}


if __name__ == "__main__":
    serve(int(sys.argv[1]), answer)
