"""The engine's loop behind a socket, on a tiny random checkpoint, in a thread of this process."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import threading
from functools import partial
from pathlib import Path

import pytest

from flashdraft.core import FinishReason, Request, SamplingParams, TokenEvent
from flashdraft.killable import frames
from flashdraft.killable.frames import FrameReader, Message
from flashdraft.llm import LLM
from flashdraft.server.process import wire, worker
from flashdraft.server.process.life import WORKER_COMMAND
from flashdraft.server.process.worker import Worker
from tests.tiny import VOCAB_SIZE, make_tiny_checkpoint
from tests.unit.server.process.worker_front import PROMPT, Front, running, submit


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = make_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))
    return LLM(str(folder), dtype="float32", max_batch=4, cache_gb=0.001)


def _is_about(name: str, message: Message) -> bool:
    return message.get("id") == name


def test_answers_are_those_of_the_engine_itself(llm: LLM) -> None:
    (expected,) = llm.generate([PROMPT], SamplingParams(max_tokens=20, ignore_eos=True, logprobs=2))
    with running(llm) as front:
        front.send(submit("a", logprobs=2), submit("b", max_tokens=7), submit("c", verify=0))
        events = front.answers("a", "b", "c")
    whole = events["a"][-1].generation
    assert whole is not None
    assert (whole.token_ids, whole.text) == (expected.token_ids, expected.text)
    assert whole.logprobs == expected.logprobs
    assert [t for event in events["a"] for t in event.token_ids] == expected.token_ids
    assert "".join(event.text for event in events["a"]) == expected.text
    shorter, plain = events["b"][-1].generation, events["c"][-1].generation
    assert shorter is not None and shorter.token_ids == expected.token_ids[:7]
    assert plain is not None and plain.stats.drafted == 0
    assert plain.token_ids == expected.token_ids


def test_steps_say_what_the_engine_did(llm: LLM) -> None:
    with running(llm) as front:
        front.send(submit("a"), submit("b"))
        front.answers("a", "b")
    steps = [message for message in front.messages if message["type"] == "step"]
    started = [pair for step in steps for pair in step["started"]]
    assert sorted(name for name, _ in started) == ["a", "b"]
    assert all(seconds >= 0 for _, seconds in started)
    total = steps[0]["gauges"]["pages_total"]
    assert steps[0]["gauges"] == {**steps[0]["gauges"], "running": 2, "waiting": 0}
    assert 0 < steps[0]["gauges"]["pages_used"] <= total
    assert steps[-1]["gauges"] == {
        "running": 0,
        "waiting": 0,
        "pages_used": 0,
        "pages_total": total,
    }
    assert wire.step_from_dict(steps[0]["stats"]).num_prefill_tokens > 0


@pytest.mark.parametrize(
    ("prompt", "kind"),
    [([], "RequestError"), ([VOCAB_SIZE], "RequestError"), ([1] * 5000, "ContextLengthError")],
)
def test_a_wrong_request_is_refused_and_the_others_go_on(
    llm: LLM, prompt: list[int], kind: str
) -> None:
    with running(llm) as front:
        front.send(submit("good"), submit("bad", prompt))
        refusal = front.read_until(lambda message: message["type"] == "refused")
        assert (refusal["id"], refusal["kind"]) == ("bad", kind) and refusal["message"]
        assert front.answers("good")["good"][-1].generation is not None


def test_a_request_that_cannot_be_read_is_refused(llm: LLM) -> None:
    with running(llm) as front:
        bad = submit("bad")
        del bad["request"]["params"]["stop"]
        wrong = submit("wrong")
        wrong["request"]["params"]["top_p"] = 7
        front.send(bad, wrong, submit("good"))
        kinds: dict[str, str] = {}
        for name in ("bad", "wrong"):
            refusal = front.read_until(partial(_is_about, name))
            kinds[name] = refusal["kind"]
        assert kinds == {"bad": "WireError", "wrong": "RequestError"}
        assert front.answers("good")["good"][-1].generation is not None


def test_a_cancelled_request_ends_within_a_step(llm: LLM) -> None:
    with running(llm) as front:
        front.send(submit("long", max_tokens=900))
        front.read_until(lambda message: bool(message.get("events")))
        front.send({"type": "cancel", "id": "long"}, {"type": "cancel", "id": "unknown"})
        generation = front.answers("long")["long"][-1].generation
        assert generation is not None and generation.finish_reason is FinishReason.CANCELLED
        assert len(generation.token_ids) < 900
        assert front.messages[-1]["gauges"]["pages_used"] == 0
        front.send(submit("next"))
        assert front.answers("next")["next"][-1].generation is not None


def test_a_request_can_be_cancelled_before_its_first_step(llm: LLM) -> None:
    with running(llm) as front:
        front.send(submit("a"), {"type": "cancel", "id": "a"})
        (event,) = front.answers("a")["a"]
        assert event.generation is not None and event.generation.token_ids == []


def test_an_engine_that_fails_fails_its_requests_and_lives_on(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with running(llm) as front:
        with monkeypatch.context() as patched:

            def fail(*_: object) -> None:
                raise RuntimeError("out of luck")

            patched.setattr(llm.engine.scheduler, "schedule", fail)
            front.send(submit("a"), submit("b"))
            events = front.answers("a", "b")
        for name in ("a", "b"):
            generation = events[name][-1].generation
            assert generation is not None and generation.finish_reason is FinishReason.ERROR
            assert "log" in str(generation.error) and "RuntimeError" in str(generation.error)
            assert "out of luck" not in str(generation.error)  # that is for the log
        assert "out of luck" in caplog.text
        front.send(submit("c"))
        assert front.answers("c")["c"][-1].generation is not None


def test_an_answer_too_long_for_the_wire_is_an_error(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frames, "MAX_FRAME_BYTES", 3000)
    request = Request("a", PROMPT * 20, SamplingParams(max_tokens=2), 7, prompt_logprobs=5)
    with running(llm) as front:
        front.send({"type": "submit", "request": wire.request_to_dict(request)})
        generation = front.answers("a")["a"][-1].generation
        assert generation is not None and generation.finish_reason is FinishReason.ERROR
        assert "too many" in str(generation.error)


def test_the_worker_says_that_it_lives_while_a_step_takes_long(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "BEAT_S", 0.05)
    goes_on, step = threading.Event(), llm.engine.step

    def slow_step() -> list[TokenEvent]:
        assert goes_on.wait(10)
        return step()

    monkeypatch.setattr(llm.engine, "step", slow_step)
    with running(llm) as front:
        front.send(submit("a"))
        for _ in range(5):
            front.messages.clear()
            front.read_until(lambda message: message["type"] == "alive")
        goes_on.set()
        assert front.answers("a")["a"][-1].generation is not None


def test_signs_of_life_do_not_come_between_the_halves_of_a_frame(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "BEAT_S", 0.0)
    with running(llm, send_buffer=4096) as front:
        request = Request("a", PROMPT * 20, SamplingParams(max_tokens=20), 7, prompt_logprobs=20)
        front.send({"type": "submit", "request": wire.request_to_dict(request)})
        generation = front.answers("a")["a"][-1].generation
        assert generation is not None and generation.prompt_logprobs is not None
        assert any(message["type"] == "alive" for message in front.messages)


def test_a_message_that_is_none_ends_the_worker(llm: LLM) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(frames.pack({"type": "surprise"}))
        with pytest.raises(frames.WireError, match="surprise"):
            Worker(theirs, llm.engine).run()


def test_a_model_that_does_not_load_is_reported(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert worker.serve(theirs, {"model": str(tmp_path / "nothing")}) == worker.EXIT_FAILED
        messages = list(FrameReader().feed(ours.recv(1 << 16)))
    assert [message["type"] for message in messages] == ["loading", "failed"]
    assert messages[1]["kind"] in ("ModelNotFoundError", "CheckpointError")


def test_the_front_is_told_what_was_loaded(llm: LLM) -> None:
    info = worker.describe(llm)
    assert info["max_context"] == llm.engine.max_context and info["max_batch"] == 4
    assert info["vocab_size"] == VOCAB_SIZE and info["eos_token_ids"] == [2]
    assert (info["device"], info["dtype"]) == ("cpu", "float32")
    assert info["vision"] is None


def start_process(
    tmp_path: Path, **streams: int
) -> tuple[subprocess.Popen[str], socket.socket, Front]:
    folder = make_tiny_checkpoint(tmp_path)
    ours, theirs = socket.socketpair()
    command = [*WORKER_COMMAND, str(theirs.fileno())]
    command.append(json.dumps({"model": str(folder), "dtype": "float32"}))
    with theirs:
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()], text=True, **streams)
    ours.settimeout(60)
    return process, ours, Front(ours)


def test_the_process_ends_with_the_fronts_end_of_the_socket(tmp_path: Path) -> None:
    process, ours, front = start_process(tmp_path)
    front.read_until(lambda message: message["type"] == "loading")
    process.send_signal(signal.SIGINT)  # Ctrl-C is the front's to hear
    front.read_until(lambda message: message["type"] == "ready")
    front.send(submit("a", max_tokens=900))
    front.read_until(lambda message: bool(message.get("events")))
    ours.close()  # as the kernel does for a front that was killed
    assert process.wait(20) == 0


def test_the_process_logs_lines_of_json(tmp_path: Path) -> None:
    process, ours, front = start_process(tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    front.read_until(lambda message: message["type"] == "ready")
    front.send(submit("a", [61, 62, 63, 64]))
    front.answers("a")
    front.send({"type": "surprise"})
    out, err = process.communicate(timeout=60)
    assert process.returncode == worker.EXIT_FAILED and err == ""
    (line,) = map(json.loads, out.splitlines())
    assert (line["event"], line["level"], line["process"]) == ("log", "error", "engine")
    assert line["logger"] == "flashdraft.server.process.worker" and line["time"] and line["message"]
    assert "WireError" in line["exception"] and "61, 62" not in out
    ours.close()


def test_bad_arguments_are_a_usage_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr("sys.argv", ["worker", "x"])
    assert worker.main() == 2
    assert "usage" in capsys.readouterr().err
