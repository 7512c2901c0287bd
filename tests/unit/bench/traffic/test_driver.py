"""Loads on a server that says what it is told: what is sent when, failures, hangs, interrupts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from flashdraft.bench.run.served import find_served
from flashdraft.bench.run.stream import Endpoint
from flashdraft.bench.tasks import BenchPrompt, Task
from flashdraft.bench.traffic.driver import INTERRUPTED, MAX_FAILURES_IN_ROW, run_load
from flashdraft.bench.traffic.load import OfferedLoad
from flashdraft.bench.traffic.offer import Offer
from flashdraft.bench.traffic.outcome import Goal, LoadRecord, describe_row
from flashdraft.bench.traffic.questions import Questions
from flashdraft.bench.traffic.wire import Door
from flashdraft.errors import EngineLostError
from tests.unit.bench.run.openai_server import (
    Act,
    Handler,
    OpenAIServer,
    answer,
    chunk,
    hang,
    refuse,
    stream_of,
)

PROMPTS = tuple(BenchPrompt(({"role": "user", "content": f"Question {n}"},)) for n in range(4))
TASK = Task("task", PROMPTS, "task")


def questions(server: OpenAIServer, api_key: str | None = None) -> Questions:
    served = find_served(Endpoint.parse(server.url, api_key), None)
    return Questions(served, [TASK], 16, 0, is_greedy=False)


def offer_load(
    server: OpenAIServer,
    limit_s: float = 10.0,
    is_interrupted: Callable[[], bool] = lambda: False,
    **load: Any,
) -> LoadRecord:
    record = LoadRecord(OfferedLoad(**load))
    asked = questions(server)
    run_load(Door.find(asked.served.endpoint), asked, record, limit_s, is_interrupted)
    return record


def test_clients_ask_again_when_they_are_answered() -> None:
    with OpenAIServer() as server:
        server.script = [answer("a", "b", "c", pause_s=0.01)]
        record = offer_load(server, clients=3, num_requests=12)
        assert server.most_running == 3 == record.most_in_flight
    row = describe_row(record, Goal(ttft_s=5.0, gap_s=5.0))
    assert row["num_sent"] == row["num_answered"] == 12 and row["goodput_share"] == 1.0
    assert row["output_tokens"] == 36 and row["prompt_tokens"] == 120
    assert row["gap_p50_s"] >= 0.009 and row["requests_per_s"] > 5
    assert row["tokens_per_s"] == pytest.approx(36 / row["window_s"], rel=0.01)
    assert record.num_in_flight == 0 and record.lags and record.cpu_s > 0


def test_an_open_loop_waits_for_nobody() -> None:
    with OpenAIServer() as server:
        server.script = [answer("a", "b", pause_s=0.3)]
        record = offer_load(server, rate=40.0, num_requests=12)
        assert server.most_running > 3
    assert [one.is_answered for one in record.outcomes] == [True] * 12
    dues = sorted(one.due_s for one in record.outcomes)
    assert dues == list(record.load.arrivals())


def test_a_duration_ends_the_sending_and_answers_are_waited_for() -> None:
    with OpenAIServer() as server:
        server.script = [answer("a", "b", pause_s=0.15)]
        record = offer_load(server, clients=2, duration_s=0.4)
    assert record.window_s == 0.4 <= record.wall_s < 3.0
    assert all(one.is_answered for one in record.outcomes) and record.num_sent >= 2


def test_what_fails_is_counted_and_the_load_goes_on() -> None:
    with OpenAIServer() as server:
        server.script = [
            refuse(500, "broken"),
            refuse(429, "later", retry_after="0"),
            stream_of(chunk("a", 1)),  # ends without its mark
            stream_of({"choices": [{"delta": {"content": 3}}]}),
            stream_of("{no JSON"),
            answer("fine"),
        ]
        record = offer_load(server, clients=1, num_requests=7)
    errors = [one.error for one in record.outcomes if one.error is not None]
    assert len(errors) == 5 and sum(one.is_answered for one in record.outcomes) == 2
    for told, part in zip(errors, ("500: broken", "429: later", "before its end"), strict=False):
        assert part in told
    assert "content is 3" in errors[3] and "no JSON" in errors[4]


def raw(*parts: bytes, pause_s: float = 0.0) -> Act:
    """Writes bytes as they are, and closes."""

    def act(handler: Handler, body: dict[str, Any]) -> None:
        for part in parts:
            handler.wfile.write(part)
            handler.wfile.flush()
            time.sleep(pause_s)
        handler.close_connection = True

    return act


EVENTS = (
    b'data: {"choices":[{"delta":{"content":"hello"}}]}\n\n'
    b'data: {"choices":[],"usage":{"completion_tokens":2,"prompt_tokens":3}}\n\ndata: [DONE]\n\n'
)


def in_chunks(data: bytes, size: int) -> Iterator[bytes]:
    for begin in range(0, len(data), size):
        part = data[begin : begin + size]
        yield f"{len(part):x};note=1\r\n".encode() + part + b"\r\n"
    yield b"0\r\n\r\n"


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_chunked_answers_are_put_together(size: int) -> None:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    with OpenAIServer() as server:
        server.script = [raw(head, *in_chunks(EVENTS, size))]
        record = offer_load(server, clients=1, num_requests=1)
    (one,) = record.outcomes
    assert one.error is None and one.output_tokens == 2 and one.prompt_tokens == 3


@pytest.mark.parametrize(
    ("parts", "told"),
    [
        ((b"not http at all\r\n\r\n",), "no HTTP"),
        ((b"",), "ended before the answer"),
        ((b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 300,), "more than 200 lines"),
        ((b"HTTP/1.1 200 OK\r\n\r\n" + b"a" * 1_200_000,), "more than 1048576 bytes"),
        ((b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",), "chunk of size"),
        ((b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\ndata",), "before its end"),
    ],
)
def test_answers_of_no_known_form_are_told(parts: tuple[bytes, ...], told: str) -> None:
    with OpenAIServer() as server:
        server.script = [raw(*parts), answer("fine")]
        record = offer_load(server, clients=1, num_requests=2)
    assert told in (record.outcomes[0].error or "") and record.outcomes[1].is_answered


@pytest.mark.parametrize(
    "act", [hang(3.0), raw(b"HTTP/1.1 200 OK\r\n\r\n", *[b": still here\n"] * 30, pause_s=0.1)]
)
def test_no_answer_hangs_the_client(act: Act) -> None:
    with OpenAIServer() as server:
        server.script = [act]
        begin = time.monotonic()
        record = offer_load(server, limit_s=0.3, clients=1, num_requests=1)
        assert time.monotonic() - begin < 2.0
    assert record.outcomes[0].error == "no whole answer within 0.3 s"


def test_a_server_that_answers_nothing_any_more_ends_the_load() -> None:
    with OpenAIServer() as server:
        door = Door.find(Endpoint.parse(server.url))
        asked = questions(server)
    record = LoadRecord(OfferedLoad(rate=2000.0, num_requests=2000))
    run_load(door, asked, record, 5.0)
    assert MAX_FAILURES_IN_ROW <= len(record.outcomes) < 2000
    assert record.stopped is not None and "in a row failed" in record.stopped
    with pytest.raises(EngineLostError, match="cannot be reached"):
        Door.find(Endpoint.parse(server.url))


def test_an_interrupt_keeps_what_was_measured() -> None:
    with OpenAIServer() as server:
        server.script = [*[answer("quick")] * 4, answer("slow", "er", pause_s=5.0)]
        begin = time.monotonic()
        record = offer_load(
            server,
            is_interrupted=lambda: len(server.running) == 2 and len(server.questions) == 6,
            clients=2,
            duration_s=60.0,
        )
        assert time.monotonic() - begin < 4.0
    assert record.stopped == INTERRUPTED
    row = describe_row(record, Goal())
    assert row["num_answered"] == 4 and row["num_unfinished"] == 2 and row["num_failed"] == 0
    assert 0.0 < row["window_s"] < 4.0


def test_a_refused_key_ends_the_load_at_once() -> None:
    with OpenAIServer() as server:
        server.script = [refuse(401, "who are you")]
        record = offer_load(server, clients=2, duration_s=30.0)
    assert record.wall_s < 5.0 and "--api-key" in (record.stopped or "")


def test_loads_follow_one_another_after_a_warm_up() -> None:
    with OpenAIServer() as server:
        asked = questions(server)
        loads = [OfferedLoad(clients=n, num_requests=4) for n in (1, 2)]
        offer, rows = Offer(asked, loads, 10.0), []
        offer.run(lambda: False, lambda text: None, lambda: rows.append(len(offer.rows)))
        assert rows == [1, 2] and not offer.is_partial and offer.num_warm_ups == 2
        assert len(server.questions) == 2 * (2 + 4)
        server.script = [refuse(500, "broken")]
        with pytest.raises(EngineLostError, match="no request was answered; HTTP 500: broken"):
            offer.run(lambda: False, lambda text: None, lambda: None)
        before = len(offer.rows)
        server.script = [answer("fine")]
        offer.run(lambda: True, lambda text: None, lambda: None)
        assert len(offer.rows) == before and offer.is_partial
