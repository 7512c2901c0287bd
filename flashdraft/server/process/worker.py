"""The engine's process: `python -m flashdraft.server.process.worker FD ARGUMENTS`.

FD is an inherited socket whose other end the front holds, ARGUMENTS are those of `LLM` as a JSON
object. The process loads the model, then takes what the front sends between two steps and sends
back what every step committed. It knows neither HTTP nor text formats. It lives as long as the
front's end is open, and one request's failure ends that request alone.

A grammar is compiled in a thread (grammar_queue.py), so that no stream waits for another's schema.
Another thread says every second that the process lives, also while a step takes long.

To the front: loading, ready or failed; refused, step, alive. From it: picture, submit, cancel.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from typing import Any

from flashdraft.core import FinishReason, Picture, TokenEvent
from flashdraft.engine.engine import Engine
from flashdraft.errors import FlashdraftError
from flashdraft.killable.frames import FrameReader, Message, WireError, pack
from flashdraft.llm import LLM
from flashdraft.server.process.grammar_queue import CompiledRequest, GrammarQueue
from flashdraft.server.process.wire import (
    BEAT_S,
    event_to_dict,
    picture_from_dict,
    request_from_dict,
    step_to_dict,
    vision_to_dict,
)
from flashdraft.server.telemetry.logs import Sink, structured_logging, write_line
from flashdraft.server.telemetry.text_lines import IN_WORDS, write_in_words
from flashdraft.status_line import STATUS

SEND_TIMEOUT_S = 60.0  # the front reads all the time: if it does not, it hangs
ORPHAN_GRACE_S = 5.0  # for the loop to see by itself that the front has gone
PREPARE_S = 90.0  # at most, on a GPU: to capture steps before the first request comes
EXIT_FAILED = 3
_RECEIVE_BYTES = 256 * 1024

log = logging.getLogger("flashdraft.server.process.worker")  # as a program it is called __main__
FAILED = "The engine failed on this request ({kind}); the server's log says how. Send it again."


class Worker:
    """The loop between the socket and the engine."""

    def __init__(self, connection: socket.socket, engine: Engine) -> None:
        self._connection = connection
        self._engine = engine
        self._frames = FrameReader()
        compiler = engine.compile_grammar  # the engine's own: what the thread made is kept
        self._grammar_queue = None if compiler is None else GrammarQueue(compiler)
        self._queued: dict[str, float] = {}  # requests no step has begun, and when they came
        self._arrived: dict[bytes, Picture] = {}  # pictures of the request that comes next
        self._pictures = weakref.WeakValueDictionary[bytes, Picture]()  # those of all requests
        self._sending = threading.Lock()  # frames go out whole, whichever thread sends them

    def run(self) -> None:
        """Serve until the front closes its end."""
        ended = threading.Event()
        beating = threading.Thread(target=self._beat, args=(ended,), daemon=True)
        beating.start()
        try:
            while self._take_commands():
                if self._engine.has_work:
                    self._step()
        finally:
            ended.set()
            beating.join()
            if self._grammar_queue is not None:
                self._grammar_queue.close()

    def _beat(self, ended: threading.Event) -> None:
        """Say that the process lives: what computes lets go of the interpreter meanwhile."""
        while not ended.wait(BEAT_S):
            try:
                self._send({"type": "alive"})
            except OSError:  # half a frame may be out, which nothing can follow: the loop ends too
                with contextlib.suppress(OSError):
                    self._connection.shutdown(socket.SHUT_RDWR)
                return

    def _take_commands(self) -> bool:
        """Take everything that waits; while there is no work, wait for it. False at the end."""
        timeout = 0 if self._engine.has_work else None
        sources = [one for one in (self._connection, self._grammar_queue) if one is not None]
        while readable := select.select(sources, [], [], timeout)[0]:
            if self._connection in readable:
                data = self._connection.recv(_RECEIVE_BYTES)
                if not data:
                    return False
                for message in self._frames.feed(data):
                    self._obey(message)
            for one in self._grammar_queue.take_ready() if self._grammar_queue in readable else ():
                self._submit_compiled(one)
            timeout = 0
        return True

    def _obey(self, message: Message) -> None:
        if message["type"] == "submit":
            self._submit(message["request"])
        elif message["type"] == "picture":
            picture = picture_from_dict(message)
            # answers to one request share it, and so do turns of one conversation
            self._arrived[picture.key] = self._pictures.setdefault(picture.key, picture)
        elif message["type"] == "cancel":
            if self._grammar_queue is None or not self._grammar_queue.cancel(message["id"]):
                self._engine.cancel(message["id"])
        else:
            raise WireError(f"The front sends a message of type {message['type']!r}.")

    def _submit(self, content: Mapping[str, Any]) -> None:
        try:
            request = request_from_dict(content, self._arrived)
        except FlashdraftError as error:
            self._refuse(content["id"], type(error).__name__, str(error))
            return
        finally:
            self._arrived = {}
        grammars, grammar = self._grammar_queue, request.grammar
        if grammars is None or grammar is None or grammars.has_compiled(grammar):
            self._submit_compiled(CompiledRequest(request, time.monotonic(), None))
        else:
            grammars.add(request)

    def _submit_compiled(self, compiled: CompiledRequest) -> None:
        request, arrived_at, refusal = compiled
        try:
            if refusal is not None:
                raise refusal
            self._engine.submit(request)
            self._queued[request.id] = arrived_at
        except FlashdraftError as error:
            self._refuse(request.id, type(error).__name__, str(error))
        except Exception as error:  # our own mistake, yet this request's alone
            log.exception("request %s could not be submitted", request.id)
            self._refuse(request.id, "FlashdraftError", FAILED.format(kind=type(error).__name__))

    def _refuse(self, request_id: str, kind: str, message: str) -> None:
        self._send({"type": "refused", "id": request_id, "kind": kind, "message": message})

    def _step(self) -> None:
        began = time.monotonic()
        try:
            events = self._engine.step()
        except Exception as error:
            log.exception("a step failed, and the engine could not go on by itself")
            events = self._end_all(FAILED.format(kind=type(error).__name__))
        self._send(
            {
                "type": "step",
                "events": [event_to_dict(event) for event in events],
                "stats": step_to_dict(self._engine.last_step),
                "started": self._started(began),
                "gauges": self._engine.load._asdict(),
            }
        )

    def _started(self, began: float) -> list[list[Any]]:
        """The requests that left the queue with this step, and how long they had waited."""
        waiting = self._engine.waiting_ids()
        started = [(name, came) for name, came in self._queued.items() if name not in waiting]
        for name, _ in started:
            del self._queued[name]
        return [[name, max(0.0, began - came)] for name, came in started]

    def _end_all(self, why: str) -> list[TokenEvent]:
        return [_failed(event, why) for event in self._engine.cancel_all()]

    def _send(self, message: Message) -> None:
        try:
            frame = pack(message)
        except WireError as error:  # a prompt's logprobs can be that many
            events = [e for e in message.get("events", ()) if "generation" in e]
            if not events:
                raise
            log.warning("an answer is too long for the wire: %s", error)
            for event in events:
                event["generation"]["prompt_logprobs"] = None
                event["generation"]["finish_reason"] = FinishReason.ERROR.value
                event["generation"]["error"] = "The answer's log-probabilities are too many."
            frame = pack(message)
        with self._sending:
            self._connection.sendall(frame)


def describe(llm: LLM) -> dict[str, Any]:
    """What the front must know of the loaded model."""
    target = llm.engine.target
    config = target.config
    vision = None if target.vision is None else config.vision
    return {
        "model": llm.model,
        "drafter": llm.drafter_name or ("ngram" if llm.engine.config.ngram else None),
        "max_context": llm.engine.max_context,
        "max_batch": llm.engine.config.max_batch,
        "vocab_size": config.vocab_size,
        "eos_token_ids": list(config.eos_token_ids),
        "device": str(llm.kernels.device),
        "dtype": str(llm.kernels.dtype).removeprefix("torch."),
        "generation_config": llm.generation_config,
        "supports_grammar": llm.engine.supports_grammar,
        "vision": None if vision is None else vision_to_dict(vision),
    }


def serve(connection: socket.socket, arguments: Mapping[str, Any]) -> int:
    """Load the model and run until the front goes; return the exit code."""
    connection.settimeout(SEND_TIMEOUT_S)
    try:
        connection.sendall(pack({"type": "loading", "model": arguments.get("model")}))
        llm = _load(connection, arguments)
        if llm is None:
            return EXIT_FAILED
        llm.engine.prepare(PREPARE_S)
        ready = {"type": "ready", "info": describe(llm), "gauges": llm.engine.load._asdict()}
        connection.sendall(pack(ready))
        Worker(connection, llm.engine).run()
    except (BrokenPipeError, ConnectionResetError):  # the front has gone in the middle
        return 0
    except TimeoutError:
        log.error("the front has not read anything for %g s", SEND_TIMEOUT_S)
        return EXIT_FAILED
    return 0


def _load(connection: socket.socket, arguments: Mapping[str, Any]) -> LLM | None:
    """The model; None, and the front is told why, where it cannot be loaded."""
    try:
        llm = LLM(**arguments)
        llm.prepare_grammars()  # now: later it would hold up every stream
        if llm.tokenizer is not None:
            llm.tokenizer.rest()  # prompts come as token ids
        return llm
    except FlashdraftError as error:
        kind, message = type(error).__name__, str(error)
    except Exception as error:
        log.exception("loading failed")
        kind, message = FlashdraftError.__name__, f"{type(error).__name__}: {error}"
    connection.sendall(pack({"type": "failed", "kind": kind, "message": message}))
    return None


def main() -> int:
    """The process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches both: the front decides
    try:
        *options, number, text = sys.argv[1:]
        descriptor, arguments = int(number), json.loads(text)
    except ValueError:
        usage = f"python -m flashdraft.server.process.worker [{IN_WORDS}] FD ARGUMENTS"
        print(f"usage: {usage}", file=sys.stderr)
        return 2
    connection = socket.socket(fileno=descriptor)
    threading.Thread(target=_end_with_front, args=(descriptor,), daemon=True).start()
    logging.captureWarnings(True)
    write = write_in_words if IN_WORDS in options else write_line
    with structured_logging(lambda line: _write_line(line, write)):
        try:
            return serve(connection, arguments)
        except Exception:
            log.exception("the engine's process has failed")
            return EXIT_FAILED


def _write_line(content: dict[str, Any], write: Sink) -> None:
    """A line of the log, on stdout: for this process that is the front's stderr."""
    STATUS.clear()
    write({**content, "process": "engine"})


def _end_with_front(descriptor: int) -> None:
    """End the process when the front has gone, even while it loads or a step hangs."""
    poller = select.poll()
    poller.register(descriptor, 0)  # a hang-up is reported always, and nothing else is wanted
    poller.poll()
    time.sleep(ORPHAN_GRACE_S)
    os._exit(EXIT_FAILED)


def _failed(event: TokenEvent, why: str) -> TokenEvent:
    if event.generation is None:
        return event
    ended = dataclasses.replace(
        event.generation, finish_reason=FinishReason.ERROR, error=event.generation.error or why
    )
    return dataclasses.replace(event, generation=ended)


if __name__ == "__main__":
    sys.exit(main())
