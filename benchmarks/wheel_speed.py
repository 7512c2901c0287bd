"""A wheel's kernels beside a build of them for this machine alone, in interleaved pairs.

    git worktree add ../native ca0ee6e && (cd ../native && python setup.py build_ext --inplace)
    make wheel && pip install --no-deps --target ../wheel dist/*.whl
    export PYTHONPATH=../wheel:.
    python -P -m benchmarks.wheel_speed ../native/flashdraft/kernels/cpu/_native*.so \
        --output benchmarks/results/wheel_speed.json

ca0ee6e is the last commit whose setup.py says -march=native. One process loads the default pair
from the wheel and answers with the wheel's kernels and with the others in turns, the first of a
pair changing from pair to pair: same weights, same memory, same Python. (With a process for each
the ratio moved between 0.93 and 1.08 from start to start.) Plain answers, and drafted ones with a
fixed verify length, for the policy's choice depends on the clock. Where others use the machine,
compare the processor's time on one thread: it does not count while another process has the core.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import platform
import statistics
import time
import types
from pathlib import Path
from typing import Any, NamedTuple

import torch

from flashdraft import LLM, SamplingParams
from flashdraft.kernels.cpu import levels
from tests.prompts import PROMPTS

MODEL = "smollm2-135m"
VERIFY = 6


class Answer(NamedTuple):
    """One answer, and the seconds that it took by the wall and by the processor."""

    wall: float
    processor: float
    token_ids: list[int]


def load(path: Path) -> types.ModuleType:
    """The extension module of a file."""
    spec = importlib.util.spec_from_file_location(path.name.partition(".")[0], path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def answer(llm: LLM, prompt: str, tokens: int) -> Answer:
    ids = llm.chat_prompt([{"role": "user", "content": prompt}])
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    wall, processor = time.perf_counter(), time.process_time()
    made = llm.generate([ids], params)[0]
    return Answer(time.perf_counter() - wall, time.process_time() - processor, made.token_ids)


def measure(
    llm: LLM, shown: types.SimpleNamespace, builds: list[Any], pairs: int, tokens: int
) -> dict[str, Any]:
    """Pairs of answers by both builds; `shown` is the module that the kernels call."""
    both = []
    for pair in range(-1, pairs):  # the first warms up
        by = {}
        for place in (0, 1) if pair % 2 else (1, 0):
            shown.__dict__.update(vars(builds[place]))
            by[place] = answer(llm, PROMPTS[pair % len(PROMPTS)], tokens)
        both.append((by[0], by[1]))
    both = both[1:]
    return {
        "pairs": pairs,
        "equal_answers": sum(n.token_ids == w.token_ids for n, w in both),
        "processor_time": compare([(n.processor, w.processor) for n, w in both]),
        "wall_time": compare([(n.wall, w.wall) for n, w in both]),
    }


def compare(seconds: list[tuple[float, float]]) -> dict[str, Any]:
    ratios = [native / wheel for native, wheel in seconds]
    quarters = statistics.quantiles(ratios, n=4)
    return {
        "median_ratio": round(statistics.median(ratios), 4),
        "quartiles": [round(quarters[0], 4), round(quarters[2], 4)],
        "native_median_s": round(statistics.median(native for native, _ in seconds), 4),
        "wheel_median_s": round(statistics.median(wheel for _, wheel in seconds), 4),
        "ratios": [round(ratio, 4) for ratio in ratios],
    }


def processor_name() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def main() -> int:
    parser = argparse.ArgumentParser(description="A wheel beside a build for this machine.")
    parser.add_argument("native", type=Path, help="the extension module built with -march=native")
    parser.add_argument("--pairs", type=int, default=40, help="of each kind")
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--conditions", default="nothing else ran", help="what else ran")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    level = levels.chosen()
    assert level is not None, "the wheel has no kernels"
    wheel = levels.load(level)
    shown = types.SimpleNamespace(**vars(wheel))
    levels.load = lambda name: shown
    engines = {
        "plain": LLM(MODEL, device="cpu", draft=None),
        "drafted": LLM(MODEL, device="cpu", verify=VERIFY),
    }
    builds, sizes = [load(arguments.native), wheel], (arguments.pairs, arguments.tokens)
    kinds = {kind: measure(llm, shown, builds, *sizes) for kind, llm in engines.items()}
    for kind, found in kinds.items():
        print(kind, {clock: found[clock]["median_ratio"] for clock in found if "time" in clock})
    result = {
        "what": "ratio = seconds with the -march=native build / seconds with the wheel's, by pair",
        "model": MODEL,
        "verify": VERIFY,
        "tokens": arguments.tokens,
        "threads": arguments.threads,
        "processor": processor_name(),
        "cores": os.cpu_count(),
        "conditions": arguments.conditions,
        "wheel_level": level,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": "python -m benchmarks.wheel_speed NATIVE "
        f"--pairs {arguments.pairs} --tokens {arguments.tokens} --threads {arguments.threads}",
        **kinds,
    }
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
