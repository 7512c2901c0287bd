"""Any OpenAI endpoint under test: flashdraft's, vLLM's, SGLang's, another's.

flashdraft decodes plainly when a request says so; another server's plain baseline is a second
server. Whoever fails is counted and named; a server that is gone ends the sweep, not the results.
"""

from __future__ import annotations

import dataclasses
import queue
import threading
import time
import uuid
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flashdraft.bench.results import DRAFT, PLAIN, Measurement, Reply, RowAcceptance, acceptance_of
from flashdraft.bench.run.counters import (
    OTHER,
    OURS,
    SGLANG,
    SGLANG_GAUGE,
    VLLM,
    CountersError,
    GaugeWatch,
    Page,
    acceptance_between,
    look,
)
from flashdraft.bench.run.measure import OnReply, Run
from flashdraft.bench.run.served import SALTED, Served
from flashdraft.bench.run.stream import (
    MAX_ATTEMPTS,
    MAX_WAIT_S,
    AnswerError,
    BusyError,
    StoppedError,
)
from flashdraft.bench.tasks import BenchPrompt, count_of
from flashdraft.errors import EngineLostError, FlashdraftError

MAX_FAILURES_IN_ROW = 5  # prompts; more of them and the server answers nothing any more


@dataclass(frozen=True)
class Asking:
    """How questions are put."""

    greedy: bool  # else as the server recommends
    thinking: bool
    seed: int
    verify: int | None = None  # of flashdraft's; None = its policy


@dataclass
class _SharedRun:
    """One run's shared state between its threads."""

    run: Run
    served: Served
    waiting: deque[int]
    ended: queue.Queue[tuple[int, list[Reply] | FlashdraftError] | Reply]
    stop: threading.Event = field(default_factory=threading.Event)
    waits: list[float] = field(default_factory=list)  # seconds that the server asked for
    salt: str = field(default_factory=lambda: uuid.uuid4().hex)


class EndpointRunner:
    """Runs prompts over HTTP."""

    def __init__(self, served: Served, plain: Served | None, asking: Asking) -> None:
        self._asking = asking
        self._primed: set[tuple[str, str]] = set()  # endpoints and tasks
        self._served = {DRAFT: served}
        if plain is not None:
            self._served[PLAIN] = plain
        elif served.kind == OURS:
            self._served[PLAIN] = served
        self.modes: tuple[str, ...] = tuple(m for m in (PLAIN, DRAFT) if m in self._served)

    def problems(self) -> list[str]:
        """What these servers cannot tell."""
        served = self._served[DRAFT]
        found = []
        if not served.has_metrics:
            told = "accepted lengths by position" if served.kind == OURS else "accepted lengths"
            found.append(f"{served.endpoint.url} shows no metrics: {told} are not known.")
        elif served.kind == OTHER:
            found.append(
                f"The metrics of {served.endpoint.url} are none of flashdraft, vLLM or SGLang: "
                "accepted lengths are not known."
            )
        if PLAIN not in self._served:
            found.append(
                "There is no plain baseline: it would need a second server, named by --plain-url."
            )
        return found

    @property
    def lacks_metrics(self) -> bool:
        """Whether something is missing that a server of this kind could tell."""
        return any(not one.has_metrics and one.kind != OTHER for one in self._served.values())

    def run(self, run: Run, on_reply: OnReply) -> Measurement:
        """Answer every prompt with `run.concurrency` of them in flight."""
        served = self._served[run.mode]
        self._prime(run, served)
        work = _SharedRun(run, served, deque(range(len(run.prompts))), queue.Queue())
        before = look(served.endpoint) if served.has_metrics else None
        watch = GaugeWatch(served.endpoint) if SGLANG_GAUGE in (before or {}) else None
        begin = time.perf_counter()
        count = min(run.concurrency, len(run.prompts))
        for _ in range(count):
            threading.Thread(target=self._work, args=(work,), daemon=True).start()
        try:
            done, failures = self._collect(work, on_reply)
        finally:
            work.stop.set()
        wall_s = time.perf_counter() - begin
        replies = {place: done[place] for place in sorted(done)}
        every = [reply for one in replies.values() for reply in one]
        problems = [*_tell(run, failures), *_tell_waits(run, work.waits)]
        answers = None if failures else [reply.output_tokens for reply in every]
        acceptance, why_unknown = self._acceptance(run, every, answers, before, watch)
        is_told = bool(acceptance.histogram) or acceptance.pooled is not None
        can_tell = before is not None and served.kind in (VLLM, SGLANG)
        if why_unknown is not None and run.mode == DRAFT:
            what = "accepted length" + (" by position" if served.kind == OURS else "")
            problems.append(
                f"The {what} of {served.endpoint.url} is not known in {run.label}: {why_unknown}."
            )
        elif run.mode == DRAFT and can_tell and not is_told:
            problems.append(f"The metrics of {served.endpoint.url} tell of no drafts.")
        return Measurement(
            replies,
            wall_s,
            acceptance,
            problems,
            len(run.prompts) - len(done),
        )

    def _prime(self, run: Run, served: Served) -> None:
        """Let a server see a task's prompts once, where it cannot be kept from remembering them.

        Otherwise whichever mode comes first would pay for the prefill, and the others not.
        """
        key = (served.endpoint.url, run.task)
        if run.is_warm_up or served.kind in SALTED or key in self._primed:
            return
        self._primed.add(key)
        openings = [BenchPrompt(prompt.messages) for prompt in run.prompts]
        first = dataclasses.replace(run, prompts=openings, max_tokens=1, is_warm_up=True)
        self.run(first, lambda reply: None)

    def _collect(
        self, work: _SharedRun, on_reply: OnReply
    ) -> tuple[dict[int, list[Reply]], list[str]]:
        """Every prompt's end, as it comes."""
        done: dict[int, list[Reply]] = {}
        failures: list[str] = []
        num_in_row = 0
        while len(done) + len(failures) < len(work.run.prompts):
            item = work.ended.get()
            if isinstance(item, Reply):
                on_reply(item)
                continue
            place, outcome = item
            if isinstance(outcome, list):
                done[place], num_in_row = outcome, 0
            elif isinstance(outcome, AnswerError | BusyError):
                failures.append(f"prompt {place + 1}: {outcome}")
                num_in_row += 1
            else:
                raise outcome
            if num_in_row >= MAX_FAILURES_IN_ROW:
                raise EngineLostError(
                    f"{num_in_row} questions in a row got no answer; the last one: {outcome}."
                )
        return done, failures

    def _work(self, work: _SharedRun) -> None:
        """A thread: holds one conversation after the other until there are no more."""
        while not work.stop.is_set():
            try:
                place = work.waiting.popleft()
            except IndexError:
                return
            try:
                work.ended.put((place, self._converse(work, place)))
            except StoppedError:
                return
            except FlashdraftError as error:
                work.ended.put((place, error))
            except Exception as error:  # an answer of no known form must not hang the run
                what = f"the answer cannot be read: {type(error).__name__}: {error}"
                work.ended.put((place, AnswerError(what)))

    def _converse(self, work: _SharedRun, place: int) -> list[Reply]:
        prompt: BenchPrompt = work.run.prompts[place]
        messages = list(prompt.messages)
        replies: list[Reply] = []
        for turn in range(prompt.num_turns):
            if turn:
                messages += [
                    {"role": "assistant", "content": replies[-1].content},
                    {"role": "user", "content": prompt.follow_ups[turn - 1]},
                ]
            reply = self._ask(work, self._body(work, messages, place))
            replies.append(reply)
            work.ended.put(reply)
        return replies

    def _ask(self, work: _SharedRun, body: Mapping[str, Any]) -> Reply:
        """One answer; a server that is busy is asked again when it says, within bounds."""
        for attempt in range(MAX_ATTEMPTS):
            try:
                return work.served.endpoint.ask(body, work.stop).reply()
            except BusyError as busy:
                wait_s = busy.wait_s if busy.wait_s is not None else min(2.0**attempt, MAX_WAIT_S)
                if wait_s > MAX_WAIT_S:
                    what = f"{busy} It asks to wait {wait_s:g} s; the limit is {MAX_WAIT_S:g} s"
                    raise AnswerError(what) from None
                work.waits.append(wait_s)
                if work.stop.wait(wait_s):
                    raise StoppedError("The run was stopped.") from None
        raise AnswerError(f"the server was busy {MAX_ATTEMPTS} times over")

    def _body(
        self, work: _SharedRun, messages: Sequence[Mapping[str, Any]], place: int
    ) -> dict[str, Any]:
        asking = self._asking
        return work.served.ask(
            messages,
            max_tokens=work.run.max_tokens,
            seed=asking.seed + place,
            greedy=asking.greedy,
            thinking=asking.thinking,
            salt=work.salt,  # no run may find an earlier one's prompts in the prefix cache
            verify=0 if work.run.mode == PLAIN else asking.verify,
        )

    def _acceptance(
        self,
        run: Run,
        replies: Sequence[Reply],
        answers: Sequence[int] | None,
        before: Page | None,
        watch: GaugeWatch | None,
    ) -> tuple[RowAcceptance, str | None]:
        """How drafting went, and why that is not known where the counters make no sense."""
        served = self._served[run.mode]
        gauge = watch.mean() if watch is not None else None
        after = look(served.endpoint) if before is not None else None
        counted = why_unknown = None
        try:
            if before is not None and after is not None:
                counted = acceptance_between(served.kind, before, after, answers)
        except CountersError as error:
            why_unknown = str(error)
        if served.kind == OURS:
            slots = counted or RowAcceptance()
            return acceptance_of(replies, slots.verified, slots.accepted), why_unknown
        return counted or RowAcceptance(pooled=gauge), why_unknown


def _tell(run: Run, failures: Sequence[str]) -> list[str]:
    if not failures:
        return []
    if len(failures) == len(run.prompts):
        return [f"{run.label}: no prompt got an answer; {failures[0]}."]
    count = f"{len(failures)} of {len(run.prompts)} prompts got no answer"
    return [f"{run.label}: {count} and are not in the row; {failures[0]}."]


def _tell_waits(run: Run, waits: Sequence[float]) -> list[str]:
    if not waits:
        return []
    return [
        f"{run.label}: the server asked to come back later {count_of(len(waits), 'time')} "
        "(HTTP 429 or 503), "
        f"{sum(waits):.1f} s of waiting in all; tokens/s include it, latencies do not."
    ]
