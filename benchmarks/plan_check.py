"""What `flashdraft plan` predicts beside what the H200 measured: python -m benchmarks.plan_check

Reads the results of h200.py: those in bf16, or with benchmarks/results/h200_quantized.json those in
few bits. A prediction is told the load, the verify length and, where the routing was prescribed,
the experts; the card's shares are the same for every row (bench/plan/gpus.py).
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.h200_models import MODELS
from benchmarks.h200_table import read_results
from flashdraft.bench.plan.gpus import find_card
from flashdraft.bench.plan.pairs import Pair, expected_length, find_pair
from flashdraft.bench.plan.sizes import BF16, GPU_FORMATS, StoredFormat
from flashdraft.bench.plan.speed import predict

RESULTS = Path(__file__).parent / "results" / "h200.json"
PAIRS = {"31b": "google/gemma-4-31B-it", "26b": "google/gemma-4-26B-A4B-it"}
FORMATS = {form.flags[1]: form for form in GPU_FORMATS if len(form.flags) == 2}  # by --quantize


class Check(NamedTuple):
    """One measured row and its prediction."""

    section: str
    load: str
    verify: int
    predicted_ms: float
    measured_ms: float
    predicted_tok_s: float
    measured_tok_s: float  # of steady decoding

    @property
    def step_error(self) -> float:
        return self.predicted_ms / self.measured_ms - 1

    @property
    def speed_error(self) -> float:
        return self.predicted_tok_s / self.measured_tok_s - 1


def check_predictions(results: Mapping[str, Any]) -> list[Check]:
    """Every load and context of the results that has a steady step, predicted."""
    checks = []
    for section, record in results["sections"].items():
        name = section.split()[0]
        if name not in PAIRS or record.get("environment", {}).get("tiny"):
            continue  # another model, or miniatures whose sizes are not these
        pair, alpha = find_pair(PAIRS[name]), MODELS[name].alpha
        form = next((form for word, form in FORMATS.items() if word in section.split()), BF16)
        for load, row in record.get("load", {}).items():
            figures, length = row["median"], row["prompt_tokens"] + row["new_tokens"] // 2
            experts = row.get("distinct_experts_per_layer")
            checks += _check(
                section, load, pair, alpha, form, figures, row["requests"], length, experts
            )
        for load, row in record.get("contexts", {}).items():
            if name == "31b":  # which experts were read is not recorded here
                length = int(row["context"])
                checks += _check(section, f"{load} tokens", pair, alpha, form, row, 1, length, None)
    return checks


def _check(
    section: str,
    load: str,
    pair: Pair,
    alpha: float,
    form: StoredFormat,
    figures: Mapping[str, Any],
    requests: int,
    context: int,
    experts: float | None,
) -> Iterator[Check]:
    if "step_ms" not in figures:
        return
    verify = round(figures["rows_per_step"] / requests) - 1
    step = predict(
        pair,
        find_card("h200"),
        requests=requests,
        context=context,
        verify=verify,
        form=form,
        experts_read=experts,
        accepted_length=expected_length(alpha, verify),
    )
    yield Check(
        section,
        load,
        verify,
        1e3 * step.step_s,
        figures["step_ms"],
        step.tokens_per_s,
        figures["steady_tok_s"],
    )


def table(checks: Sequence[Check]) -> Iterator[str]:
    """The checks as Markdown, and the mean and the largest error of a step's time."""
    yield "| section | load | verify | step, ms | measured | error | tok/s | measured | error |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for one in checks:
        yield (
            f"| {one.section} | {one.load} | {one.verify} | {one.predicted_ms:.2f} | "
            f"{one.measured_ms:.2f} | {one.step_error:+.0%} | {one.predicted_tok_s:.0f} | "
            f"{one.measured_tok_s:.0f} | {one.speed_error:+.0%} |"
        )
    errors = [abs(one.step_error) for one in checks]
    worst = max(checks, key=lambda one: abs(one.step_error))
    yield ""
    yield (
        f"A step's time is off by {statistics.fmean(errors):.0%} on average and by "
        f"{abs(worst.step_error):.0%} at most ({worst.section}, {worst.load}); {len(checks)} rows."
    )
    speeds = [abs(one.speed_error) for one in checks]
    worst = max(checks, key=lambda one: abs(one.speed_error))
    yield (
        f"Steady tokens/s are off by {statistics.fmean(speeds):.0%} on average and by "
        f"{abs(worst.speed_error):.0%} at most ({worst.section}, {worst.load})."
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", nargs="?", type=Path, default=RESULTS)
    path = parser.parse_args(argv).results
    if not path.is_file():
        print(f"There is no results file {path}; benchmarks.h200 writes it.", file=sys.stderr)
        return 2
    try:
        results = read_results(path)
    except ValueError as error:
        print(f"{path} is no results file of benchmarks.h200: {error}.", file=sys.stderr)
        return 2
    checks = check_predictions(results)
    if not checks:
        print(f"{path} holds no full-size row with a steady step.", file=sys.stderr)
        return 2
    print("\n".join(table(checks)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
