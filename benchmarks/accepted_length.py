"""Accepted length of a pair on the five test tasks, through the engine and from stored answers.

    python -m benchmarks.accepted_length BENCH --device cuda --batch 64 --offline ANSWERS \\
        --output benchmarks/results/accepted_length.json

BENCH is a folder of <task>.jsonl files with a `prompt` a row. Greedy, the block drafter alone (no
n-grams), the whole block verified. Tokens per decode step, bonus token included: mean over
requests, pooled, per draft slot, and without the requests that fell into a loop. With --offline the
target's plain greedy answers are kept in a folder and walked too; in exact arithmetic both agree.
The same command goes on after the last finished task.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import flashdraft
from flashdraft import LLM
from flashdraft.bench.run.environment import shown_path
from flashdraft.engine.engine import Engine
from flashdraft.files import write_whole
from flashdraft.models.drafter.loading import load_drafter
from flashdraft.models.drafter.model import Drafter
from flashdraft.models.sources import default_drafter, resolve_source
from flashdraft.train.data.answers import AnswerSet, fingerprint
from flashdraft.train.data.prompts import Prompt, read_prompts
from flashdraft.train.data.regenerate import regenerate
from flashdraft.train.data.settings import AnswerSettings
from flashdraft.train.evaluate import (
    Evaluation,
    RequestResult,
    TaskResult,
    drafting_engine,
    evaluate_offline,
    evaluate_online,
)
from flashdraft.train.fit.step import TrainingStep

TASKS = {
    "gsm8k_test": "GSM8K",
    "math500": "MATH-500",
    "humaneval": "HumanEval",
    "mbpp_sanitized_test": "MBPP",
    "mt_bench": "MT-Bench, first turn",
}
AGREEMENT = 0.02  # offline and online means may part by so much of it: rounding turns near ties
OFFLINE_SIZES = {"cuda": (32768, 4096), "cpu": (2048, 64)}  # rows and blocks of a batch
REQUESTS_PER_LINE = 8  # per place in the engine's batch, between two progress lines


@dataclass(frozen=True)
class Pair:
    """A target with its drafter, loaded once for both ways to evaluate."""

    llm: LLM
    drafter: Drafter  # float32, on the target's device
    name: str  # of the drafter, without folders
    fingerprint: str


def load_pair(model: str, draft: str, device: str, dtype: str) -> Pair:
    """The target with its taps, next to no cache of its own, and the drafter's parameters."""
    name = default_drafter(model) if draft == "auto" else draft
    if name is None:
        raise SystemExit(f"There is no known drafter for {model}; name one with --draft.")
    llm = LLM(model, draft=name, verify=0, device=device, dtype=dtype, max_batch=1, max_context=64)
    path, target = resolve_source(name).path, llm.engine.target
    drafter = load_drafter(path, target.config).to(target.kernels.device, torch.float32)
    return Pair(llm, drafter, path.name, fingerprint(name))


def read_task(folder: Path, task: str, limit: int, seed: int) -> list[Prompt]:
    """A task's prompts: all of them, or `limit` drawn by the seed."""
    return read_prompts(folder / f"{task}.jsonl", limit, seed)


def run_online(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    task: str,
    max_tokens: int,
    report: Callable[[str], None],
) -> Evaluation:
    """One task through the engine, with a progress line now and then."""
    size = REQUESTS_PER_LINE * engine.config.max_batch
    begin, requests = time.perf_counter(), list[RequestResult]()
    for first in range(0, len(prompts), size):
        part = prompts[first : first + size]
        requests += evaluate_online(
            engine, part, [task] * len(part), max_tokens=max_tokens
        ).requests
        seconds, so_far = time.perf_counter() - begin, TaskResult.of(requests).mean
        report(f"{task}: {len(requests)}/{len(prompts)} requests, {so_far:.2f}, {seconds:.0f} s")
    return Evaluation(requests)


def store_answers(
    pair: Pair, prompts: Sequence[Prompt], longest: int, max_tokens: int, folder: Path
) -> AnswerSet:
    """The target's plain greedy answers to all prompts, from the folder where they are there."""
    settings = AnswerSettings(max_tokens=max_tokens, max_prompt_tokens=longest, loops="keep")
    regenerate(pair.llm, prompts, folder, settings)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # the engine's cache takes its share of what is free
    return AnswerSet.read(folder)


def in_order(answers: AnswerSet, prompts: Sequence[Sequence[int]]) -> AnswerSet:
    """The answers to these prompts, in their order: they were stored as they ended."""
    places = {tuple(answers.example(i)[0].tolist()): i for i in range(len(answers))}
    return answers.select([places[tuple(prompt)] for prompt in prompts])


def describe(evaluation: Evaluation) -> dict[str, Any]:
    """What a results file says of one task."""
    return {
        "all": _numbers(evaluation.overall()),
        "without_loops": _numbers(evaluation.overall(with_loops=False)),
        "num_looped": sum(request.looped for request in evaluation.requests),
    }


def _numbers(result: TaskResult) -> dict[str, Any]:
    return {
        "num_requests": result.num_requests,
        "mean": round(result.mean, 4),
        "pooled": round(result.pooled, 4),
        "acceptance": [round(share, 4) for share in result.acceptance],
    }


def compare(online: Evaluation, offline: Evaluation) -> dict[str, Any]:
    """Whether both ways to evaluate found the same: request by request, and in the mean."""
    pairs = zip(online.requests, offline.requests, strict=True)
    same = sum(one.histogram == other.histogram for one, other in pairs)
    mean = online.overall().mean
    difference = offline.overall().mean - mean
    return {
        "num_compared": len(online.requests),
        "num_same": same,
        "difference_of_means": round(difference, 4),
        "agree": abs(difference) <= AGREEMENT * mean,
    }


def table(tasks: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The results as lines to print."""
    head = f"{'task':22}{'requests':>9}{'mean':>7}{'pooled':>8}{'no loops':>10}{'looped':>8}"
    lines = [head + f"{'offline':>9}{'same':>10}"]
    for task, found in tasks.items():
        online, offline = found["online"], found.get("offline")
        whole, rest = online["all"], online["without_loops"]
        line = f"{TASKS.get(task, task):22}{whole['num_requests']:9}{whole['mean']:7.2f}"
        line += f"{whole['pooled']:8.2f}{rest['mean']:10.2f}{online['num_looped']:8}"
        if offline is not None:
            same = f"{offline['num_same']}/{offline['num_compared']}"
            line += f"{offline['all']['mean']:9.2f}{same:>10}"
            line += "" if offline["agree"] else "  DO NOT AGREE"
        lines.append(line)
    means = [found["online"]["all"]["mean"] for found in tasks.values()]
    if means:
        lines.append(f"{'mean of the tasks':31}{statistics.fmean(means):7.2f}")
    lines.append("share of steps that committed draft slot 1, 2, …:")
    for task, found in tasks.items():
        shares = " ".join(f"{share:.2f}" for share in found["online"]["all"]["acceptance"])
        lines.append(f"  {TASKS.get(task, task):22}{shares}")
    return lines


def shown_command(module: str, arguments: Iterable[str]) -> str:
    """The command without the folders of the machine it ran on."""
    return " ".join(["python -m", module, *map(shown_path, arguments)])


def describe_environment(module: str, device: torch.device) -> dict[str, Any]:
    """Where and with what a benchmark ran."""
    cores = f"{platform.machine()} CPU, {os.cpu_count()} cores"
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
    return {
        "hardware": torch.cuda.get_device_name(device) if device.type == "cuda" else cores,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "flashdraft": flashdraft.__version__,
        **versions,
        "date": datetime.date.today().isoformat(),
        "command": shown_command(module, sys.argv[1:]),
    }


def read_finished(path: Path | None, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The tasks that an earlier run with the same settings has finished."""
    if path is None or not path.is_file():
        return {}
    stored = json.loads(path.read_text(encoding="utf-8"))
    return dict(stored["tasks"]) if stored.get("settings") == settings else {}


def write_results(path: Path | None, result: Mapping[str, Any]) -> None:
    """The results file, whole or not at all."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(result, indent=1) + "\n")


def report_progress(line: str) -> None:
    """One line that is written over on a terminal, a line each elsewhere; never in the output."""
    is_terminal = sys.stderr.isatty()
    end = "\r" if is_terminal else "\n"
    print(line.ljust(79) if is_terminal else line, end=end, file=sys.stderr, flush=True)


def task_parser(description: str, limit: int) -> argparse.ArgumentParser:
    """What says which pair answers which prompts of the five tasks."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("bench", type=Path, help="folder with " + ", ".join(TASKS) + " (.jsonl)")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--draft", default="auto", help="a drafter; auto = the target's own")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--limit", type=int, default=limit, help="prompts a task, by the seed")
    parser.add_argument("--tokens", type=int, default=256, help="new tokens at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    return parser


def parse_arguments() -> argparse.Namespace:
    parser = task_parser("Accepted length on the five test tasks.", limit=200)
    parser.add_argument("--batch", type=int, default=8, help="requests decoded at once")
    parser.add_argument("--offline", type=Path, metavar="FOLDER", help="evaluate its answers too")
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    pair = load_pair(arguments.model, arguments.draft, arguments.device, arguments.dtype)
    target, tokens = pair.llm.engine.target, arguments.tokens
    prompts = {t: read_task(arguments.bench, t, arguments.limit, arguments.seed) for t in TASKS}
    ids = {t: [pair.llm.chat_prompt(p.messages) for p in many] for t, many in prompts.items()}
    settings = {
        "model": Path(pair.llm.model).name,
        "model_fingerprint": fingerprint(pair.llm.model),
        "drafter": pair.name,
        "drafter_fingerprint": pair.fingerprint,
        "kernels": target.kernels.name,
        "dtype": arguments.dtype,
        "decoding": "greedy, block drafter alone, whole block verified",
        "verify": pair.drafter.config.block_size - 1,
        "max_tokens": tokens,
        "batch": arguments.batch,
        "limit": arguments.limit,
        "seed": arguments.seed,
        "offline": arguments.offline is not None,
    }
    finished = read_finished(arguments.output, settings)
    answers = step = None
    if arguments.offline is not None:
        every = [prompt for many in prompts.values() for prompt in many]
        longest = max(len(one) for many in ids.values() for one in many)
        answers = store_answers(pair, every, longest, tokens, arguments.offline)
        rows, blocks = OFFLINE_SIZES[target.kernels.device.type]
        rows = max(rows, longest + tokens)
        step = TrainingStep(pair.drafter, target, max_rows=rows)
    engine = drafting_engine(target, pair.drafter, max_batch=arguments.batch)
    environment = describe_environment("benchmarks.accepted_length", target.kernels.device)
    result: dict[str, Any] = {"environment": environment, "settings": settings, "tasks": finished}
    for task in TASKS:
        if task in finished:
            report_progress(f"{task}: found in {arguments.output}")
            continue
        online = run_online(engine, ids[task], task, tokens, report_progress)
        found: dict[str, Any] = {"online": describe(online)}
        if answers is not None and step is not None:
            mine = in_order(answers, ids[task])
            report_progress(f"{task}: offline, {mine.num_answer_tokens} places")
            offline = evaluate_offline(
                step, mine, max_rows=rows, num_blocks=blocks, max_tokens=tokens
            )
            found["offline"] = {**describe(offline), **compare(online, offline)}
        finished[task] = found
        result["tasks"] = {name: finished[name] for name in TASKS if name in finished}
        write_results(arguments.output, result)
    print("\n".join(table(result["tasks"])))
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
