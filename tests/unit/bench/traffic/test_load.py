"""Loads and questions: when requests come, what they ask, what is refused."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest

from flashdraft.bench.run.served import Served
from flashdraft.bench.run.stream import Endpoint
from flashdraft.bench.tasks import BenchPrompt, Task
from flashdraft.bench.traffic.load import MAX_CLIENTS, LengthRange, OfferedLoad
from flashdraft.bench.traffic.questions import Questions
from flashdraft.errors import RequestError

PROMPTS = tuple(BenchPrompt(({"role": "user", "content": f"Question {n}"},)) for n in range(4))
TASK = Task("task", PROMPTS, "task")


def questions(kind: str = "flashdraft", **more: Any) -> Questions:
    served = Served(Endpoint("http://127.0.0.1:1"), kind, "tiny", False)
    return Questions(served, [TASK], 32, 5, **{"is_greedy": False, **more})


@pytest.mark.parametrize("burstiness", [0.3, 1.0, 4.0])
def test_arrivals_keep_their_rate_whatever_their_burstiness(burstiness: float) -> None:
    load = OfferedLoad(rate=20.0, num_requests=6000, burstiness=burstiness, seed=2)
    times = list(load.arrivals())
    assert len(times) == 6000 and times[0] == 0.0 and times == list(load.arrivals())
    gaps = [later - earlier for earlier, later in zip(times, times[1:], strict=False)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(0.05, rel=0.1)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert deviation / mean == pytest.approx(burstiness**-0.5, rel=0.1)


def test_a_load_ends_by_time_or_by_count() -> None:
    assert all(at < 2.0 for at in OfferedLoad(rate=50.0, duration_s=2.0).arrivals())
    both = OfferedLoad(clients=2, duration_s=2.0, num_requests=3)
    assert both.may_send(2, 1.9) and not both.may_send(3, 0.1) and not both.may_send(0, 2.0)
    assert [one.label for one in (both, OfferedLoad(clients=1, duration_s=1))] == [
        "2 clients",
        "1 client",
    ]
    assert OfferedLoad(rate=0.5, duration_s=1).label == "0.5 requests/s"


@pytest.mark.parametrize(
    "wrong",
    [
        {"duration_s": 1.0},
        {"rate": 1.0, "clients": 1, "duration_s": 1.0},
        {"rate": 1.0},
        {"clients": MAX_CLIENTS + 1, "duration_s": 1.0},
        {"rate": 1.0, "duration_s": 1.0, "burstiness": 1e-9},
    ],
)
def test_a_load_that_is_none_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        OfferedLoad(**wrong)


@pytest.mark.parametrize("text", ["", "0", "5-2", "a-b", "1-99999999999", "-1", "3-", "1e3"])
def test_a_range_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(RequestError):
        LengthRange.parse(text)


def test_ranges_are_read_and_written_alike() -> None:
    assert LengthRange.parse("256-1536") == (256, 1536) and str(LengthRange(7, 7)) == "7"


def test_a_question_has_the_servers_own_sampling() -> None:
    body = questions("someone").body(0)
    assert body.keys() == {"model", "messages", "max_tokens", "seed", "stream", "stream_options"}
    assert body["messages"][0] in [prompt.messages[0] for prompt in PROMPTS]
    assert questions("someone", is_greedy=True).body(0)["temperature"] == 0.0
    assert questions().body(3) == questions().body(3)
    assert len({questions().body(n)["messages"][0]["content"] for n in range(40)}) == 4


def test_known_servers_are_asked_for_whole_lengths() -> None:
    asked = questions(prompt_tokens=LengthRange(5, 9), output_tokens=LengthRange(3, 4), verify=0)
    bodies = list(islice(map(asked.body, range(40)), 40))
    assert {len(one["messages"][0]["content"].split()) for one in bodies} == {5, 6, 7, 8, 9}
    assert {one["max_tokens"] for one in bodies} == {3, 4}
    assert all(one["ignore_eos"] and one["flashdraft"] == {"verify": 0} for one in bodies)
    assert asked.problems() == []
    other = questions("someone", output_tokens=LengthRange(3, 4))
    assert "ignore_eos" not in other.body(0) and "ignore_eos" in other.problems()[0]
    salts = {questions("vllm").body(n)["cache_salt"] for n in range(5)}
    assert len(salts) == 5
