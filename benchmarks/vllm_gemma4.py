"""A Gemma 4 pair on vLLM on a GPU, with our plugin and without: accepted length and answers.

    python -m benchmarks.vllm_gemma4 google/gemma-4-26B-A4B-it z-lab/gemma-4-26B-A4B-it-DFlash \\
        --python VLLM_ENVIRONMENT/bin/python --output benchmarks/results/vllm_gemma4.json

It shows what a CPU cannot: vLLM's V2 runner, which z-lab's drafters need since they mix sliding and
full layers, compiled code and CUDA graphs, bfloat16. flashdraft must be installed beside vLLM. The
prompts are our own twenty, greedy. The exit status is 1 if the plugin was not used, or if it did
not lengthen what is accepted: vLLM may have learned the scaling itself, and the plugin must then
stay out of that release. On a CPU it runs with a pair that vLLM's CPU runner takes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.accepted_length import describe_environment, report_progress, write_results
from flashdraft.children import python_environment
from tests.prompts import PROMPTS

# runs in vLLM's environment, in a process of its own: two engines would share the GPU's memory
_SCRIPT = """
import json, sys
job = json.loads(sys.argv[1])

def main():
    import vllm
    llm = vllm.LLM(job["target"], disable_log_stats=False, **job["options"])
    ask = [[{"role": "user", "content": prompt}] for prompt in job["prompts"]]
    params = vllm.SamplingParams(temperature=0, max_tokens=job["max_tokens"])
    answers = llm.chat(ask, params, use_tqdm=False)
    counts = {}
    for metric in llm.get_metrics():
        for name in ("drafts", "accepted_tokens"):
            if metric.name.removesuffix("_total") == f"vllm:spec_decode_num_{name}":
                counts[name] = counts.get(name, 0) + metric.value
    texts = [answer.outputs[0].text for answer in answers]
    with open(job["output"], "w") as file:
        json.dump({"vllm": vllm.__version__, "texts": texts, **counts}, file)

if __name__ == "__main__":
    main()
"""
_MARK = "flashdraft: the drafter's embeddings"  # the plugin's line in vLLM's log


def run(arguments: argparse.Namespace, with_plugin: bool) -> dict[str, Any]:
    """Answer the prompts on a vLLM of its own; what it counted, and whether the plugin was used."""
    with tempfile.TemporaryDirectory() as folder:
        script, output = Path(folder, "answer.py"), Path(folder, "output.json")
        script.write_text(_SCRIPT, encoding="utf-8")
        options = {
            "dtype": arguments.dtype,
            "max_model_len": 4096,
            "tensor_parallel_size": arguments.tensor_parallel,
            "speculative_config": {
                "method": "dflash",
                "model": arguments.drafter,
                "num_speculative_tokens": arguments.verify,
            },
            **json.loads(arguments.options),
        }
        job = {
            "target": arguments.target,
            "prompts": PROMPTS,
            "max_tokens": arguments.max_tokens,
            "options": options,
            "output": str(output),
        }
        others = {k: v for k, v in python_environment().items() if k != "VLLM_PLUGINS"}
        done = subprocess.run(
            [arguments.python, str(script), json.dumps(job)],
            env=others if with_plugin else {**others, "VLLM_PLUGINS": "none"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if done.returncode != 0 or not output.exists():
            raise SystemExit(f"vLLM ended with {done.returncode}:\n{done.stdout[-4000:]}")
        found = json.loads(output.read_text(encoding="utf-8"))
    accepted = 1 + found["accepted_tokens"] / found["drafts"]
    return {**found, "accepted_length": round(accepted, 4), "used_plugin": _MARK in done.stdout}


def main() -> int:
    """Run both ways, write the results, and judge."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target")
    parser.add_argument("drafter")
    parser.add_argument("--python", default=sys.executable, help="the interpreter that has vLLM")
    parser.add_argument("--verify", type=int, default=15)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--options", default="{}", help="further arguments of vllm.LLM, as JSON")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    found = {}
    for name, with_plugin in (("plain_vllm", False), ("with_plugin", True)):
        found[name] = run(arguments, with_plugin)
        report_progress(f"{name}: accepted length {found[name]['accepted_length']:.3f}")
    same = sum(
        a == b
        for a, b in zip(found["plain_vllm"]["texts"], found["with_plugin"]["texts"], strict=True)
    )
    report_progress(f"equal answers: {same} of {len(PROMPTS)}")
    if arguments.output is not None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        content = {
            "environment": describe_environment("benchmarks.vllm_gemma4", device),
            "pair": [Path(arguments.target).name, Path(arguments.drafter).name],
            "equal_answers": same,
            **{k: {n: x for n, x in v.items() if n != "texts"} for k, v in found.items()},
        }
        write_results(arguments.output, content)
    is_longer = found["with_plugin"]["accepted_length"] > found["plain_vllm"]["accepted_length"]
    return 0 if found["with_plugin"]["used_plugin"] and is_longer else 1


if __name__ == "__main__":
    sys.exit(main())
