"""Full-size Gemma 4 on one GPU: speed, contexts, cold start, memory, kernels; and the real pair.

    python -m benchmarks.h200 --model 31b
    python -m benchmarks.h200 --model 26b
    python -m benchmarks.h200 --model real --bench BENCH
    python -m benchmarks.h200 --table

31b and 26b have random weights made on the device, and drafts are accepted at a prescribed rate per
slot (h200_inject.py), never by their content. Prompts of 128 random tokens, all requests submitted
at once; figures over whole requests, and of steady-state decoding beside them. `real` is the
default pair on the task files in BENCH. Each run merges its sections into one results file; a
section that fails is recorded as failed, and the others go on. --tiny tries everything out on a CPU
in miniature: its figures mean nothing.

    python -m benchmarks.h200 --model 31b --layers 6 --set cuda.overlap.MAX_ROWS=16

is a trial: with --layers or --set a section is one line, and is written only where --output says.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from benchmarks.h200_models import MODELS, first_layers, tiny
from benchmarks.h200_sections import Run
from benchmarks.h200_table import markdown, read_results
from benchmarks.h200_trial import read_setting

RESULTS = Path("benchmarks/results/h200.json")
QUANTIZED_RESULTS = Path("benchmarks/results/h200_quantized.json")


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Full-size Gemma 4 on one GPU; the real pair.")
    parser.add_argument("--model", choices=[*MODELS, "real"])
    parser.add_argument("--table", action="store_true", help="print the results file as Markdown")
    parser.add_argument("--output", type=Path, help="the results file, merged into")
    parser.add_argument("--sections", help="only those whose name holds one of these words, a,b,…")
    parser.add_argument("--section-seconds", type=float, default=120.0, help="time for each")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantize", choices=["int4", "int8", "fp8"], help="weights in few bits")
    parser.add_argument("--activations", choices=["int8", "fp8"], help="rows too, as --quantize")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tiny", action="store_true", help="in miniature, to try it out")
    trial = parser.add_argument_group("trials")
    trial.add_argument("--layers", type=int, help="the first so many only, a multiple of 6")
    trial.add_argument(
        "--set",
        type=read_setting,
        action="append",
        default=[],
        metavar="MODULE.NAME=VALUE",
        help="a constant of flashdraft.kernels for this run; may be given again",
    )
    parser.add_argument("--concurrency", type=_numbers, default=[1, 8, 32])
    parser.add_argument("--contexts", type=_numbers, default=[1024, 8192, 32768, 131072])
    parser.add_argument("--repeats", type=int, default=2, help="of a plain load; drafted: 2 n + 1")
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--new-tokens-alone", type=int, default=384)
    parser.add_argument("--step-tokens", type=int, default=4096, help="max_step_tokens")
    parser.add_argument("--prefill-chunk", type=int, default=4096)
    parser.add_argument("--cache-gb", type=float, default=28.0)
    real = parser.add_argument_group("--model real")
    real.add_argument("--target", default="smollm2-135m")
    real.add_argument("--bench", type=Path, help="folder of task files")
    real.add_argument("--prompts", type=int, default=20, help="a task and concurrency")
    real.add_argument("--tokens", type=int, default=256, help="new tokens at most")
    real.add_argument("--exact-prompts", type=int, default=50)
    found = parser.parse_args(arguments)
    if not found.table and found.model is None:
        parser.error("name a --model, or ask for the --table")
    if found.layers is not None or found.set:
        _check_trial(parser, found)
    elif found.output is None:
        found.output = QUANTIZED_RESULTS if found.quantize else RESULTS
    if found.output is not None:
        _check_output(parser, found.output)
    if found.quantize and (found.table or found.model == "real"):
        parser.error("--quantize is for the random-weight models")
    if found.model == "real" and found.bench is None:
        parser.error("--model real needs --bench, a folder of task files")
    return found


def _check_output(parser: argparse.ArgumentParser, output: Path) -> None:
    """Refuse a file that no section can be merged into, before any is run."""
    try:
        read_results(output)
    except ValueError as error:
        parser.error(f"--output {output} is no results file of this script ({error}); name another")


def _check_trial(parser: argparse.ArgumentParser, found: argparse.Namespace) -> None:
    """Refuse a trial that is none, or that would take the place of real results."""
    if found.table:
        parser.error("--layers and --set are of a run; the --table only reads a file")
    if found.layers is not None and found.model == "real":
        parser.error("--layers is for the random-weight models")
    real = {path.resolve() for path in (RESULTS, QUANTIZED_RESULTS)}
    if found.output is not None and found.output.resolve() in real:
        parser.error(f"--output {found.output} has the real results; name another file")
    if found.layers is not None:
        model = tiny(MODELS[found.model]) if found.tiny else MODELS[found.model]
        try:
            first_layers(model, found.layers)
        except ValueError as error:
            parser.error(str(error))


def main(arguments: list[str] | None = None) -> int:
    settings = parse_arguments(arguments)
    for setting in settings.set:
        setting.apply()
    if settings.table:
        print(markdown(read_results(settings.output)), end="")
        return 0
    run = Run(settings, time.perf_counter())
    words = (settings.sections or "").split(",")
    ok = True
    for name, function in run.sections().items():
        if name.endswith(" load") or any(word in name for word in words):
            ok = run.run_section(name, function) and ok
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
