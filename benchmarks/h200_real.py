"""The default pair on real prompts: accepted length, speed, and where drafted and plain text part.

For h200.py. Real weights, greedy, the task files of benchmarks.accepted_length. Every prompt runs
once per engine, so that the prefix cache hides nothing. Where plain and drafted answers part, the
margin between the two likeliest tokens says whether rounding can explain it.
"""

from __future__ import annotations

import logging
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.accepted_length import TASKS, read_task
from benchmarks.h200_measure import (
    CAPTURES,
    Deadline,
    Timeline,
    collect_logs,
    free_memory,
    run_requests,
)
from flashdraft import LLM
from flashdraft.core import Generation, Request, SamplingParams

Report = Callable[[str], None]
CONCURRENCY = (1, 8)
PREPARE_S = 90.0
NUM_WARM_UP, WARM_UP_AT_ONCE = 48, 8  # prompts of a task that only warm up: until all is captured


@dataclass(frozen=True)
class RealSettings:
    """What is run."""

    model: str
    folder: Path
    device: str
    dtype: str
    prompts: int  # a task and concurrency
    tokens: int
    exact_prompts: int
    seed: int
    tasks: tuple[str, ...] = tuple(TASKS)


def load(settings: RealSettings, *, drafted: bool, exact: bool = False) -> LLM:
    """The pair, or its target alone."""
    return LLM(
        settings.model,
        draft="auto" if drafted else None,
        device=settings.device,
        dtype=settings.dtype,
        exact=exact,
        max_batch=max(CONCURRENCY),
        max_context=2048,
        cache_gb=2.0,
    )


def read_requests(llm: LLM, settings: RealSettings, task: str, count: int) -> list[Request]:
    """A task's prompts in the model's chat format."""
    params = SamplingParams(max_tokens=settings.tokens)
    prompts = read_task(settings.folder, task, count, settings.seed)
    return [
        Request(f"{task}-{index}", llm.chat_prompt(prompt.messages), params, seed=0)
        for index, prompt in enumerate(prompts)
    ]


def run_batch(llm: LLM, requests: Sequence[Request], concurrency: int) -> list[Timeline]:
    """So many at a time, as a queue: one by one, or as many as the engine's batch takes."""
    if concurrency == 1:
        return [run_requests(llm.engine, [request]) for request in requests]
    assert concurrency == llm.engine.config.max_batch
    return [run_requests(llm.engine, requests)]


def warm_up(llm: LLM, requests: Sequence[Request], concurrency: int) -> None:
    """Every shape of step that may come, then other prompts until nothing new is captured."""
    llm.engine.prepare(PREPARE_S)
    for first in range(0, len(requests), WARM_UP_AT_ONCE):
        some = [
            replace(request, id=f"{request.id} warm {concurrency}")
            for request in requests[first : first + WARM_UP_AT_ONCE]
        ]
        with collect_logs(CAPTURES, logging.DEBUG) as captured:
            run_batch(llm, some, concurrency)
        if first and not captured:
            break


def summarise(timelines: Sequence[Timeline]) -> dict[str, Any]:
    """Speed over whole requests, and accepted length as a mean over requests and pooled."""
    done = [one for timeline in timelines for one in timeline.generations.values()]
    seconds = sum(timeline.seconds for timeline in timelines)
    tokens = sum(len(one.token_ids) for one in done)
    decode_s = sum(one.stats.decode_s for one in done)
    steps = sum(one.stats.steps for one in done)
    decoded = sum(one.stats.decode_tokens for one in done)
    lengths = [one.stats.mean_accepted_length for one in done if one.stats.steps]
    return {
        "requests": len(done),
        "tokens": tokens,
        "tok_s": round(tokens / seconds, 1),
        "decode_tok_s_per_request": round(decoded / decode_s, 1) if decode_s else None,
        "accepted_length": round(statistics.fmean(lengths), 3) if lengths else None,
        "accepted_length_pooled": round(decoded / max(1, steps), 3),
        "mean_verify_width": round(sum(one.stats.drafted for one in done) / max(1, steps), 2),
    }


def answers(timelines: Sequence[Timeline]) -> dict[str, Generation]:
    """Every request's answer."""
    return {key: one for timeline in timelines for key, one in timeline.generations.items()}


def count_divergences(
    llm: LLM,
    requests: Sequence[Request],
    plain: Mapping[str, Generation],
    drafted: Mapping[str, Generation],
) -> dict[str, Any]:
    """Answers that part, tokens before they do, and the top-2 margin at that place.

    The margin comes from the target's pass over the agreed text, as a prompt of its own.
    """
    params = SamplingParams(max_tokens=1, logprobs=2, ignore_eos=True)
    tokens, parted = 0, []
    for request in requests:
        one, other = plain[request.id].token_ids, drafted[request.id].token_ids
        agreed = len(os.path.commonprefix([one, other]))
        tokens += agreed
        if agreed < min(len(one), len(other)):
            text = [*request.prompt_ids, *one[:agreed]]
            parted.append(Request(f"margin of {request.id}", text, params, seed=0, verify=0))
    seen = run_requests(llm.engine, parted).generations if parted else {}
    return {
        "answers": len(requests),
        "tokens_compared": tokens,
        "divergences": len(parted),
        "margins": sorted(round(_margin(one), 4) for one in seen.values()),
    }


def _margin(generation: Generation) -> float:
    assert generation.logprobs is not None
    (_, first), (_, second) = generation.logprobs[0].top
    return first - second


def measure_tasks(
    settings: RealSettings, rows: dict[str, Any], deadline: Deadline, report: Report
) -> None:
    """Every task, plain and drafted, one at a time and eight at a time; fills `rows`."""
    llms = {name: load(settings, drafted=name == "drafted") for name in ("plain", "drafted")}
    for task in settings.tasks:
        if deadline.seconds_left <= 0:
            rows.setdefault("skipped", []).append(task)
            continue
        found = rows.setdefault("tasks", {})[task] = {}
        asked = len(CONCURRENCY) * settings.prompts
        requests = read_requests(llms["plain"], settings, task, NUM_WARM_UP + asked)
        warm, rest = requests[:-asked], requests[-asked:]
        share = len(rest) // len(CONCURRENCY)
        for place, concurrency in enumerate(CONCURRENCY):
            mine = rest[place * share : (place + 1) * share]
            said = {}
            for name, llm in llms.items():
                warm_up(llm, warm, concurrency)
                with collect_logs(CAPTURES, logging.DEBUG) as captured:
                    timelines = run_batch(llm, mine, concurrency)
                said[name] = answers(timelines)
                row = summarise(timelines) | {"graphs_captured": len(captured)}
                found[f"{name} c={concurrency}"] = row
                report(f"{task} {name} c={concurrency}: {row['tok_s']} tok/s")
            ours, base = found[f"drafted c={concurrency}"], found[f"plain c={concurrency}"]
            found[f"speedup c={concurrency}"] = round(ours["tok_s"] / base["tok_s"], 3)
            found[f"divergences c={concurrency}"] = count_divergences(
                llms["plain"], mine, said["plain"], said["drafted"]
            )


def measure_exact(settings: RealSettings, rows: dict[str, Any], report: Report) -> None:
    """`exact=True` and the default: where plain and drafted part, and what it costs."""
    per_task = -(-settings.exact_prompts // len(settings.tasks))
    rows["concurrency"] = batch = max(CONCURRENCY)
    for kind in ("default", "exact"):
        said: dict[str, dict[str, Generation]] = {}
        for name in ("plain", "drafted"):
            llm = load(settings, drafted=name == "drafted", exact=kind == "exact")
            many = [read_requests(llm, settings, t, 1 + per_task) for t in settings.tasks]
            mine = [one for requests in many for one in requests[1:]][: settings.exact_prompts]
            run_batch(llm, [requests[0] for requests in many], batch)  # warms up
            timelines = run_batch(llm, mine, batch)
            said[name] = answers(timelines)
            rows[f"{kind} {name}"] = row = summarise(timelines)
            report(f"{kind} {name} c={batch}: {row['tok_s']} tok/s")
            if name == "drafted":
                parted = count_divergences(llm, mine, said["plain"], said["drafted"])
                rows[f"divergences {kind}"] = parted
                report(f"{kind}: {parted['divergences']} of {parted['answers']} answers part")
            del llm
            free_memory()
    for name in ("plain", "drafted"):
        ratio = rows[f"default {name}"]["tok_s"] / rows[f"exact {name}"]["tok_s"]
        rows[f"cost of exact, {name}"] = round(ratio, 3)
