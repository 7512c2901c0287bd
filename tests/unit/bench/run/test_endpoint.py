"""Endpoints of all kinds, from a server that says what it is told: answers, refusals, deaths."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from flashdraft.bench.results import DRAFT, PLAIN, Measurement, Reply, Results
from flashdraft.bench.run.endpoint import Asking, EndpointRunner
from flashdraft.bench.run.measure import Run, Sweep, run_sweep
from flashdraft.bench.run.served import find_served
from flashdraft.bench.run.stream import Endpoint
from flashdraft.bench.tasks import BenchPrompt, Task
from flashdraft.errors import EngineLostError
from tests.unit.bench.run.openai_server import (
    Handler,
    OpenAIServer,
    answer,
    chunk,
    hang,
    refuse,
    stream_of,
)
from tests.unit.bench.run.test_counters import vllm_page

ASKING = Asking(greedy=True, thinking=False, seed=5)
PROMPTS = tuple(BenchPrompt(({"role": "user", "content": f"Question {n}"},)) for n in range(4))
TALK = BenchPrompt(({"role": "user", "content": "First"},), ("Second",))


def make_runner(server: OpenAIServer, asking: Asking = ASKING, **more: Any) -> EndpointRunner:
    served = find_served(Endpoint.parse(server.url), None)
    endpoint = dataclasses.replace(served.endpoint, **more)
    return EndpointRunner(dataclasses.replace(served, endpoint=endpoint), None, asking)


def ask(
    server: OpenAIServer,
    prompts: tuple[BenchPrompt, ...] = PROMPTS,
    concurrency: int = 1,
    mode: str = DRAFT,
    asking: Asking = ASKING,
    **more: Any,
) -> Measurement:
    run = Run("task", prompts, concurrency, mode, max_tokens=16, is_warm_up=True)
    return make_runner(server, asking, **more).run(run, lambda reply: None)


# -- what is sent ------------------------------------------------------------------------------


def test_a_question_to_an_unknown_server_has_openais_fields_alone() -> None:
    with OpenAIServer("someone") as server:
        ask(server, PROMPTS[:1])
    assert server.questions == [
        {
            "model": "tiny",
            "messages": [{"role": "user", "content": "Question 0"}],
            "max_tokens": 16,
            "seed": 5,
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0.0,
        }
    ]


@pytest.mark.parametrize("kind", ["flashdraft", "vllm", "sglang"])
def test_known_servers_are_told_about_thinking_and_count_along(kind: str) -> None:
    with OpenAIServer(kind) as server:
        ask(server, PROMPTS[:2], asking=Asking(greedy=False, thinking=True, seed=1))
    first, second = server.questions
    assert first["chat_template_kwargs"] == {"enable_thinking": True}
    assert first["stream_options"]["continuous_usage_stats"] is True
    assert "temperature" not in first  # the server's own recommendation
    assert (first["seed"], second["seed"]) == (1, 2)
    # no row may find the last one's prompts in the prefix cache, where that can be asked for
    assert ("cache_salt" in first) == (kind != "flashdraft")


def test_our_own_server_decodes_plainly_on_request() -> None:
    with OpenAIServer("flashdraft") as server:
        assert make_runner(server).modes == (PLAIN, DRAFT)
        ask(server, PROMPTS[:1], mode=PLAIN)
        ask(server, PROMPTS[:1])
        ask(server, PROMPTS[:1], asking=dataclasses.replace(ASKING, verify=3))
    fields = [question.get("flashdraft") for question in server.questions]
    assert fields == [{"verify": 0}, None, {"verify": 3}]


def test_another_servers_baseline_is_a_second_server() -> None:
    with OpenAIServer("vllm") as server, OpenAIServer("vllm") as plain:
        assert make_runner(server).modes == (DRAFT,)
        assert any("--plain-url" in one for one in make_runner(server).problems())
        served = [find_served(Endpoint.parse(one.url), None) for one in (server, plain)]
        runner = EndpointRunner(served[0], served[1], ASKING)
        assert runner.modes == (PLAIN, DRAFT)
        for mode in runner.modes:
            runner.run(Run("t", PROMPTS[:1], 1, mode, 8), lambda reply: None)
        assert len(server.questions) == len(plain.questions) == 1
        assert "flashdraft" not in plain.questions[0]


def test_a_second_turn_is_sent_with_the_servers_own_answer() -> None:
    with OpenAIServer() as server:
        server.script = [answer("One", "!"), answer("Two")]
        measured = ask(server, (TALK,))
    assert server.questions[1]["messages"] == [
        {"role": "user", "content": "First"},
        {"role": "assistant", "content": "One!"},
        {"role": "user", "content": "Second"},
    ]
    assert [reply.text for reply in measured.replies[0]] == ["One!", "Two"]


def test_as_many_questions_are_in_flight_as_asked() -> None:
    with OpenAIServer() as server:
        server.script = [answer("a", "b", pause_s=0.05)]
        measured = ask(server, PROMPTS * 2, concurrency=3)
        assert server.most_running == 3
        assert list(measured.replies) == list(range(8))


@pytest.mark.parametrize(("kind", "is_primed"), [("flashdraft", True), ("vllm", False)])
def test_no_mode_pays_for_the_others_prefill(kind: str, is_primed: bool) -> None:
    with OpenAIServer(kind) as server:
        runner = make_runner(server)
        for concurrency in (1, 2):
            runner.run(Run("task", (TALK, *PROMPTS), concurrency, DRAFT, 16), lambda reply: None)
    lengths = [question["max_tokens"] for question in server.questions]
    # every prompt's opening once before the first row, unless prompts are told apart by a salt
    assert lengths == [1] * 5 * is_primed + [16] * 12
    salts = {question.get("cache_salt") for question in server.questions}
    assert len(salts) == (1 if is_primed else 2)


# -- what is read ------------------------------------------------------------------------------


class Clock:
    """The client's clock: it stands still until the server has seen its last words read."""

    def __init__(self) -> None:
        self._now, self._reads = 0.0, threading.Semaphore(0)

    def perf_counter(self) -> float:
        now = self._now
        self._reads.release()
        return now

    def go_on(self, seconds: float) -> None:
        assert self._reads.acquire(timeout=30)
        self._now += seconds


def test_an_answers_times_and_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    cached = {"prompt_tokens_details": {"cached_tokens": 6}}

    def events() -> Iterator[dict[str, Any] | str]:
        for text, count, pause_s in (("ab", 1, 0.1), ("cd", 3, 0.1), ("ef", 7, 5.0)):
            yield chunk(text, count)
            clock.go_on(pause_s)
        yield {"choices": [], "usage": {"prompt_tokens": 10, "completion_tokens": 7, **cached}}
        yield "[DONE]"

    monkeypatch.setattr("flashdraft.bench.run.stream.time", clock)
    with OpenAIServer() as server:
        server.script = [lambda handler, body: handler.stream(events())]
        [reply] = ask(server, PROMPTS[:1]).replies[0]
    assert reply.text == reply.content == "abcdef"
    assert reply.output_tokens == 7 and reply.prompt_tokens == 10 and reply.cached_tokens == 6
    assert reply.seconds - reply.ttft_s == pytest.approx(
        0.2
    )  # to the last token, not the last word
    # a chunk's time is shared by its tokens
    assert len(reply.token_gaps) == 6
    assert reply.token_gaps == pytest.approx([0.05] * 2 + [0.025] * 4)
    assert reply.steps is None and reply.buckets is None


def test_where_the_server_does_not_count_along_characters_do() -> None:
    with OpenAIServer() as server:
        server.script = [answer("a", "b", "cccccccc", tokens=10, pause_s=0.01)]
        [reply] = ask(server, PROMPTS[:1]).replies[0]
    assert [len(set(reply.token_gaps)), len(reply.token_gaps)] == [2, 9]
    assert reply.token_gaps[1:] == [reply.token_gaps[1]] * 8


def test_thoughts_are_text_but_not_content() -> None:
    thought = {"choices": [{"index": 0, "delta": {"reasoning_content": "Hm. "}}]}
    usage = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}
    with OpenAIServer() as server:
        server.script = [stream_of(thought, chunk("Yes", None), usage, "[DONE]")]
        [reply] = ask(server, PROMPTS[:1]).replies[0]
    assert reply.text == "Hm. Yes" and reply.content == "Yes"


def test_our_own_server_tells_every_requests_steps() -> None:
    told = {"steps": 3, "histogram": {"1": 1, "4": 2}, "mean_accepted_length": 3.0}
    with OpenAIServer("flashdraft") as server:
        server.script = [answer("a", statistics=told, tokens=10)]
        measured = ask(server)
    assert measured.acceptance.histogram == {1: 4, 4: 8}
    assert {reply.steps for reply in measured.every} == {3}


def test_vllms_metrics_are_read_around_the_row() -> None:
    drafts = 0

    def page() -> str:
        return vllm_page(100 + drafts, [50 + drafts, 20])

    def draft_and_answer(handler: Handler, body: dict[str, Any]) -> None:
        nonlocal drafts
        drafts += 5
        answer("a", "b")(handler, body)

    with OpenAIServer("vllm") as server:
        server.metrics = page
        server.script = [draft_and_answer]
        measured = ask(server)
        assert make_runner(server).problems() == [
            "There is no plain baseline: it would need a second server, named by --plain-url."
        ]
    assert measured.acceptance.histogram == {1: 0, 2: 20, 3: 0}
    assert list(measured.acceptance.accepted) == [20, 0]


@pytest.mark.parametrize(("fails", "pooled"), [(False, 3.5), (True, 4.0)])
def test_the_pooled_length_of_vllm_is_that_of_its_answers(fails: bool, pooled: float) -> None:
    """Each answer takes 2 drafts, 8 tokens of which the last is beyond the answer's end."""
    drafts = 0

    def draft_and_answer(handler: Handler, body: dict[str, Any]) -> None:
        nonlocal drafts
        drafts += 2
        act = refuse(500, "it broke") if fails and drafts == 2 else answer("a", tokens=8)
        act(handler, body)

    with OpenAIServer("vllm") as server:
        server.metrics = lambda: vllm_page(drafts, [drafts] * 3)
        server.script = [draft_and_answer]
        acceptance = ask(server).acceptance
    assert acceptance.counted == 4.0
    # what the counters hold of a prompt without an answer is not known
    assert acceptance.pooled == pooled


def test_counters_that_make_no_sense_leave_the_accepted_length_unknown() -> None:
    pages = [vllm_page(100, [50, 20])] * 2 + [vllm_page(3, [2, 1])] * 9  # it was started anew
    with OpenAIServer("vllm") as server:
        server.metrics = lambda: pages.pop(0)
        measured = ask(server)
    assert not measured.acceptance.histogram and measured.acceptance.pooled is None
    assert len(measured.replies) == 4 and measured.num_failed == 0
    [problem] = measured.problems
    assert problem.startswith(f"The accepted length of {server.url} is not known in task, conc")
    assert "vllm:spec_decode_num_drafts went from 100 to 3" in problem


def test_an_endpoint_without_metrics_is_told() -> None:
    with OpenAIServer("vllm") as server:
        problems = make_runner(server).problems()
        measured = ask(server)
        assert make_runner(server).lacks_metrics
    assert problems[0] == f"{server.url} shows no metrics: accepted lengths are not known."
    assert not measured.acceptance.histogram and measured.acceptance.pooled is None
    with OpenAIServer("someone") as server:
        server.metrics = lambda: "requests_total 3\n"
        assert "none of flashdraft, vLLM or SGLang" in make_runner(server).problems()[0]
        assert not make_runner(server).lacks_metrics  # nobody expects them of it
    with OpenAIServer("vllm") as server:
        server.metrics = lambda: "vllm:num_requests_running 0\n"
        assert ask(server).problems == [f"The metrics of {server.url} tell of no drafts."]


# -- what goes wrong ---------------------------------------------------------------------------


def test_a_busy_server_is_asked_again_when_it_says() -> None:
    with OpenAIServer() as server:
        server.script = [refuse(429, retry_after="0.2"), refuse(503, retry_after="0"), answer("a")]
        begin = time.monotonic()
        measured = ask(server, PROMPTS[:1])
    assert time.monotonic() - begin >= 0.2
    assert measured.num_failed == 0 and len(server.questions) == 3
    [problem] = measured.problems
    assert "come back later 2 times" in problem and "0.2 s of waiting" in problem
    assert measured.replies[0][0].ttft_s < 0.2  # waiting is not the answer's time


def test_a_server_that_asks_for_an_hour_is_not_waited_for() -> None:
    with OpenAIServer() as server:
        server.script = [refuse(429, "quota", retry_after="3600"), answer("a")]
        measured = ask(server)
    assert measured.num_failed == 1 and len(measured.replies) == 3
    assert "asks to wait 3600 s; the limit is 60 s" in measured.problems[0]


def told_usage(usage: Any) -> dict[str, Any]:
    return chunk("a", None) | {"usage": usage}


def told_end(**usage: Any) -> tuple[dict[str, Any], str]:
    return told_usage({"completion_tokens": 1, **usage}), "[DONE]"


USAGE = {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 1}}


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (refuse(500, "it broke"), "HTTP 500: it broke"),
        (refuse(400, "too long"), "HTTP 400: too long"),
        (stream_of({"error": {"message": "lost a page"}}), "the stream failed: lost a page"),
        (stream_of(chunk("a", None)), "stopped before its end"),
        (stream_of("{nonsense"), "no JSON"),
        (stream_of(chunk("a", None), "[DONE]"), "had not a usage"),
        (stream_of(USAGE | {"usage": None}, "[DONE]"), "had not any text"),
        (stream_of({"choices": [3]}), "a choice is 3, no object"),
        (stream_of({"choices": 3}), "choices is 3, no list"),
        (stream_of({"choices": [{"delta": "a"}]}), "delta is 'a', no object"),
        (stream_of({"choices": [{"delta": {"content": ["a"]}}]}), "content is ['a'], no text"),
        (stream_of(told_usage(3)), "usage is 3, no object"),
        (stream_of(told_usage({"completion_tokens": "7"})), "completion_tokens is '7'"),
        (stream_of(told_usage({"completion_tokens": -7})), "completion_tokens is -7"),
        (stream_of(told_usage({"completion_tokens": 10**15})), "completion_tokens is 1000000"),
        (stream_of(*told_end(prompt_tokens=1.5)), "prompt_tokens is 1.5"),
        (stream_of(*told_end(prompt_tokens_details=[1])), "prompt_tokens_details is [1]"),
        (
            stream_of(*told_end(prompt_tokens_details={"cached_tokens": -1})),
            "cached_tokens is -1, no count",
        ),
        (answer("a", statistics={"steps": 1, "histogram": {"x": 1}}), "histogram"),
        (answer("a", statistics={"steps": 1, "histogram": {"1": -1}}), "histogram"),
        (answer("a", statistics={"steps": "1"}), "steps is '1', no count"),
    ],
)
def test_an_answer_that_fails_is_counted_and_the_others_go_on(act: Any, message: str) -> None:
    with OpenAIServer() as server:
        server.script = [answer("a"), act, answer("a")]
        measured = ask(server)
    assert measured.num_failed == 1 and list(measured.replies) == [0, 2, 3]
    [problem] = measured.problems
    assert problem.startswith("task, concurrency 1, draft: 1 of 4 prompts got no answer")
    assert message in problem and "Error" not in problem


def test_a_silent_server_is_given_up() -> None:
    with OpenAIServer() as server:
        server.script = [hang(1.0), answer("a")]
        measured = ask(server, PROMPTS[:2], timeout_s=0.2)
    assert measured.num_failed == 1 and "nothing came for 0.2 s" in measured.problems[0]


def test_a_server_that_answers_nothing_any_more_ends_the_sweep() -> None:
    with OpenAIServer() as server:
        server.script = [refuse(500, "it broke")]
        with pytest.raises(EngineLostError, match="5 questions in a row.*it broke"):
            ask(server, PROMPTS * 5)


def test_a_server_that_dies_leaves_partial_results() -> None:
    task = Task("task", PROMPTS, "task")
    sweep = Sweep([task], (1, 2), 8)
    results = Results([task], {}, {"engine": "http"})
    with OpenAIServer() as server:
        runner = make_runner(server)

        def die(handler: Handler, body: dict[str, Any]) -> None:
            handler.stream(iter([chunk("a", None)]))
            threading.Thread(target=server.stop).start()

        before = [answer("a")] * (3 + 4 + 4 + 1)  # warm-up, priming, a row, and one answer more
        server.script = [*before, die]
        run_sweep(runner, sweep, results, Silent(), lambda: None)
    document = results.document()
    assert document["is_partial"] and [row["concurrency"] for row in document["rows"]] == [1]
    assert f"The server at {server.url} is gone" in document["problems"][-1]


class Silent:
    def show(self, text: str) -> None:
        """Nobody looks."""


def test_an_interrupt_stops_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(reply: Reply) -> None:
        raise KeyboardInterrupt

    with OpenAIServer() as server:
        server.script = [answer("a"), answer(*"abcdefgh", pause_s=0.05)]
        run = Run("task", PROMPTS * 10, 2, DRAFT, 8, is_warm_up=True)
        with pytest.raises(KeyboardInterrupt):
            make_runner(server).run(run, interrupt)
        time.sleep(0.5)
        asked = len(server.questions)
        time.sleep(0.2)
        assert asked == len(server.questions) < 10
