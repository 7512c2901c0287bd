"""The README's table of traffic: drafted, plain, and vLLM beside it, from committed results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

Row = Mapping[str, Any]

LOADS = {  # as the table names them
    (1, "sampled"): "1 client",
    (1, "presence"): "1, presence penalty",
    (8, "greedy"): "8, greedy",
    (8, "sampled"): "8",
    (8, "logprobs"): "8, every eighth with log-probabilities",
    (8, "penalty"): "8, every eighth with a repetition penalty",
    (32, "sampled"): "32",
}
HEADS = (
    "clients (random weights, drafted: prescribed acceptance)",
    "drafted tok/s",
    "vLLM",
    "plain tok/s",
    "vLLM",
    "gap p95 ms",
    "vLLM",
    "first token p95 ms",
    "vLLM",
)


def headline(results: Mapping[str, Any], vllm: Mapping[str, Any]) -> Iterator[str]:
    """The lines of the table, and what it says of its figures."""
    ours = {
        _key(row, row["acceptance"] is not None): row
        for run in results["runs"]
        for row in run["rows"]
    }
    theirs = {_key(row, row["drafted"]): row for row in vllm["rows"]}
    yield _line(HEADS)
    yield _line(["---"] * len(HEADS))
    for load, name in LOADS.items():
        drafted, other = ours[(*load, True)], theirs.get((*load, True), {})
        plain, other_plain = ours.get((*load, False)), theirs.get((*load, False), {})
        yield _line(
            [
                name,
                f"**{drafted['tokens_per_s']:.0f}**",
                _cell(other.get("tokens_per_s")),
                _cell(plain and plain["tokens_per_s"]),
                _cell(other_plain.get("tokens_per_s")),
                _cell(drafted["gap"]["p95_ms"]),
                _cell(other.get("gap_p95_ms")),
                _cell(drafted["ttft"]["p95_ms"]),
                _cell(other.get("ttft_p95_ms")),
            ]
        )


def _key(row: Row, is_drafted: bool) -> tuple[int, str, bool]:
    return row["clients"], row["kind"], is_drafted


def _cell(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}"


def _line(cells: tuple[str, ...] | list[str]) -> str:
    return f"| {' | '.join(cells)} |"
