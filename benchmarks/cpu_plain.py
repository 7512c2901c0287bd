"""Plain decoding, verify cost and batching of the default target on this CPU, in one run.

    python -m benchmarks.cpu_plain --output benchmarks/results/cpu_plain.json

Every engine decodes the same prompts greedily with the same number of threads, one after another in
this process: transformers' `generate` in float32, flashdraft in float32 and int8, and llama.cpp on
the same GGUF file where `llama_cpp` can be imported (by --llama-python, if not by this one).
Compare ratios within one run; absolute figures are this machine's alone.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.cpu_engines import MODEL, Llama, Transformers
from flashdraft import LLM, SamplingParams
from flashdraft.engine.step.prepare import measure_rows
from tests.prompts import PROMPTS

WIDTHS = (1, 2, 4, 8, 16)


def decode_rates(llm: LLM, prompts: list[list[int]], num_tokens: int) -> list[float]:
    """Decode tokens per second of each prompt alone, the first token excluded."""
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    return [llm.generate([ids], params)[0].stats.tokens_per_s for ids in prompts]


def batch_rate(llm: LLM, prompts: list[list[int]], num_tokens: int) -> float:
    """Tokens per second of all prompts together, while all of them decode."""
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    answers = llm.generate(prompts, params)
    return sum(answer.stats.tokens_per_s for answer in answers)


def verify_costs(llm: LLM, repeats: int) -> dict[int, float]:
    """Milliseconds of a target step by its number of rows, logits and argmax included."""
    times = measure_rows(llm.engine.steps, WIDTHS, repeats)
    return {width: 1000 * seconds for width, seconds in times.items()}


def transformers_rates(prompts: list[list[int]], num_tokens: int) -> list[float]:
    """Decode tokens per second of each prompt: the time beyond that of a single token."""
    engine, rates = Transformers(), []
    for ids in prompts:
        first, whole = (engine.answer(ids, length).seconds for length in (1, num_tokens))
        rates.append((num_tokens - 1) / (whole - first))
    return rates


def llama_rates(python: str, prompts: list[list[int]], num_tokens: int) -> dict[str, Any] | None:
    """llama.cpp through llama-cpp-python, in an interpreter that has it; None where none does."""
    engine = Llama.start(python)
    if isinstance(engine, str):
        print(f"llama.cpp left out: {engine}")
        return None
    turns = [engine.answer(ids, num_tokens) for ids in prompts]
    engine.stop()
    rates = [(num_tokens - 1) / (turn.seconds - turn.first_s) for turn in turns]
    return {"version": engine.version, "rates": rates}


def main() -> int:
    parser = argparse.ArgumentParser(description="Plain CPU decoding against other engines.")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=15, help="runs per verify width")
    parser.add_argument("--llama-python", default=sys.executable)
    arguments = parser.parse_args()
    formats = {
        dtype: LLM(MODEL, dtype=dtype, device="cpu", draft=None, max_batch=8)
        for dtype in ("float32", "int8")
    }
    user = [{"role": "user", "content": prompt} for prompt in PROMPTS]
    prompts = [formats["int8"].chat_prompt([message]) for message in user]
    few = prompts[: arguments.prompts]
    reference = transformers_rates(few, arguments.tokens)
    llama = llama_rates(arguments.llama_python, few, arguments.tokens)
    base = statistics.median(reference)
    rows: list[dict[str, Any]] = [
        {"engine": "transformers generate, float32", "tokens_per_s": base, "ratio": 1.0}
    ]
    for dtype, llm in formats.items():
        decode_rates(llm, few[:1], 8)  # warm up
        rate = statistics.median(decode_rates(llm, few, arguments.tokens))
        batch = batch_rate(llm, prompts[:8], arguments.tokens)
        costs = verify_costs(llm, arguments.repeats)
        rows.append(
            {
                "engine": f"flashdraft, {dtype}, plain",
                "tokens_per_s": rate,
                "ratio": rate / base,
                "batch_8_over_batch_1": batch / rate,
                "step_ms_by_rows": costs,
                "verify_8_over_plain": costs[8] / costs[1],
            }
        )
    if llama is not None:
        rate = statistics.median(llama["rates"])
        name = f"llama.cpp (llama-cpp-python {llama['version']}), Q4_1"
        rows.append({"engine": name, "tokens_per_s": rate, "ratio": rate / base})
    result = {
        "environment": {
            "machine": platform.machine(),
            "threads": torch.get_num_threads(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "date": datetime.date.today().isoformat(),
            "command": "python -m benchmarks.cpu_plain",
            "model": f"{MODEL} (real weights, Q4_1 GGUF)",
            "prompts": f"tests/prompts.py, first {arguments.prompts} (batch: first 8), chat turns",
            "tokens": arguments.tokens,
            "seed": "greedy",
        },
        "rows": rows,
    }
    for row in rows:
        print(f"{row['engine']:48} {row['tokens_per_s']:8.1f} tok/s  {row['ratio']:5.2f}x")
    print(json.dumps(result))
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
