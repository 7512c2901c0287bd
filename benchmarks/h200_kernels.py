"""Every plan of the Triton kernels that might be the fastest, at the sizes of Gemma 4, on one GPU.

    python -m benchmarks.h200_kernels --linear --attention --seconds 90 --output FILE.json

Each plan is checked against float32 and timed in microseconds from graph replays, with inputs that
the cache does not hold; floors are the bytes a call must move at the measured bandwidth. No section
named means all of them. `--seconds` limits the timing of each section, not its compilation.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import triton

from benchmarks.accepted_length import describe_environment
from benchmarks.h200_attention import compile_attention, sweep_attention
from benchmarks.h200_linear import compile_linears, sweep_linears
from benchmarks.h200_timing import BANDWIDTH, Deadline

SECTIONS = {
    "linear": (compile_linears, sweep_linears),
    "attention": (compile_attention, sweep_attention),
}


def as_lines(results: dict[str, Any]) -> str:
    """JSON with one line for each measurement."""
    fields = []
    for key, value in results.items():
        text = json.dumps(value)
        if isinstance(value, list):
            text = "[\n  " + ",\n  ".join(json.dumps(entry) for entry in value) + "\n ]"
        fields.append(f" {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(fields) + "\n}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for section in SECTIONS:
        parser.add_argument(f"--{section}", action="store_true")
    parser.add_argument("--seconds", type=float, default=90.0, help="of timing, for each section")
    parser.add_argument("--output", type=Path, help="where to write the results as JSON")
    options = vars(parser.parse_args())
    chosen = [name for name in SECTIONS if options[name]] or list(SECTIONS)
    torch.manual_seed(0)
    results: dict[str, Any] = {
        "environment": {
            **describe_environment("benchmarks.h200_kernels", torch.device("cuda")),
            "triton": triton.__version__,
        },
        "bandwidth": BANDWIDTH,
    }
    for name in chosen:
        compile_all, sweep = SECTIONS[name]
        seconds = compile_all()
        print(f"# {name}: compiled in {seconds:.0f} s", flush=True)
        deadline = Deadline(options["seconds"])
        results[name] = sweep(deadline)
        results[f"{name}_complete"] = not deadline.passed()
        if options["output"] is not None:  # after each section: a later one may be cut short
            options["output"].write_text(as_lines(results))
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
