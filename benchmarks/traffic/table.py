"""The rows of a traffic run as a table for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flashdraft.bench.report.table import UNKNOWN, aligned

Row = Mapping[str, Any]
HEADINGS = (
    "load",
    "engine",
    "tok/s",
    "TTFT p50/p95/p99 ms",
    "gap p50/p95/p99 ms",
    "verify",
    "accepted",
    "prompt rows",
    "stall ms",
)
NOTE = (
    "tok/s, TTFT and gaps are of the time after the warm-up; stall: the longest gap or step in it. "
    "verify: draft tokens a request and step; prompt rows: of steps that have any."
)


def render(document: Mapping[str, Any]) -> str:
    """All rows, under each other."""
    rows: Sequence[Row] = document["rows"]
    lines = [[*HEADINGS], *(_cells(row) for row in rows if "gap" in row)]
    text = list(aligned(lines)) if len(lines) > 1 else []
    for row in rows:
        text += _more(row)
    text += [f"skipped: {line}" for line in document["skipped"]]
    return "\n".join([*text, NOTE]) + "\n"


def _cells(row: Row) -> list[str]:
    steps, warm_up = row["steps"], row["warm_up"]
    stall = [warm_up[name] for name in ("longest_gap_ms", "longest_step_ms") if warm_up[name]]
    return [
        row["load"],
        row["engine"],
        f"{row['tokens_per_s']:.0f}",
        _percentiles(row["ttft"]),
        _percentiles(row["gap"]),
        _number(steps["mean_verify_length"]),
        _number(steps["mean_accepted_length"]),
        _number(steps["prompt_tokens_a_step"]),
        _number(max(stall, default=None)),
    ]


def _more(row: Row) -> list[str]:
    """What has no column: kinds of steps, failures, conversations, a long prompt."""
    name = f"{row['load']}, {row['engine']}"
    if "error" in row:
        return [f"{name}: FAILED: {row['error']}"]
    lines = []
    if "steps" in row:
        kinds = row["steps"]["kinds"].items()
        shown = [
            f"{kind} {100 * k['share']:.0f} % à {k['mean_ms']:.1f} ms (device {k['device_ms']:.1f})"
            for kind, k in kinds
        ]
        lines.append(f"{name}: steps {', '.join(shown)}")
    if "profile" in row:
        found = row["profile"]
        lines.append(f"{name}: of {found['steps']} steps, ms a step and launches by kernel:")
        lines += [f"  {k['ms']:8.3f} {k['launches']:7.1f}  {k['name']}" for k in found["kernels"]]
    if "conversations" in row:
        found = row["conversations"]
        share = found["hit_share"]
        lines.append(
            f"{name}: prefix hits {UNKNOWN if share is None else f'{100 * share:.1f} %'} of what "
            f"could hit; first step after a hit drafted {found['first_step_drafted']}, not drafted "
            f"{found['first_step_not_drafted']}, unknown {found['first_step_unknown']}"
        )
    if "long" in row and "ttft_s" in row["long"]:
        found = row["long"]
        lines.append(
            f"{name}: first token of the long prompt after {_number(found['ttft_s'])} s; gaps of "
            f"the others meanwhile {_percentiles(found['others_gap'])} ms, before "
            f"{_percentiles(found['others_gap_before'])}"
        )
    return lines


def _percentiles(found: Mapping[str, Any]) -> str:
    values = [found[name] for name in ("p50_ms", "p95_ms", "p99_ms")]
    return "/".join(UNKNOWN if value is None else f"{value:.0f}" for value in values)


def _number(value: float | None) -> str:
    if value is None:
        return UNKNOWN
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
