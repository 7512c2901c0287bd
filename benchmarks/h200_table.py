"""The results file of h200.py: merging sections into it, and its figures as Markdown.

The bars are the project's own; vLLM's figures stand in a results file of their own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.accepted_length import TASKS, write_results

Results = Mapping[str, Any]
VLLM = Path(__file__).parent / "results" / "h200_vllm.json"
RANDOM = "random weights"  # said in every line that has such figures


class Bar(NamedTuple):
    """What one line of the table must reach; None = report only."""

    label: str
    section: str
    floors: Mapping[int, float | None]  # tok/s by concurrency


BARS = (
    Bar("31B plain", "31b plain", {1: 60, 8: 450, 32: 1500}),
    Bar("31B drafted, α 0.909", "31b drafted", {1: 450, 8: 2700, 32: 4500}),
    Bar("26B-A4B plain, degenerate routing", "26b plain degenerate", {1: 330, 8: 2000, 32: 5500}),
    Bar("26B-A4B plain, uniform routing", "26b plain uniform", {1: 300, 8: 1100, 32: 2400}),
    Bar(
        "26B-A4B drafted, α 0.893, degenerate",
        "26b drafted degenerate",
        {1: 1600, 8: 5500, 32: 13000},
    ),
    Bar(
        "26B-A4B drafted, α 0.893, uniform",
        "26b drafted uniform",
        {1: 600, 8: None, 32: None},
    ),
)

QUANTIZED_BARS = (
    Bar("31B int4 plain", "31b int4 plain", {1: 170}),
    Bar("31B int4 drafted, α 0.909", "31b int4 drafted", {1: 950}),
    Bar("31B fp8 plain", "31b fp8 plain", {1: 110}),
    Bar("31B fp8 drafted, α 0.909", "31b fp8 drafted", {1: 750}),
    Bar("26B-A4B int4 plain, degenerate routing", "26b int4 plain degenerate", {1: 600}),
    Bar("26B-A4B int4 plain, uniform routing", "26b int4 plain uniform", {1: None}),
    Bar("26B-A4B int4 drafted, α 0.893, degenerate", "26b int4 drafted degenerate", {1: None}),
    Bar("26B-A4B int4 drafted, α 0.893, uniform", "26b int4 drafted uniform", {1: None}),
)
RESIDENT_BARS = {"31b int4": 23, "31b fp8": None, "26b int4": 19}  # GB


def read_results(path: Path) -> dict[str, Any]:
    """The sections measured so far; none where there is no file. ValueError for another's file."""
    if not path.is_file():
        return {"sections": {}}
    results = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(results, dict) or not isinstance(results.get("sections"), dict):
        raise ValueError('there are no "sections" in it')
    return results


def merge_section(path: Path, name: str, record: Results) -> None:
    """Put one section into the file, whole, in the place of an older one."""
    results = read_results(path)
    results["sections"][name] = record
    write_results(path, results)


def markdown(results: Results) -> str:
    """Every figure of the file that the project has set itself a bar for."""
    if any(name in (bar.section for bar in QUANTIZED_BARS) for name in results["sections"]):
        lines = [*_throughput(results, QUANTIZED_BARS), "", *_resident(results)]
    else:
        lines = [*_throughput(results, BARS), "", *_single_figures(results)]
        lines += ["", *_contexts(results)]
    if any(one["environment"]["tiny"] for one in results["sections"].values()):
        lines = ["Of a miniature: these figures mean nothing.", "", *lines]
    return "\n".join([*lines, "", *_real(results)]).rstrip() + "\n"


def _section(results: Results, name: str) -> Mapping[str, Any]:
    return results["sections"].get(name, {})


def _throughput(results: Results, bars: tuple[Bar, ...]) -> Iterator[str]:
    yield (
        "| tok/s | c | bar | vLLM 0.26 | whole requests | steady state | tokens a step and request"
        " | mean verify width | experts a layer | conditions |"
    )
    yield "|---|---|---|---|---|---|---|---|---|---|"
    vllm = json.loads(VLLM.read_text(encoding="utf-8"))["tok_s"]
    for bar in bars:
        rows = _section(results, bar.section).get("load", {})
        for concurrency, floor in bar.floors.items():
            row = rows.get(f"c={concurrency}")
            ours = ["not measured", "", "", "", ""] if row is None else _cells(row, floor)
            wanted = "report" if floor is None else f"≥ {floor:g}"
            theirs = vllm.get(bar.section, {}).get(str(concurrency))
            cells = [bar.label, concurrency, wanted, "" if theirs is None else f"{theirs:g}", *ours]
            cells.append(f"{RANDOM}, α prescribed" if "α" in bar.label else RANDOM)
            yield "| " + " | ".join(map(str, cells)) + " |"


def _cells(row: Mapping[str, Any], floor: float | None) -> list[str]:
    median = row["median"]
    wall = f"{median['tok_s']:g}"
    if floor is not None and median["tok_s"] < floor:
        wall += " (missed)"
    widths = {int(width): count for width, count in median.get("verify_widths", {}).items()}
    mean = sum(w * n for w, n in widths.items()) / max(1, sum(widths.values()))
    steady = median.get("steady_tok_s")
    experts = row.get("distinct_experts_per_layer")
    return [
        wall,
        "" if steady is None else f"{steady:g}",
        f"{median['accepted_length']:.2f}",
        f"{mean:.1f}",
        "" if experts is None else f"{experts:g}",
    ]


def _resident(results: Results) -> Iterator[str]:
    yield "| memory with drafter and one request | bar | torch's peak | of the device |"
    yield "|---|---|---|---|"
    for name, bar in RESIDENT_BARS.items():
        section = _section(results, f"{name} resident")
        if section.get("memory"):  # none without a GPU
            context, memory = section["engine"]["max_context"], section["memory"]
            wanted = "report" if bar is None else f"≤ {bar} GB"
            peak, whole = f"{memory['peak_gb']} GB", f"{memory['device_used_gb']} GB"
            yield f"| {name}, {RANDOM}, a context of {context} | {wanted} | {peak} | {whole} |"


def _single_figures(results: Results) -> Iterator[str]:
    yield "| | bar | measured |"
    yield "|---|---|---|"
    for model in ("31b", "26b"):
        suffix = "" if model == "31b" else " degenerate"
        section = _section(results, f"{model} drafted{suffix}")
        cold = section.get("cold_start", {})
        if cold:
            cache = "an empty" if section.get("triton_cache_was_empty") else "a filled"
            start = f"{model}, {RANDOM}, {cache} Triton cache"
            first, at_speed = cold["first_token_s"], cold["first_drafted_step_at_speed_s"]
            yield f"| {start}: weights resident to first token | ≤ 20 s | {first} s |"
            yield f"| {start}: to the first drafted step at speed | | {at_speed} s |"
        fixed = _section(results, f"{model} fixed{suffix}").get("load", {}).get("c=1")
        if fixed:
            speed = f"{fixed['median']['tok_s']:g} tok/s"
            what = f"{RANDOM}, α prescribed, verify 15 always, c=1"
            yield f"| {model} drafted, {what} | | {speed} |"
        loaded = _section(results, f"{model} load").get("model", {})
        if "peak_gb" in loaded:
            sizes = f"{loaded['target_gb']} + {loaded['drafter_gb']} GB"
            what = f"target and drafter in memory (read in {loaded['reading_s']} s)"
            yield f"| {model}, {RANDOM}: {what} | | {sizes} |"
    drafted = _section(results, "31b contexts drafted").get("contexts", {})
    if "1024" in drafted and "32768" in drafted:
        ratio = drafted["32768"]["step_ms"] / drafted["1024"]["step_ms"]
        yield f"| 31b, {RANDOM}: drafted step at 32k over 1k context | ≤ 1.3 | {ratio:.2f} |"
    plain = _section(results, "31b contexts plain").get("contexts", {})
    if "8192" in plain:
        seconds = plain["8192"]["prefill_s"]
        yield f"| 31b, {RANDOM}: prefill of 8192 tokens | ≤ 1.1 s | {seconds} s |"


def _contexts(results: Results) -> Iterator[str]:
    yield "| 31B, context | prefill s | TFLOP/s | plain step ms | drafted (verify 15) step ms |"
    yield "|---|---|---|---|---|"
    plain = _section(results, "31b contexts plain").get("contexts", {})
    drafted = _section(results, "31b contexts drafted").get("contexts", {})
    for length in sorted({*plain, *drafted}, key=int):
        one, other = plain.get(length), drafted.get(length)
        first = one or other
        cells = [
            f"{length}, {RANDOM}",
            first["prefill_s"],
            first["prefill_tflops_s"],
            "" if one is None else one.get("step_ms", ""),
            "" if other is None else other.get("step_ms", ""),
        ]
        yield "| " + " | ".join(map(str, cells)) + " |"


def _real(results: Results) -> Iterator[str]:
    tasks = _section(results, "real tasks").get("tasks", {})
    if tasks:
        yield "| real prompts | c | accepted length | plain tok/s | drafted tok/s | speedup |"
        yield "|---|---|---|---|---|---|"
    for task, found in tasks.items():
        for concurrency in (1, 8):
            if f"speedup c={concurrency}" not in found:
                continue  # the section failed there
            drafted, plain = found[f"drafted c={concurrency}"], found[f"plain c={concurrency}"]
            cells = [
                TASKS.get(task, task),
                concurrency,
                drafted["accepted_length"],
                plain["tok_s"],
                drafted["tok_s"],
                found[f"speedup c={concurrency}"],
            ]
            yield "| " + " | ".join(map(str, cells)) + " |"
    exact = _section(results, "real exact")
    if "cost of exact, drafted" in exact:
        parted, cost = exact["divergences exact"], exact["cost of exact, drafted"]
        yield ""
        yield (
            f"`exact=True`: {parted['divergences']} of {parted['answers']} answers part "
            f"(bar: 0); drafted text takes {cost} × the time (aim: ≤ 1.2)."
        )
