"""The rows of a run: which loads go through which engine, and what is recorded of each."""

from __future__ import annotations

import random
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.traffic.drive import drive
from benchmarks.traffic.engines import Acceptance, Bench, EngineSpec, prepare_timed
from benchmarks.traffic.figures import (
    Window,
    describe_load,
    describe_long,
    describe_turns,
    num_ended,
    steady_window,
    warm_up_end,
)
from benchmarks.traffic.profile import profile_steps
from benchmarks.traffic.record import Record
from benchmarks.traffic.sources import (
    NUM_CLIENTS,
    NUM_TURNS,
    SYSTEM_TOKENS,
    TURN_ANSWERS,
    TURN_PROMPTS,
    ClosedLoop,
    Conversations,
    OpenLoop,
    Source,
    WithLongPrompt,
)
from benchmarks.traffic.workload import (
    ALONE_ANSWERS,
    ALONE_PROMPTS,
    ANSWERS,
    AS_TEXT,
    PICTURE_TOKENS,
    PICTURES,
    PROMPTS,
    SCHEMA,
    Span,
    Workload,
    params_of,
    random_tokens,
)
from flashdraft.core import Request
from flashdraft.engine.config import MAX_VERIFY
from flashdraft.engine.engine import Engine

LONG_ANSWER, LONG_CLIENTS = 64, 8
MIN_WARM_UPS = 2
CONTEXT_STEP = 1024  # contexts are rounded up to it
Row = dict[str, Any]


@dataclass(frozen=True)
class Settings:
    """What one invocation asks for."""

    clients: Sequence[int]
    rates: Sequence[float]
    kinds: Sequence[str]
    acceptances: Sequence[Acceptance]
    routings: Sequence[str | None]
    seconds: float
    requests: int | None
    seed: int
    conversations: bool
    long: int | None
    prompts: Span | None = None
    answers: Span | None = None
    system_tokens: int = SYSTEM_TOKENS
    turns: int = NUM_TURNS
    warm_up_s: float = 60.0
    max_batch: int = 32
    tree: int | str | None = None  # of drafted engines
    profiled: int = 0  # steps at the end of every row; what comes after a profile is slower

    def spans(self, clients: int | None) -> tuple[Span, Span]:
        """Lengths of prompts and answers; a lone client has its own unless others are asked for."""
        alone = clients == 1
        prompts = self.prompts or (ALONE_PROMPTS if alone else PROMPTS)
        return prompts, self.answers or (ALONE_ANSWERS if alone else ANSWERS)

    @property
    def max_context(self) -> int:
        """What the longest request of the loads takes."""
        loads = [self.spans(clients) for clients in (*self.clients, None)]
        more = PICTURE_TOKENS if {PICTURES, AS_TEXT} & {*self.kinds} else 0
        return _context(more + max(prompts.high + answers.high for prompts, answers in loads))


def _context(tokens: int) -> int:
    """A context for so many tokens, with room for a step beyond them."""
    return -(-(tokens + MAX_VERIFY + 1) // CONTEXT_STEP) * CONTEXT_STEP


@dataclass
class Run:
    """One invocation: its rows as they come."""

    bench: Bench
    settings: Settings
    deadline: float
    say: Callable[[str], None]
    keep: Callable[[], None]  # after every row
    rows: list[Row] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    prepared: list[Row] = field(default_factory=list)  # engines: seconds, and what took longest

    def everything(self) -> None:
        """All rows, one engine after the other."""
        for routing in self.settings.routings:
            for acceptance in self.settings.acceptances:
                self._with_engine(acceptance, routing)

    def _with_engine(self, acceptance: Acceptance, routing: str | None) -> None:
        settings, prescribed = self.settings, (acceptance, routing)
        tree = None if acceptance is None else settings.tree
        if settings.clients or settings.rates:
            sizes = settings.max_batch, settings.max_context
            spec = EngineSpec(*prescribed, *sizes, tree=tree)
            self._use(spec, "loads", self._loads)
        if settings.long is not None:
            context = max(_context(settings.long + LONG_ANSWER), settings.max_context)
            spec = EngineSpec(*prescribed, LONG_CLIENTS + 1, context, tree=tree)
            self._use(spec, "long prompt", self._long)
        if settings.conversations:
            turn = TURN_PROMPTS.high + TURN_ANSWERS.high
            context = _context(settings.system_tokens + settings.turns * turn)
            spec = EngineSpec(*prescribed, NUM_CLIENTS, context, prefix_cache=True, tree=tree)
            self._use(spec, "conversations", self._conversations)

    def _use(
        self, spec: EngineSpec, what: str, function: Callable[[Engine, EngineSpec], None]
    ) -> None:
        if time.perf_counter() > self.deadline:
            self.skipped.append(f"{what}, {spec.label}: the time was up")
            return

        def work(engine: Engine) -> None:
            found = prepare_timed(engine)
            self.prepared.append({"load": what, "engine": spec.label, **found})
            self.say(f"{what}, {spec.label}: the engine was prepared in {found['seconds']:.1f} s")
            function(engine, spec)

        try:
            self.bench.use(spec, work)
        except Exception as error:  # the other engines' rows must not go with it
            self._failed(what, spec, error)

    def _failed(self, load: str, spec: EngineSpec, error: Exception) -> None:
        traceback.print_exc()
        text = f"{type(error).__name__}: {error}"[:1000]
        self._add({"load": load, "engine": spec.label, "error": text})

    def _add(self, row: Row) -> None:
        self.rows.append(row)
        self.keep()

    # -- loads ---------------------------------------------------------------------------------

    def _loads(self, engine: Engine, spec: EngineSpec) -> None:
        for clients, rate, kind in self._each_load():
            load = f"c={clients} {kind}" if clients is not None else f"{rate:g}/s {kind}"
            if kind == SCHEMA and not engine.supports_grammar:
                line = f"{load}, {spec.label}: llguidance is not installed"
            elif time.perf_counter() > self.deadline:
                line = f"{load}, {spec.label}: the time was up"
            else:
                self._load(engine, spec, load, clients, rate, kind)
                continue
            self.say(f"skipped {line}")
            self.skipped.append(line)

    def _each_load(self) -> Iterator[tuple[int | None, float, str]]:
        for clients in self.settings.clients:
            yield from ((clients, 0.0, kind) for kind in self.settings.kinds)
        for rate in self.settings.rates:
            yield from ((None, rate, kind) for kind in self.settings.kinds)

    def _load(
        self,
        engine: Engine,
        spec: EngineSpec,
        load: str,
        clients: int | None,
        rate: float,
        kind: str,
    ) -> None:
        prompts, answers = self.settings.spans(clients)
        vocab_size, seed = engine.target.config.vocab_size, self.settings.seed
        vision = engine.target.config.vision
        workload = Workload(kind, vocab_size, seed, prompts, answers, load, vision)
        record = Record(time.perf_counter())

        def new_source(begin: float) -> Source:
            if clients is None:
                return OpenLoop(workload, rate, begin)
            return ClosedLoop(workload, clients, begin)

        source = new_source(record.begin)
        num_warm_ups = max(MIN_WARM_UPS, clients or self.settings.max_batch // 4)
        try:
            drive(engine, source, record, lambda one: self._is_over(one, num_warm_ups))
        except RuntimeError as error:
            self._failed(load, spec, error)
            return
        row: Row = {
            "load": load,
            "engine": spec.label,
            "kind": kind,
            "clients": clients,
            "rate": rate or None,
            **spec.facts,
            "prompt_tokens": str(prompts),
            "answer_tokens": str(answers),
            "warm_up_requests": num_warm_ups,
        }
        if self.settings.profiled:
            row["profile"] = self._profile(engine, new_source)
        self._add_figures(row, record, num_warm_ups)

    def _profile(self, engine: Engine, new_source: Callable[[float], Source]) -> Row:
        """Some more steps of the same load."""
        count, record = self.settings.profiled, Record(time.perf_counter())
        source = new_source(record.begin)
        return profile_steps(
            count, lambda: drive(engine, source, record, lambda one: len(one.steps) >= count)
        )

    def _is_over(self, record: Record, num_warm_ups: int) -> bool:
        """Whether the window is as long as was asked for, in seconds or requests."""
        settings = self.settings
        begin = warm_up_end(record, num_warm_ups, settings.warm_up_s)
        if begin is None:
            return False
        if settings.requests is not None and num_ended(record, begin) >= settings.requests:
            return True
        return record.last - begin >= settings.seconds

    def _add_figures(self, row: Row, record: Record, num_warm_ups: int) -> None:
        window = steady_window(record, num_warm_ups, self.settings.warm_up_s)
        if window is None:
            self._add(row | {"error": "nothing was left after the warm-up"})
            return
        self._add(row | describe_load(record, window))
        self.say(f"{row['load']}, {row['engine']}: {self.rows[-1]['tokens_per_s']} tok/s")

    # -- scenarios -----------------------------------------------------------------------------

    def _long(self, engine: Engine, spec: EngineSpec) -> None:
        """A long prompt that arrives while others decode."""
        length = self.settings.long
        assert length is not None
        vocab_size, seed = engine.target.config.vocab_size, self.settings.seed
        prompts, answers = self.settings.spans(None)
        kind = self.settings.kinds[0]
        prompt = random_tokens(random.Random(f"long {seed}"), vocab_size, length)
        long = Request("long", prompt, params_of(kind, 1, LONG_ANSWER), seed=seed)
        record = Record(time.perf_counter())
        workload = Workload(kind, vocab_size, seed, prompts, answers)
        clients = ClosedLoop(workload, LONG_CLIENTS, record.begin)
        source = WithLongPrompt(clients, long, after=2 * LONG_CLIENTS)
        limit = record.begin + self.settings.warm_up_s + 10 * self.settings.seconds

        def is_over(one: Record) -> bool:
            has_ended = bool(one.ends) and any(end.request_id == long.id for end in one.ends[-9:])
            return has_ended or one.last > limit

        drive(engine, source, record, is_over)
        load = f"c={LONG_CLIENTS} {kind} and {length} tokens"
        row: Row = {"load": load, "engine": spec.label, "kind": kind, "clients": LONG_CLIENTS}
        row |= spec.facts
        row["long"] = {"prompt_tokens": length, **describe_long(record, long.id)}
        self._add_figures(row, record, LONG_CLIENTS)

    def _conversations(self, engine: Engine, spec: EngineSpec) -> None:
        """Turns over one system prompt, with the prefix cache on."""
        record = Record(time.perf_counter())
        params = params_of("sampled", 1, 1)
        source = Conversations(
            engine.target.config.vocab_size,
            self.settings.seed,
            record.begin,
            turns=self.settings.turns,
            system_tokens=self.settings.system_tokens,
            params=params,
        )
        drive(engine, source, record, lambda _: False)
        row: Row = {"load": "conversations", "engine": spec.label, "kind": "sampled"}
        row |= spec.facts
        row["conversations"] = describe_turns(source.turns, engine.config.page_size)
        window = Window(record.begin, record.last)
        self._add(row | describe_load(record, window))
        share = row["conversations"]["hit_share"]
        self.say(f"conversations, {spec.label}: {share} of what could hit was found")
