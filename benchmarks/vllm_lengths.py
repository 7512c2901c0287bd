"""Accepted lengths of the same prompts here and on vLLM: python -m benchmarks.vllm_lengths

Reads two files of `flashdraft bench --json`: one made in process with a fixed verify length, one of
a vLLM with the same drafter. Both lengths are the tokens that decode steps gave, by those steps;
the first token of an answer is the prefill's. vLLM's own counters also hold what it accepts beyond
an answer's end, and are shown beside it. The exit status is 1 if the pooled lengths are more than
5 % apart.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from flashdraft.bench.report.reading import read_document
from flashdraft.bench.results import DRAFT

FOLDER = Path(__file__).parent / "results"
MOST_APART = 0.05


class Lengths(NamedTuple):
    """A task at one concurrency, in both engines."""

    task: str
    concurrency: int
    tokens: tuple[int, int]  # of decode steps: ours, vLLM's
    steps: tuple[int, int]
    counted: float  # by vLLM's counters

    @property
    def ratio(self) -> float:
        """vLLM's accepted length by ours."""
        return (self.tokens[1] / self.steps[1]) / (self.tokens[0] / self.steps[0])

    def line(self) -> str:
        ours, theirs = (t / s for t, s in zip(self.tokens, self.steps, strict=True))
        return (
            f"{self.task:<10} {self.concurrency or '':>2} {ours:8.3f} {theirs:8.3f} "
            f"{self.ratio:7.3f} {self.steps[0]:6} {self.steps[1]:6} {self.counted:9.3f}"
        )


def compare(ours: dict[str, Any], theirs: dict[str, Any]) -> Iterator[Lengths]:
    """Every drafted row that both have."""
    others = {(row["task"], row["concurrency"]): row for row in _drafted(theirs)}
    for row in _drafted(ours):
        key = row["task"], row["concurrency"]
        if key in others:
            both = row, others[key]
            assert ours["prompts_sha256"][key[0]] == theirs["prompts_sha256"][key[0]], key
            tokens, steps = (
                tuple(measure(one) for one in both)
                for measure in (_decoded, lambda one: sum(one["accepted_histogram"].values()))
            )
            yield Lengths(*key, tokens, steps, _counted(both[1]))


def pool(rows: list[Lengths]) -> Lengths:
    """All rows as one."""
    tokens, steps = (
        (sum(pair[0] for pair in pairs), sum(pair[1] for pair in pairs))
        for pairs in ([row.tokens for row in rows], [row.steps for row in rows])
    )
    counted = sum(row.counted * row.steps[1] for row in rows) / steps[1]
    return Lengths("pooled", 0, tokens, steps, counted)


def _drafted(document: dict[str, Any]) -> list[dict[str, Any]]:
    return [row for row in document["rows"] if row["mode"] == DRAFT]


def _decoded(row: dict[str, Any]) -> int:
    return int(row["output_tokens"]) - len(row["requests"])


def _counted(row: dict[str, Any]) -> float:
    """The length by the counters, whose the histogram of a vLLM is."""
    steps = row["accepted_histogram"]
    return sum(int(n) * count for n, count in steps.items()) / sum(steps.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ours", type=Path, default=FOLDER / "vllm_lengths_ours.json")
    parser.add_argument("--vllm", type=Path, default=FOLDER / "vllm_lengths_vllm.json")
    arguments = parser.parse_args()
    rows = list(compare(read_document(arguments.ours), read_document(arguments.vllm)))
    if not rows:
        sys.exit("The two files have no drafted row in common.")
    whole = pool(rows)
    print("task        c     ours     vLLM   ratio  steps  steps   counted")
    for row in (*rows, whole):
        print(row.line())
    return int(abs(whole.ratio - 1) > MOST_APART)


if __name__ == "__main__":
    sys.exit(main())
