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
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers

from flashdraft import LLM, SamplingParams
from flashdraft.models.loading import open_checkpoint
from flashdraft.models.sources import resolve_source
from tests.prompts import PROMPTS

MODEL = "smollm2-135m"
WIDTHS = (1, 2, 4, 8, 16)
LLAMA_PROGRAM = """
import json, sys, time
from llama_cpp import Llama
path, threads, tokens = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
llm = Llama(path, n_ctx=2048, n_threads=threads, n_threads_batch=threads, verbose=False)
rates = []
for ids in json.load(sys.stdin):
    llm.reset()
    stream = llm.generate(ids, temp=0.0, top_k=1)
    next(stream)
    begin = time.perf_counter()
    for _ in range(tokens - 1):
        next(stream)
    rates.append((tokens - 1) / (time.perf_counter() - begin))
import llama_cpp
print(json.dumps({"version": llama_cpp.__version__, "rates": rates}))
"""


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
    times = llm.engine.runner.measure(WIDTHS, repeats)
    return {width: 1000 * seconds for width, seconds in times.items()}


def transformers_rates(prompts: list[list[int]], num_tokens: int) -> list[float]:
    checkpoint = open_checkpoint(resolve_source(MODEL).path)
    raw = {key: value for key, value in checkpoint.raw_config.items() if key != "model_type"}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**raw)).eval()
    names = checkpoint.source.names()
    model.load_state_dict({n: checkpoint.source.read(n).float() for n in names}, strict=False)
    model.tie_weights()
    rates = []
    for ids in prompts:
        times = []
        for length in (1, num_tokens):  # the difference is decoding alone
            begin = time.perf_counter()
            with torch.no_grad():
                model.generate(
                    torch.tensor([ids]),
                    max_new_tokens=length,
                    min_new_tokens=length,
                    do_sample=False,
                    pad_token_id=0,
                )
            times.append(time.perf_counter() - begin)
        rates.append((num_tokens - 1) / (times[1] - times[0]))
    return rates


def llama_rates(python: str, prompts: list[list[int]], num_tokens: int) -> dict[str, Any] | None:
    """llama.cpp through llama-cpp-python, in an interpreter that has it; None where none does."""
    path, threads = str(resolve_source(MODEL).path), str(torch.get_num_threads())
    done = subprocess.run(
        [python, "-c", LLAMA_PROGRAM, path, threads, str(num_tokens)],
        input=json.dumps(prompts),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        print(f"llama.cpp left out: {(done.stderr.strip() or 'failed').splitlines()[-1]}")
        return None
    return dict(json.loads(done.stdout))


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
