"""Drafted decoding of the default pair on this CPU, against plain decoding and other engines.

    python -m benchmarks.cpu_draft BENCH --output benchmarks/results/cpu_draft.json

One interleaved run over the five test tasks, batch 1, greedy: for each prompt the engines take
turns, in an order that moves on with every turn: flashdraft plain, drafted by the pair's drafter,
drafted by one of the same shape with random weights, transformers' `generate` in float32, and
llama.cpp on the same GGUF file where `llama_cpp` can be imported (by --llama-python, if not by this
one). A time is that from the prompt's arrival to the last token, prefill included, nothing cached;
of several turns the median counts. All write as many tokens as plain decoding, which stops where
the model does. Compare ratios within one run; absolute figures are this machine's alone.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.accepted_length import (
    TASKS,
    describe_environment,
    read_task,
    report_progress,
    write_results,
)
from benchmarks.cpu_engines import (
    MODEL,
    Contestant,
    Flashdraft,
    Llama,
    Transformers,
    Turn,
    random_drafter,
)
from flashdraft.models.sources import default_drafter, resolve_source
from flashdraft.train.data.answers import fingerprint
from tests.prompts import PROMPTS

PLAIN, DRAFTED, RANDOM = "plain", "drafted", "random weights"
TRANSFORMERS, LLAMA = "transformers", "llama.cpp"
RATIOS = ((DRAFTED, PLAIN), (DRAFTED, TRANSFORMERS), (DRAFTED, LLAMA), (RANDOM, PLAIN))


def take_turns(
    contestants: Mapping[str, Contestant],
    prompt_ids: list[int],
    num_tokens: int,
    repeats: int,
    first: int,
) -> dict[str, list[Turn]]:
    """Every engine's turns at one prompt; who comes first moves on from round to round."""
    names = list(contestants)
    turns: dict[str, list[Turn]] = {name: [] for name in names}
    for number in range(first, first + repeats):
        for name in rotated(names, number):
            turns[name].append(contestants[name].answer(prompt_ids, num_tokens))
    return turns


def rotated(names: Sequence[str], by: int) -> list[str]:
    """The same names in the same round, begun further on."""
    place = by % len(names)
    return [*names[place:], *names[:place]]


def row_of(task: str, plain: list[int], turns: Mapping[str, Sequence[Turn]]) -> dict[str, Any]:
    """What the results file keeps of one prompt; `plain` is the answer that all must equal."""
    row: dict[str, Any] = {"task": task, "num_tokens": len(plain), "engines": {}}
    for name, many in turns.items():
        found: dict[str, Any] = {
            "seconds": [round(turn.seconds, 4) for turn in many],
            "first_s": [round(turn.first_s, 4) for turn in many],
        }
        stats = [turn.stats for turn in many if turn.stats is not None]
        if stats:
            steps = max(1, sum(one.steps for one in stats))
            accepted = sum(one.decode_tokens for one in stats) / steps
            found["accepted_length"] = round(accepted, 4)
            found["verify_length"] = round(sum(one.drafted for one in stats) / steps, 4)
            found["identical"] = all(turn.token_ids == plain for turn in many)
        row["engines"][name] = found
    return row


def seconds_of(row: Mapping[str, Any], name: str, decode_only: bool = False) -> float:
    """The median time of an engine at one prompt; without the prefill, if decoding alone counts."""
    found = row["engines"][name]
    times = zip(found["seconds"], found["first_s"], strict=True)
    return statistics.median(total - (first if decode_only else 0.0) for total, first in times)


def speed_ratio(
    rows: Iterable[Mapping[str, Any]], fast: str, slow: str, decode_only: bool = False
) -> float:
    """How many times as fast an engine is as another, by the total time over these prompts."""
    many = list(rows)
    total = {n: sum(seconds_of(row, n, decode_only) for row in many) for n in (fast, slow)}
    return round(total[slow] / total[fast], 4) if total[fast] > 0 else 0.0


def summarise(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Ratios over all prompts and per task, the slow end, and whether the texts are the same."""
    engines = list(rows[0]["engines"])
    pairs = [pair for pair in RATIOS if set(pair) <= set(engines)]
    tasks = {task: [r for r in rows if r["task"] == task] for task in dict.fromkeys(_tasks(rows))}
    single = [seconds_of(row, PLAIN) / seconds_of(row, DRAFTED) for row in rows]
    return {
        "total_time": {f"{a} / {b}": speed_ratio(rows, a, b) for a, b in pairs},
        "decoding_alone": {f"{a} / {b}": speed_ratio(rows, a, b, True) for a, b in pairs},
        "by_task": {
            task: {f"{a} / {b}": speed_ratio(some, a, b) for a, b in pairs}
            for task, some in tasks.items()
        },
        "drafted / plain, 5th percentile of prompts": round(float(np.percentile(single, 5)), 4),
        "drafted / plain, slowest prompt": round(min(single), 4),
        "identical_answers": {name: _num_identical(rows, name) for name in (DRAFTED, RANDOM)},
        "num_prompts": len(rows),
        "num_tokens": sum(row["num_tokens"] for row in rows),
        "tokens_per_s": {name: _rate(rows, name) for name in engines},
        "accepted_length": {n: _mean(rows, n, "accepted_length") for n in (DRAFTED, RANDOM)},
        "verify_length": {n: _mean(rows, n, "verify_length") for n in (DRAFTED, RANDOM)},
        "drafted_by_task": {
            task: {key: _mean(some, DRAFTED, key) for key in ("accepted_length", "verify_length")}
            for task, some in tasks.items()
        },
    }


def _tasks(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    return [row["task"] for row in rows]


def _num_identical(rows: Iterable[Mapping[str, Any]], name: str) -> int:
    return sum(row["engines"][name]["identical"] for row in rows)


def _mean(rows: Iterable[Mapping[str, Any]], name: str, key: str) -> float:
    return round(statistics.fmean(row["engines"][name][key] for row in rows), 4)


def _rate(rows: Sequence[Mapping[str, Any]], name: str) -> float:
    seconds = sum(seconds_of(row, name) for row in rows)
    return round(sum(row["num_tokens"] for row in rows) / seconds, 2)


def table(summary: Mapping[str, Any]) -> list[str]:
    """The results as lines to print."""
    names, tasks = list(summary["total_time"]), summary["by_task"]
    lines = [f"{'times as fast':32}" + "".join(f"{TASKS[task][:9]:>11}" for task in tasks)]
    lines[0] += f"{'total':>9}{'decoding':>10}"
    for name in names:
        line = f"{name:32}" + "".join(f"{found[name]:11.2f}" for found in tasks.values())
        line += f"{summary['total_time'][name]:9.3f}{summary['decoding_alone'][name]:10.3f}"
        lines.append(line)
    for key in ("accepted_length", "verify_length"):
        values = [found[key] for found in summary["drafted_by_task"].values()]
        line = f"{'drafted: ' + key.replace('_', ' '):32}"
        lines.append(line + "".join(f"{value:11.2f}" for value in values))
    lowest = "drafted / plain, 5th percentile of prompts"
    lines.append(f"{lowest}: {summary[lowest]:.3f}")
    total = summary["num_prompts"]
    for name, count in summary["identical_answers"].items():
        lines.append(f"{name}: {count} of {total} answers identical with plain decoding")
    rates = (f"{name} {rate:.1f}" for name, rate in summary["tokens_per_s"].items())
    lines.append("tokens/s, prefill included: " + ", ".join(rates))
    return lines


def build_contestants(
    arguments: argparse.Namespace, drafter: str, folder: Path
) -> tuple[dict[str, Contestant], str]:
    """Every engine, loaded; and what is to be said of llama.cpp."""
    unlearnt = random_drafter(resolve_source(drafter).path, folder, arguments.seed)
    drafts = {PLAIN: None, DRAFTED: drafter, RANDOM: str(unlearnt)}
    contestants: dict[str, Contestant] = {
        name: Flashdraft(draft, arguments.dtype, arguments.tokens) for name, draft in drafts.items()
    }
    contestants[TRANSFORMERS] = Transformers()
    llama = Llama.start(arguments.llama_python)
    if isinstance(llama, str):
        print(f"llama.cpp left out: {llama}", file=sys.stderr)
        return contestants, f"left out: {llama}"
    contestants[LLAMA] = llama
    return contestants, f"llama-cpp-python {llama.version}"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Drafted CPU decoding against other engines.")
    parser.add_argument("bench", type=Path, help="folder with " + ", ".join(TASKS) + " (.jsonl)")
    parser.add_argument("--draft", default="auto", help="a drafter; auto = the default pair's")
    parser.add_argument("--dtype", default="auto", help="of flashdraft; auto = the default format")
    parser.add_argument("--prompts", type=int, default=6, help="a task, drawn by the seed")
    parser.add_argument("--tokens", type=int, default=128, help="new tokens at most")
    parser.add_argument("--repeats", type=int, default=3, help="turns of every engine at a prompt")
    parser.add_argument("--seed", type=int, default=0, help="of the draw and the random weights")
    parser.add_argument("--llama-python", default=sys.executable)
    parser.add_argument("--output", type=Path)
    return parser.parse_args()


def measure(
    contestants: Mapping[str, Contestant], arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    """All turns of all engines, prompt after prompt."""
    plain = contestants[PLAIN]
    assert isinstance(plain, Flashdraft)
    warm_up = plain.llm.chat_prompt([{"role": "user", "content": PROMPTS[0]}])
    for contestant in contestants.values():
        contestant.warm_up(warm_up)
    prompts = [
        (task, plain.llm.chat_prompt(prompt.messages))
        for task in TASKS
        for prompt in read_task(arguments.bench, task, arguments.prompts, arguments.seed)
    ]
    rows: list[dict[str, Any]] = []
    for number, (task, ids) in enumerate(prompts):
        answer = plain.answer(ids, arguments.tokens).token_ids or []
        first = number * arguments.repeats
        turns = take_turns(contestants, ids, len(answer), arguments.repeats, first)
        rows.append(row_of(task, answer, turns))
        ratio = speed_ratio(rows, DRAFTED, PLAIN)
        report_progress(f"{number + 1}/{len(prompts)} prompts ({task}), {ratio:.2f}x so far")
    return rows


def main() -> int:
    arguments = parse_arguments()
    drafter = default_drafter(MODEL) if arguments.draft == "auto" else arguments.draft
    if drafter is None:
        raise SystemExit(f"There is no drafter for {MODEL}; name one with --draft.")
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        contestants, llama = build_contestants(arguments, drafter, Path(folder))
        try:
            rows = measure(contestants, arguments)
        finally:
            for contestant in contestants.values():
                contestant.stop()
    ours = {name: c for name, c in contestants.items() if isinstance(c, Flashdraft)}
    kernels = ours[DRAFTED].llm.kernels
    result: dict[str, Any] = {
        "environment": {
            **describe_environment("benchmarks.cpu_draft", kernels.device),
            "load_average_at_start": round(load, 2),
            "llama.cpp": llama,
            "model": f"{MODEL} (real weights, Q4_1 GGUF)",
            "drafter_fingerprint": fingerprint(drafter),
            "kernels": kernels.name,
            "seed": arguments.seed,
        },
        "settings": {
            "prompts_per_task": arguments.prompts,
            "max_tokens": arguments.tokens,
            "repeats": arguments.repeats,
            "decoding": "greedy, batch 1, verify auto; nothing cached, the policy cold at start",
        },
        "summary": summarise(rows),
        "costs": {name: one.costs() for name, one in ours.items() if name != PLAIN},
        "rows": rows,
    }
    write_results(arguments.output, result)
    print("\n".join(table(result["summary"])))
    print(json.dumps({key: value for key, value in result.items() if key != "rows"}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
