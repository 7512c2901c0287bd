"""Requests through an engine, with a clock beside every step: load, contexts, cold start.

For h200.py. Prompts are random tokens, answers run to their full length. A figure over whole
requests goes from the first submission to the last token; steady-state decoding is what the middle
steps did, those in which every request decoded and none began or ended.
"""

from __future__ import annotations

import gc
import logging
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from flashdraft.core import Generation, Request, SamplingParams
from flashdraft.engine.engine import Engine
from flashdraft.models.config.target import ModelConfig

AT_SPEED = 1.25  # a first step is at speed if it takes no longer than so many typical ones
MIN_WARM_UPS, MAX_WARM_UPS = 3, 10  # runs before measuring: until the policy has settled
SETTLED = 0.03  # a run within so much of the last one, with no new graph
GREEDY: Mapping[str, Any] = {}
CAPTURES = "flashdraft.engine.streams"  # logs every graph that is captured


@dataclass
class Deadline:
    """When a section should begin nothing new."""

    end: float

    @property
    def seconds_left(self) -> float:
        return self.end - time.perf_counter()


@dataclass(frozen=True)
class StepMark:
    """What one call of `Engine.step` brought, and when it returned."""

    end: float
    tokens: int
    requests: int  # that got tokens
    ended: int
    verify_lengths: tuple[int, ...]

    @property
    def num_rows(self) -> int:
        return sum(self.verify_lengths) + len(self.verify_lengths)


@dataclass(frozen=True)
class Timeline:
    """Some requests from submission to their end."""

    begin: float
    steps: list[StepMark]
    generations: dict[str, Generation]

    @property
    def seconds(self) -> float:
        return self.steps[-1].end - self.begin

    @property
    def tokens(self) -> int:
        return sum(len(one.token_ids) for one in self.generations.values())

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def accepted_length(self) -> float:
        """Tokens per decode step of a request, all requests together."""
        stats = [one.stats for one in self.generations.values()]
        return sum(s.decode_tokens for s in stats) / max(1, sum(s.steps for s in stats))

    def first_token_s(self) -> float:
        """Until every request had its first token."""
        return max(one.stats.ttft_s for one in self.generations.values())

    def middle(self) -> list[tuple[float, StepMark]]:
        """Steps with their seconds: all requests decode; the outer quarters are left out."""
        size = len(self.generations)
        full = [step.requests == size for step in self.steps]
        found = [
            (self.steps[i].end - self.steps[i - 1].end, self.steps[i])
            for i in range(1, len(self.steps))
            if full[i] and full[i - 1] and not self.steps[i].ended
        ]
        quarter = len(found) // 4
        return found[quarter : len(found) - quarter]


def run_requests(engine: Engine, requests: Sequence[Request]) -> Timeline:
    """Submit all at once and step until the last one has ended; a failed one raises."""
    if engine.target.kernels.device.type == "cuda":
        torch.cuda.synchronize(engine.target.kernels.device)
    steps: list[StepMark] = []
    done: dict[str, Generation] = {}
    begin = time.perf_counter()
    for request in requests:
        engine.submit(request)
    while engine.has_work:
        events = engine.step()
        now = time.perf_counter()
        lengths = tuple(engine.last_step.verify_lengths)
        counts = [len(event.token_ids) for event in events if event.token_ids]
        ended = {e.request_id: e.generation for e in events if e.generation is not None}
        done |= ended
        steps.append(StepMark(now, sum(counts), len(counts), len(ended), lengths))
    for one in done.values():
        if one.error is not None:
            raise RuntimeError(one.error)
    return Timeline(begin, steps, done)


def random_requests(
    count: int,
    prompt_tokens: int,
    max_tokens: int,
    config: ModelConfig,
    seed: int,
    verify: int | None = None,
    sampling: Mapping[str, Any] = GREEDY,
) -> list[Request]:
    """Prompts of random tokens whose answers do not end early."""
    draw = random.Random(seed)
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **sampling)
    return [
        Request(
            f"r{seed}-{index}",
            [draw.randrange(5, config.vocab_size) for _ in range(prompt_tokens)],
            params,
            seed=index,
            verify=verify,
        )
        for index in range(count)
    ]


def describe(timeline: Timeline) -> dict[str, Any]:
    """The figures of one run."""
    middle = timeline.middle()
    found: dict[str, Any] = {
        "tok_s": round(timeline.tokens_per_s, 1),
        "wall_s": round(timeline.seconds, 4),
        "first_token_s": round(timeline.first_token_s(), 4),
        "accepted_length": round(timeline.accepted_length, 3),
    }
    preempted = sum(one.stats.preemptions for one in timeline.generations.values())
    if preempted:
        found["preemptions"] = preempted
    if middle:
        seconds = [one for one, _ in middle]
        tokens = statistics.fmean(step.tokens for _, step in middle)
        widths = Counter(n for _, step in middle for n in step.verify_lengths)
        step_s = statistics.median(seconds)
        found |= {
            "steady_tok_s": round(tokens / step_s, 1),
            "steady_mean_tok_s": round(tokens / statistics.fmean(seconds), 1),
            "step_ms": round(1e3 * step_s, 3),
            "steps_counted": len(middle),
            "tokens_per_step": round(tokens, 3),
            "rows_per_step": round(statistics.fmean(step.num_rows for _, step in middle), 1),
            "verify_widths": {str(width): widths[width] for width in sorted(widths)},
        }
    return found


def measure_load(
    engine: Engine,
    count: int,
    prompt_tokens: int,
    max_tokens: int,
    *,
    seed: int,
    repeats: int,
    warm_up_tokens: int,
    sampling: Mapping[str, Any] = GREEDY,
) -> dict[str, Any]:
    """Warm-up, then the same load `repeats` times: the median run, and all of them."""
    config = engine.target.config

    def run(tokens: int, turn: int) -> tuple[Timeline, int]:
        with collect_logs(CAPTURES, logging.DEBUG) as captured:
            own = prompt_tokens, tokens, config, seed + turn
            requests = random_requests(count, *own, sampling=sampling)
            return run_requests(engine, requests), len(captured)

    last = 0.0
    warm_ups = 0
    for turn in range(MAX_WARM_UPS):
        one, num_captured = run(warm_up_tokens, turn)
        warm_ups += 1
        is_settled = abs(one.tokens_per_s - last) < SETTLED * last and not num_captured
        if warm_ups >= MIN_WARM_UPS and (is_settled or engine.proposer is None):
            break  # plain decoding has nothing to learn
        last = one.tokens_per_s
    runs = []
    for turn in range(repeats):
        one, num_captured = run(max_tokens, 100 + turn)
        runs.append(describe(one) | {"graphs_captured": num_captured})
    median = sorted(runs, key=lambda run: run["tok_s"])[(len(runs) - 1) // 2]
    return {
        "requests": count,
        "prompt_tokens": prompt_tokens,
        "new_tokens": max_tokens,
        "warm_up_runs": warm_ups,
        "median": median,
        "runs": runs,
    }


def measure_context(
    engine: Engine, length: int, max_tokens: int, *, seed: int, repeats: int
) -> dict[str, Any]:
    """One request with a long prompt: seconds of its prefill, and of a step after it."""
    config = engine.target.config
    prefills, last = [], None
    for turn in range(repeats):
        last = run_requests(
            engine, random_requests(1, length, max_tokens, config, seed + 1000 * turn)
        )
        prefills.append(last.first_token_s())
    assert last is not None
    best, flops = min(prefills), prefill_flops(config, length)
    return {
        "context": length,
        "prefill_s": round(best, 4),
        "prefill_runs_s": [round(one, 4) for one in prefills],
        "prefill_tflops_s": round(flops / best / 1e12, 1),
        **describe(last),
    }


def prefill_flops(config: ModelConfig, length: int) -> float:
    """Multiplications and additions of a prompt's matrices and attention; the head's last row."""
    hidden, total = config.hidden_size, 0.0
    for layer in config.layers:
        query, key = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
        weights = hidden * (2 * query + key * (1 if layer.share_kv else 2))
        weights += 3 * hidden * config.intermediate_size
        if config.experts is not None:
            experts = config.experts
            weights += hidden * experts.num_experts
            weights += 3 * hidden * experts.intermediate_size * experts.num_chosen
        window = min(length, layer.window or length)
        keys = window * (window + 1) / 2 + (length - window) * window  # seen by all rows together
        total += 2.0 * weights * length + 4.0 * query * keys
    return total + 2.0 * config.vocab_size * hidden


@dataclass
class ColdStart:
    """From resident weights to the first tokens of a new engine."""

    engine: Engine
    found: dict[str, Any] = field(default_factory=dict)


def cold_start(build: Callable[[], Engine], prompt_tokens: int, seed: int) -> ColdStart:
    """Build the first engine of the process and send it its first request."""
    begin = time.perf_counter()
    engine = build()
    built = time.perf_counter()
    requests = random_requests(1, prompt_tokens, 192, engine.target.config, seed)
    timeline = run_requests(engine, requests)
    steps = timeline.steps
    first = next(step for step in steps if step.tokens)
    found: dict[str, Any] = {
        "engine_s": round(built - begin, 3),
        "first_token_s": round(first.end - begin, 3),
        "request_s": round(timeline.seconds, 3),
        "first_drafted_step_at_speed_s": None,
    }
    if middle := timeline.middle():
        typical = statistics.median(seconds for seconds, _ in middle)
        for previous, step in zip(steps, steps[1:], strict=False):
            seconds = step.end - previous.end
            if any(step.verify_lengths) and step.tokens and seconds <= AT_SPEED * typical:
                found["first_drafted_step_at_speed_s"] = round(step.end - begin, 3)
                break
    return ColdStart(engine, found)


def free_memory() -> None:
    """Give back what nobody holds, and measure the peak anew."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


class _Collector(logging.Handler):
    def __init__(self, level: int) -> None:
        super().__init__(level)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@contextmanager
def collect_logs(name: str = "flashdraft", level: int = logging.WARNING) -> Iterator[list[str]]:
    """What a part of the package logs meanwhile; a figure with a warning is not a figure."""
    collector, logger = _Collector(level), logging.getLogger(name)
    before = logger.level
    logger.addHandler(collector)
    logger.setLevel(level)
    try:
        yield collector.lines
    finally:
        logger.removeHandler(collector)
        logger.setLevel(before)
