"""Grammars are compiled beside the engine's steps; one that is too much is the client's fault."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from flashdraft.chat.grammar.matcher import LlguidanceMatcher
from flashdraft.core import FinishReason, GrammarSpec, Request, SamplingParams
from flashdraft.engine.sampling.grammar import DeadEndError, GrammarError, GrammarTooComplexError
from flashdraft.killable.frames import Message
from flashdraft.llm import LLM
from flashdraft.server.process.grammar_queue import MAX_STUCK, GrammarQueue
from tests.tiny import make_tiny_checkpoint
from tests.unit.server.process.worker_front import running, submit
from tests.unit.server.scripted import MODEL, Scripted

CHOICE = GrammarSpec("choice", json.dumps(["the fox", "the dog"]))
SLOW_S = 1.0


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = make_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))
    made = LLM(str(folder), dtype="float32", max_batch=4, cache_gb=0.001)
    if not made.engine.supports_grammar:
        pytest.skip("llguidance is not installed")
    return made


def schema(value: Any) -> GrammarSpec:
    return GrammarSpec("json_schema", json.dumps(value))


def test_other_streams_go_on_while_a_grammar_is_compiled(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_now = llm.engine.compile_grammar
    assert compile_now is not None
    slow_threads = []

    def slow(spec: GrammarSpec) -> Any:
        if threading.current_thread() is not threading.main_thread() and not slow_threads:
            slow_threads.append(threading.current_thread().name)
            time.sleep(SLOW_S)  # as native code does, without the interpreter's lock
        return compile_now(spec)

    monkeypatch.setattr(llm.engine, "compile_grammar", slow)
    with running(llm) as front:
        front.send(submit("long", max_tokens=900))
        front.read_until(lambda message: bool(message.get("events")))
        front.send(submit("formed", grammar=CHOICE, ignore_eos=False))
        times = [time.monotonic()]

        def has_ended(message: Message) -> bool:
            if message is front.messages[-1]:
                times.append(time.monotonic())
            return any(e["id"] == "long" and "generation" in e for e in message.get("events", ()))

        front.read_until(has_ended)
        assert slow_threads, "the long answer was over before the grammar came"
        assert max(late - early for early, late in pairwise(times)) < SLOW_S / 2
        (event,) = front.answers("formed")["formed"][-1:]
    assert event.generation is not None and event.generation.text in ("the fox", "the dog")


def test_a_request_that_leaves_while_its_grammar_is_compiled_is_forgotten(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_now, begun, release = llm.engine.compile_grammar, threading.Event(), threading.Event()
    assert compile_now is not None

    def slow(spec: GrammarSpec) -> Any:
        begun.set()
        assert release.wait(20)
        return compile_now(spec)

    monkeypatch.setattr(llm.engine, "compile_grammar", slow)
    with running(llm) as front:
        front.send(submit("gone", grammar=CHOICE))
        assert begun.wait(20)
        front.send({"type": "cancel", "id": "gone"}, submit("stays"))
        assert front.answers("stays")["stays"][-1].generation is not None
        release.set()
        front.send(submit("last", grammar=CHOICE, ignore_eos=False))
        events = front.answers("last")
    assert "gone" not in events and events["last"][-1].generation is not None


@pytest.mark.parametrize(
    "spec",
    [
        GrammarSpec("regex", "(?:a?){200}a{200}"),
        schema({"type": "integer", "multipleOf": 12345678}),
        schema({"allOf": [{"type": "integer", "multipleOf": 997}, {"multipleOf": 991}]}),
        schema({"type": "number", "multipleOf": 0.123457}),
        schema(
            {
                "allOf": [
                    {"anyOf": [{"properties": {f"{name}{n}": {"type": "string"}}} for name in "pq"]}
                    for n in range(14)
                ]
            }
        ),
    ],
    ids=["states", "multiple", "common multiple", "decimal", "combinations"],
)
def test_a_grammar_that_is_too_complex_is_refused_in_time(llm: LLM, spec: GrammarSpec) -> None:
    began = time.monotonic()
    with running(llm) as front:
        front.send(submit("bad", grammar=spec))
        refusal = front.read_until(lambda message: message["type"] == "refused")
        assert refusal["kind"] == "GrammarTooComplexError"
        assert refusal["message"].startswith("The grammar is too complex")
    assert time.monotonic() - began < 10


def test_usual_multiples_are_taken(llm: LLM) -> None:
    assert llm.engine.compile_grammar is not None
    for number in (5, 0.01, 0.25, 1000, 1e3):
        llm.engine.compile_grammar(schema({"type": "number", "multipleOf": number}))


def wait_for(grammars: GrammarQueue, count: int) -> list[Any]:
    found: list[Any] = []
    deadline = time.monotonic() + 20
    while len(found) < count:
        assert time.monotonic() < deadline
        found += grammars.take_ready()
        time.sleep(0.005)
    return found


def test_what_takes_too_long_is_given_up_and_the_next_one_is_compiled() -> None:
    release = threading.Event()
    made: list[str] = []

    def compiler(spec: GrammarSpec) -> Any:
        if spec.text == "stuck":
            release.wait(20)
        made.append(spec.text)

    grammars = GrammarQueue(compiler, timeout_s=0.1)
    try:
        for number in range(MAX_STUCK):
            grammars.add(_request(f"stuck {number}", "stuck"))
            grammars.add(_request(f"good {number}", f"good {number}"))
        outcome = {one.request.id: one.error for one in wait_for(grammars, 2 * MAX_STUCK)}
        assert isinstance(outcome["stuck 0"], GrammarTooComplexError)
        assert "takes longer than 0.1 s" in str(outcome["stuck 0"])
        assert outcome["good 0"] is None and "good 0" in made
        grammars.add(_request("more", "more"))
        (more,) = wait_for(grammars, 1)
        assert "try again later" in str(more.error)
        release.set()
        until(lambda: made.count("stuck") == MAX_STUCK)
        grammars.add(_request("again", "again"))
        (again,) = wait_for(grammars, 1)
        assert again.error is None
    finally:
        release.set()
        grammars.close()


def test_a_grammar_that_is_known_or_short_does_not_wait_for_a_long_one() -> None:
    release = threading.Event()

    def compiler(spec: GrammarSpec) -> Any:
        assert spec.text != "long" or release.wait(20)

    grammars = GrammarQueue(compiler, timeout_s=30)
    try:
        grammars.add(_request("long", "long"))
        grammars.add(_request("short", "short"))
        (short,) = wait_for(grammars, 1)
        assert short.request.id == "short" and short.error is None
        assert grammars.has_compiled(GrammarSpec("regex", "short"))
        assert not grammars.has_compiled(GrammarSpec("regex", "long"))
        release.set()
        (long,) = wait_for(grammars, 1)
        assert long.error is None and grammars.has_compiled(GrammarSpec("regex", "long"))
    finally:
        release.set()
        grammars.close()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def _request(name: str, text: str) -> Request:
    return Request(name, [1], SamplingParams(), 1, grammar=GrammarSpec("regex", text))


# -- at the front ----------------------------------------------------------------------------------

ROUTES = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
    ("/v1/completions", {"prompt": "hi"}),
    ("/v1/responses", {"input": "hi"}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}),
]


@pytest.mark.parametrize(("path", "body"), ROUTES)
@pytest.mark.parametrize("when", ["compiling", "later"])
def test_every_api_says_400(path: str, body: dict[str, Any], when: str) -> None:
    why = "The grammar is too complex: too many states."
    script = GrammarTooComplexError(why) if when == "compiling" else f"the quick brown!!{why}"
    scripted = Scripted(script)
    answer = scripted.post(path, {"model": MODEL, **body})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["message"] == why and error["type"] == "invalid_request_error"
    if path != "/v1/messages":
        assert error["code"] == "grammar_too_complex"
    assert scripted.metrics.seen == [(path, "refused")]


@pytest.mark.parametrize(
    ("error", "begins"),
    [
        (GrammarError("too many states"), "The grammar is too complex (at output token"),
        (DeadEndError("too many states"), "The grammar is too complex (at output token"),
        (RuntimeError("too many states"), "The grammar failed (at output token"),
    ],
    ids=["complex", "dead end", "broken"],
)
def test_a_matcher_that_gives_up_in_the_middle_is_told_in_our_words(
    llm: LLM,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: BaseException,
    begins: str,
) -> None:
    allowed = LlguidanceMatcher.allowed
    calls: list[int] = []

    def fail(self: LlguidanceMatcher) -> bytes:
        calls.append(1)
        if len(calls) > 5:
            raise error
        return allowed(self)

    monkeypatch.setattr(LlguidanceMatcher, "allowed", fail)
    with running(llm) as front:
        front.send(submit("a", grammar=GrammarSpec("regex", "[a-z ]{200}"), max_tokens=50))
        generation = front.answers("a")["a"][-1].generation
    assert generation is not None and generation.finish_reason is FinishReason.ERROR
    told = str(generation.error)
    assert told.startswith(begins)
    assert told.endswith(("Repeat less, or split it.", "Loosen it there.", "make it simpler."))
    assert "too many states" not in told and "too many states" in caplog.text
