"""Checkpoints corrupted in thousands of ways: each is refused in words, or loads and answers.

    python -m benchmarks.corrupted_checkpoints --cases 10000 --seed 0 \\
        --output benchmarks/results/corrupted_checkpoints.json

Every case is a whole tiny checkpoint (corrupted_bases.py) damaged by its seed (corrupted_cases.py)
and loaded by `LLM` in a process of its own kind (corrupted_worker.py), which is started anew where
a case ends it. A fault is any error but ours, a message that would write control characters to a
terminal, more than ten seconds, or more than a gigabyte. `--cases 1 --seed N` repeats case N.
"""

from __future__ import annotations

import argparse
import collections
import json
import select
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.corrupted_bases import DRAFTER, TARGET, Base, build_bases
from benchmarks.corrupted_cases import Case, make_case
from benchmarks.corrupted_worker import MAX_BYTES
from flashdraft.bench.run.environment import describe_environment
from flashdraft.children import module_command, python_environment

MAX_SECONDS = 10.0
_START_SECONDS = 600.0  # importing torch, and whole checkpoints first, on a busy machine
_MAX_SHOWN = 50  # faults in the results


class Worker:
    """The loading process, started when it is needed."""

    def __init__(self, bases: dict[str, Base]) -> None:
        models = [str(base.model) for name, base in bases.items() if name != DRAFTER]
        models.append(f"{bases[TARGET].model}={bases[DRAFTER].model}")
        self._command = module_command("benchmarks.corrupted_worker", *models)
        self._process: subprocess.Popen[str] | None = None
        self.num_starts = 0

    def try_case(self, case: Case) -> dict[str, Any]:
        """What came of a case; a death or a hang is a fault like any other."""
        process = self._start()
        assert process.stdin is not None
        question = {"model": str(case.model), "draft": str(case.draft) if case.draft else None}
        process.stdin.write(json.dumps(question) + "\n")
        process.stdin.flush()
        answer = self._answer(MAX_SECONDS)
        if answer is not None:
            found: dict[str, Any] = json.loads(answer)
            if found["bytes"] > MAX_BYTES:
                found["fault"] = found["fault"] or f"it took {found['bytes'] / 1e6:.0f} MB"
            return found
        code = process.poll()
        self.stop()
        outcome = "hang" if code is None else f"death ({code})"
        return {"outcome": outcome, "message": "", "fault": outcome, "seconds": None, "bytes": None}

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _start(self) -> subprocess.Popen[str]:
        if self._process is None:
            self.num_starts += 1
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**python_environment(), "PYTHONPATH": str(Path(__file__).parents[1])},
                text=True,
            )
            if self._answer(_START_SECONDS) is None:
                raise SystemExit("The loading process does not start; run it by hand to see why.")
        return self._process

    def _answer(self, seconds: float) -> str | None:
        assert self._process is not None and self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], seconds)[0]:
            return None
        return self._process.stdout.readline() or None


def run_cases(seeds: range, folder: Path) -> Iterator[tuple[int, Case, dict[str, Any]]]:
    """Every seed's case and what came of it; `folder` is for the files."""
    bases = build_bases(folder / "whole")
    worker = Worker(bases)
    try:
        for seed in seeds:
            place = folder / "case"
            case = make_case(seed, bases, place)
            yield seed, case, worker.try_case(case)
            shutil.rmtree(place)
    finally:
        worker.stop()


def summarize(results: list[tuple[int, Case, dict[str, Any]]]) -> dict[str, Any]:
    """Counts by kind of damage and outcome, the worst time and memory, and every fault."""
    by_kind: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    by_base: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    faults = []
    for seed, case, found in results:
        by_kind[case.kind][found["outcome"]] += 1
        by_base[case.base][found["outcome"]] += 1
        if found["fault"] is not None:
            faults.append({"seed": seed, "base": case.base, "edits": case.edits, **found})
    ended = [found for _, _, found in results if found["seconds"] is not None]
    slowest = max(results, key=lambda one: one[2]["seconds"] or 0.0)
    largest = max(results, key=lambda one: one[2]["bytes"] or 0)
    return {
        "num_cases": len(results),
        "num_faults": len(faults),
        "by_kind": {kind: dict(counts.most_common()) for kind, counts in sorted(by_kind.items())},
        "by_base": {base: dict(counts.most_common()) for base, counts in sorted(by_base.items())},
        "mean_seconds": round(sum(one["seconds"] for one in ended) / max(1, len(ended)), 4),
        "worst_seconds": round(slowest[2]["seconds"] or 0.0, 3),
        "slowest_seed": slowest[0],
        "worst_bytes": largest[2]["bytes"],
        "largest_seed": largest[0],
        "faults": faults[:_MAX_SHOWN],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--cases", type=int, default=300, help="how many")
    parser.add_argument("--seed", type=int, default=0, help="of the first case")
    parser.add_argument("--output", type=Path, help="where the results go")
    parser.add_argument("--show", action="store_true", help="print every case")
    arguments = parser.parse_args()
    seeds = range(arguments.seed, arguments.seed + arguments.cases)
    results = []
    with tempfile.TemporaryDirectory(prefix="corrupted-") as folder:
        for seed, case, found in run_cases(seeds, Path(folder)):
            results.append((seed, case, found))
            if found["fault"] is not None or arguments.show:
                print(f"{seed} {case.base} {case.edits}: {found['outcome']}: {found['message']}")
            if found["fault"] is not None:
                print(f"    FAULT {found['fault']}", flush=True)
    environment = describe_environment(sys.argv[1:])
    environment["command"] = f"python -m benchmarks.corrupted_checkpoints {' '.join(sys.argv[1:])}"
    limits = {"seconds": MAX_SECONDS, "bytes": MAX_BYTES}
    document = {
        "environment": environment,
        "seeds": [seeds.start, seeds.stop - 1],
        "limits": limits,
        **summarize(results),
    }
    text = json.dumps(document, indent=1) + "\n"
    if arguments.output is not None:
        arguments.output.write_text(text, encoding="utf-8")
    print(json.dumps({key: document[key] for key in document if key != "faults"}))
    return 1 if document["num_faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
