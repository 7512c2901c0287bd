"""A wheel's speed beside a build for this machine alone (-march=native), in interleaved pairs.

    git worktree add ../native ca0ee6e && (cd ../native && python setup.py build_ext --inplace)
    pip wheel --no-deps --wheel-dir dist . && pip install --no-deps --target ../wheel dist/*.whl
    python -m benchmarks.wheel_speed ../native ../wheel \
        --output benchmarks/results/wheel_speed.json

ca0ee6e is the last commit whose setup.py says -march=native. Each folder has a process of its own
that imports flashdraft from there, loads the default pair and waits. They answer in turns, one at a
time, the first of a pair changing from pair to pair; what is compared is the ratio within a pair,
so that a machine that others use as well is slow for both. Plain answers, and drafted ones with a
fixed verify length: the policy's choice depends on the clock. Where others use the machine, compare
the processor's time on one thread: it does not count while another process has the core. Where its
weights come to lie makes a process up to 3 % faster or slower for as long as it lives, so that each
round starts new ones.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from tests.prompts import PROMPTS

MODEL = "smollm2-135m"
VERIFY = 6
WORKER = f"""
import json, sys, time
import torch
torch.set_num_threads(int(sys.argv[1]))
from flashdraft import LLM, SamplingParams
engines = {{"plain": LLM({MODEL!r}, device="cpu", draft=None),
           "drafted": LLM({MODEL!r}, device="cpu", verify={VERIFY})}}
print(json.dumps(getattr(engines["plain"].kernels, "level", "native")), flush=True)
for line in sys.stdin:
    kind, prompt, tokens = json.loads(line)
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    ids = engines[kind].chat_prompt([{{"role": "user", "content": prompt}}])
    start = time.perf_counter(), time.process_time()
    answer = engines[kind].generate([ids], params)[0]
    taken = time.perf_counter() - start[0], time.process_time() - start[1]
    print(json.dumps([*taken, answer.token_ids]), flush=True)
"""


class Answer(NamedTuple):
    """One answer, and the seconds that it took by the wall and by the processor."""

    wall: float
    processor: float
    token_ids: list[int]


class Worker:
    """A process that answers with the flashdraft of one folder."""

    def __init__(self, folder: Path, threads: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", WORKER, str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(folder.resolve())},
            cwd=folder,
        )
        self.level = self._read()

    def answer(self, kind: str, prompt: str, tokens: int) -> Answer:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([kind, prompt, tokens]) + "\n")
        self._process.stdin.flush()
        return Answer(*self._read())

    def stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("a worker ended; its own words are above")
        return json.loads(line)


def run_round(
    folders: list[Path], threads: int, pairs: int, tokens: int, is_odd: bool
) -> tuple[dict[str, list[list[Answer]]], list[str]]:
    """Answers of each kind as pairs in the order of `folders`, and the level of each folder."""
    order = [1, 0] if is_odd else [0, 1]
    workers = {place: Worker(folders[place], threads) for place in order}
    answers: dict[str, list[list[Answer]]] = {"plain": [], "drafted": []}
    for kind, found in answers.items():
        for place in order:
            workers[place].answer(kind, PROMPTS[0], tokens)  # warms up
        for pair in range(pairs):
            prompt = PROMPTS[pair % len(PROMPTS)]
            turn = order if pair % 2 else order[::-1]
            by = {place: workers[place].answer(kind, prompt, tokens) for place in turn}
            found.append([by[0], by[1]])
    for worker in workers.values():
        worker.stop()
    return answers, [workers[place].level for place in (0, 1)]


def summarise(both: list[list[Answer]]) -> dict[str, Any]:
    return {
        "pairs": len(both),
        "equal_answers": sum(n.token_ids == w.token_ids for n, w in both),
        "processor_time": compare([n.processor for n, _ in both], [w.processor for _, w in both]),
        "wall_time": compare([n.wall for n, _ in both], [w.wall for _, w in both]),
    }


def compare(native: list[float], wheel: list[float]) -> dict[str, Any]:
    ratios = [n / w for n, w in zip(native, wheel, strict=True)]
    quarters = statistics.quantiles(ratios, n=4)
    return {
        "median_ratio": round(statistics.median(ratios), 4),
        "quartiles": [round(quarters[0], 4), round(quarters[2], 4)],
        "native_median_s": round(statistics.median(native), 4),
        "wheel_median_s": round(statistics.median(wheel), 4),
        "ratios": [round(ratio, 4) for ratio in ratios],
    }


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def main() -> int:
    parser = argparse.ArgumentParser(description="A wheel beside a build for this machine.")
    parser.add_argument("native", type=Path, help="a checkout built with -march=native")
    parser.add_argument("wheel", type=Path, help="a folder that a wheel was installed to")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--pairs", type=int, default=10, help="of each kind in a round")
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--conditions", default="nothing else ran", help="what else ran")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    answers: dict[str, list[list[Answer]]] = {"plain": [], "drafted": []}
    folders, sizes = [arguments.native, arguments.wheel], (arguments.pairs, arguments.tokens)
    for number in range(arguments.rounds):
        found, built = run_round(folders, arguments.threads, *sizes, is_odd=bool(number % 2))
        for kind, both in found.items():
            answers[kind] += both
            ratio = statistics.median(n.processor / w.processor for n, w in both)
            print(f"round {number} {kind}: {ratio:.4f}", flush=True)
    libraries = sorted(arguments.wheel.glob("flashdraft/kernels/cpu/_native_*.so"))
    result = {
        "what": "ratio = seconds of the -march=native build / seconds of the wheel, within a pair",
        "model": MODEL,
        "verify": VERIFY,
        "processor": processor(),
        "cores": os.cpu_count(),
        "threads": arguments.threads,
        "conditions": arguments.conditions,
        "rounds": arguments.rounds,
        "tokens": arguments.tokens,
        "wheel_level": built[1],
        "wheel_libraries": {
            path.name: hashlib.sha256(path.read_bytes()).hexdigest()[:16] for path in libraries
        },
        "python": platform.python_version(),
        "compiler": platform.python_compiler(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": f"python -m benchmarks.wheel_speed NATIVE WHEEL --rounds {arguments.rounds} "
        f"--pairs {arguments.pairs} --tokens {arguments.tokens} --threads {arguments.threads}",
        **{kind: summarise(both) for kind, both in answers.items()},
    }
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
