"""How long the command line takes to start: python -m benchmarks.start [--before COMMIT]

    python -m benchmarks.start --before ca0ee6e --output benchmarks/results/start.json

Every round runs `python -c pass` and each command once, in turn, so that what else the machine does
falls on all of them alike. A command is started as its script is, over this checkout, and with
--before over that commit too. Times are of the whole process; what counts is what a command takes
over Python itself.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

from flashdraft.bench.run.environment import describe_environment

ROOT = Path(__file__).parents[1]
PYTHON = "python -c pass"
START = "import sys; from flashdraft.cli import main; sys.argv[0] = 'flashdraft'; sys.exit(main())"
COMMANDS = (
    "flashdraft --version",
    "flashdraft --help",
    "flashdraft genrate",
    "flashdraft plan --help",
    "flashdraft plan google/gemma-4-31B-it --gpu h200",
    "flashdraft models",
)
LEAST_RUNS = 10


def seconds_of(command: str, checkout: Path) -> float:
    """One run, from the start of its process to its end; what it prints is thrown away."""
    words = ["-c", "pass"] if command == PYTHON else ["-c", START, *command.split()[1:]]
    environment = os.environ | {"PYTHONPATH": str(checkout), "HF_HUB_OFFLINE": "1"}
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, *words], cwd=checkout, env=environment, capture_output=True, check=False
    )
    taken = time.perf_counter() - start
    expected = 2 if command.endswith("genrate") else 0
    if done.returncode != expected:
        raise SystemExit(f"{command} ended with {done.returncode}: {done.stderr.decode()[-500:]}")
    return taken


def measure(checkouts: dict[str, Path], num_runs: int) -> dict[str, Any]:
    """Median, least and most of every command over every checkout, in turns."""
    cells = [("", PYTHON), *((label, one) for label in checkouts for one in COMMANDS)]
    times: dict[tuple[str, str], list[float]] = {cell: [] for cell in cells}
    for number in range(num_runs + 1):
        for label, command in cells:
            taken = seconds_of(command, checkouts.get(label, ROOT))
            if number:  # the first round fills the disk's cache and writes bytecode
                times[label, command].append(taken)
    base = statistics.median(times["", PYTHON])
    return {
        "python_s": summary(times["", PYTHON]),
        **{
            label: {
                one: summary(times[label, one])
                | {"over_python_s": round(statistics.median(times[label, one]) - base, 3)}
                for one in COMMANDS
            }
            for label in checkouts
        },
    }


def summary(times: list[float]) -> dict[str, float]:
    found = {"median_s": statistics.median(times), "least_s": min(times), "most_s": max(times)}
    return {name: round(value, 3) for name, value in found.items()}


def extract(commit: str, folder: Path) -> Path:
    """The package at a commit, in a folder."""
    command = ["git", "-C", str(ROOT), "archive", "--format=tar", commit, "flashdraft"]
    archive = subprocess.run(command, check=True, capture_output=True, env=dict(os.environ)).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(folder, filter="data")
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--before", metavar="COMMIT", help="measure a commit as well")
    parser.add_argument("--runs", type=int, default=LEAST_RUNS, metavar="N")
    parser.add_argument("--output", type=Path, metavar="FILE")
    options = parser.parse_args()
    if options.runs < LEAST_RUNS:
        parser.error(f"--runs is {options.runs}; it must be at least {LEAST_RUNS}")
    with tempfile.TemporaryDirectory() as folder:
        checkouts = {"after": ROOT}
        if options.before:
            checkouts = {"before": extract(options.before, Path(folder)), **checkouts}
        load = [round(one, 2) for one in os.getloadavg()]
        found = measure(checkouts, options.runs)
    words = ["python", "-m", "benchmarks.start", *sys.argv[1:]]
    document = {
        "environment": describe_environment([]) | {"command": " ".join(words)},
        "before": options.before,
        "runs": options.runs,
        "load_average": {"before": load, "after": [round(one, 2) for one in os.getloadavg()]},
        "seconds": found,
    }
    text = json.dumps(document, indent=1)
    print(text)
    if options.output:
        options.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
