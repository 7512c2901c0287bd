"""A wheel's speed beside a build for this machine alone (-march=native), in interleaved pairs.

    git worktree add ../native ca0ee6e && (cd ../native && python setup.py build_ext --inplace)
    pip wheel --no-deps --wheel-dir dist . && pip install --no-deps --target ../wheel dist/*.whl
    python -m benchmarks.wheel_speed ../native ../wheel \
        --output benchmarks/results/wheel_speed.json

ca0ee6e is the last commit whose setup.py says -march=native. Each folder has a process of its own
that imports flashdraft from there, loads the default pair and waits. They answer in turns, one at a
time, the first of a pair changing from pair to pair; what is compared is the ratio within a pair,
so that a machine that others use as well is slow for both. Plain answers, and drafted ones with a
fixed verify length: the policy's choice depends on the clock.
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
from typing import Any

from tests.prompts import PROMPTS

MODEL = "smollm2-135m"
VERIFY = 6
WORKER = f"""
import json, sys, time
from flashdraft import LLM, SamplingParams
engines = {{"plain": LLM({MODEL!r}, device="cpu", draft=None),
           "drafted": LLM({MODEL!r}, device="cpu", verify={VERIFY})}}
print(json.dumps(getattr(engines["plain"].kernels, "level", "native")), flush=True)
for line in sys.stdin:
    kind, prompt, tokens = json.loads(line)
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    ids = engines[kind].chat_prompt([{{"role": "user", "content": prompt}}])
    start = time.perf_counter()
    answer = engines[kind].generate([ids], params)[0]
    print(json.dumps([time.perf_counter() - start, answer.token_ids]), flush=True)
"""


class Worker:
    """A process that answers with the flashdraft of one folder."""

    def __init__(self, folder: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", WORKER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(folder.resolve())},
            cwd=folder,
        )
        self.level = self._read()

    def answer(self, kind: str, prompt: str, tokens: int) -> tuple[float, list[int]]:
        """(seconds, token ids)"""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([kind, prompt, tokens]) + "\n")
        self._process.stdin.flush()
        seconds, ids = self._read()
        return seconds, ids

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


def measure(native: Worker, wheel: Worker, kind: str, pairs: int, tokens: int) -> dict[str, Any]:
    """Seconds of both in every pair, and what the ratios say."""
    for worker in (native, wheel):
        worker.answer(kind, PROMPTS[0], tokens)
    seconds: dict[Worker, list[float]] = {native: [], wheel: []}
    num_equal = 0
    for pair in range(pairs):
        prompt, ids = PROMPTS[pair % len(PROMPTS)], []
        for worker in (native, wheel) if pair % 2 else (wheel, native):
            taken, tokens_of = worker.answer(kind, prompt, tokens)
            seconds[worker].append(taken)
            ids.append(tokens_of)
        num_equal += ids[0] == ids[1]
    ratios = [n / w for n, w in zip(seconds[native], seconds[wheel], strict=True)]
    quarters = statistics.quantiles(ratios, n=4)
    found = {
        "pairs": pairs,
        "tokens": tokens,
        "median_ratio": round(statistics.median(ratios), 4),
        "quartiles": [round(quarters[0], 4), round(quarters[2], 4)],
        "native_tokens_per_s": round(tokens / statistics.median(seconds[native]), 1),
        "wheel_tokens_per_s": round(tokens / statistics.median(seconds[wheel]), 1),
        "equal_answers": num_equal,
        "ratios": [round(ratio, 4) for ratio in ratios],
    }
    print(kind, {name: value for name, value in found.items() if name != "ratios"}, flush=True)
    return found


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def main() -> int:
    parser = argparse.ArgumentParser(description="A wheel beside a build for this machine.")
    parser.add_argument("native", type=Path, help="a checkout built with -march=native")
    parser.add_argument("wheel", type=Path, help="a folder that a wheel was installed to")
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--conditions", default="nothing else ran", help="what else ran")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    native, wheel = Worker(arguments.native), Worker(arguments.wheel)
    kinds = {
        kind: measure(native, wheel, kind, arguments.pairs, arguments.tokens)
        for kind in ("plain", "drafted")
    }
    libraries = sorted(arguments.wheel.glob("flashdraft/kernels/cpu/_native_*.so"))
    result = {
        "what": "ratio = seconds of the -march=native build / seconds of the wheel, within a pair",
        "model": MODEL,
        "verify": VERIFY,
        "processor": processor(),
        "cores": os.cpu_count(),
        "conditions": arguments.conditions,
        "wheel_level": wheel.level,
        "wheel_libraries": {
            path.name: hashlib.sha256(path.read_bytes()).hexdigest()[:16] for path in libraries
        },
        "python": platform.python_version(),
        "compiler": platform.python_compiler(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": "python -m benchmarks.wheel_speed NATIVE WHEEL "
        f"--pairs {arguments.pairs} --tokens {arguments.tokens}",
        **kinds,
    }
    for worker in (native, wheel):
        worker.stop()
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
