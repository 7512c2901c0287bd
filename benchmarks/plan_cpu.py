"""This CPU as `flashdraft plan` sees it, beside what steps really take on it.

    python -m benchmarks.plan_cpu --output benchmarks/results/plan_cpu.json

The kernel is timed as plan does it, then decode steps are: of the default pair, and of a larger
model with random weights (Qwen3 4B's layers, fewer of them). A prediction knows the first alone;
CPU_EFFICIENCY is fitted to the default pair's steps. docs/choosing.md shows the plan for the CPU in
the file.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.accepted_length import describe_environment, write_results
from benchmarks.h200_measure import describe, random_requests, run_requests
from benchmarks.h200_models import RandomSource
from flashdraft.bench.plan.gpus import GB, Card
from flashdraft.bench.plan.machine import CPU_EFFICIENCY, num_cores, this_machine, with_speed
from flashdraft.bench.plan.pairs import TARGETS, Pair, find_pair
from flashdraft.bench.plan.sizes import CPU_FORMATS
from flashdraft.bench.plan.speed import Prediction, predict
from flashdraft.bench.run.environment import describe_environment as describe_machine
from flashdraft.engine.config import EngineConfig
from flashdraft.engine.engine import Engine
from flashdraft.kernels.select import select_kernels
from flashdraft.llm import LLM
from flashdraft.models.config.target import ModelConfig
from flashdraft.models.registry import build_target
from flashdraft.models.sources import DEFAULT_MODEL

RESULTS = Path(__file__).parent / "results" / "plan_cpu.json"
LARGE, LARGE_LAYERS = "Qwen/Qwen3-4B", 8
PROMPT, TOKENS = 128, 48
VERIFY = (0, 1, 3, 7, 15)
BATCHES = (1, 8)


def card_of(record: Mapping[str, Any]) -> Card:
    """The CPU that a results file was measured on."""
    return Card(
        record["title"],
        int(record["memory_gb"] * GB),
        int(record["free_gb"] * GB),
        record["bandwidth_gb_s"] / 1e3,
        record["tflops"],
        CPU_EFFICIENCY,
        is_cpu=True,
    )


def predicted(pair: Pair, card: Card, verify: int, requests: int) -> Prediction:
    """The step that a row of the file measured."""
    return predict(
        pair,
        card,
        requests=requests,
        context=PROMPT + TOKENS // 2,
        verify=verify,
        form=CPU_FORMATS[0],
        accepted_length=1.0,
    )


def pair_of(row: Mapping[str, Any]) -> Pair:
    """The pair of a row: the default one, or the larger model without a drafter."""
    if row["model"] == DEFAULT_MODEL:
        return find_pair(DEFAULT_MODEL)
    return Pair(row["model"], _large(), "none")


def checks(document: Mapping[str, Any]) -> Iterator[tuple[Mapping[str, Any], float]]:
    """Every measured row, and the milliseconds predicted for it."""
    card = card_of(document["card"])
    for row in document["rows"]:
        yield row, 1e3 * predicted(pair_of(row), card, row["verify"], row["requests"]).step_s


def _large() -> ModelConfig:
    return ModelConfig.from_hf({**TARGETS[LARGE], "num_hidden_layers": LARGE_LAYERS})


def _shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that a Qwen3 target with a tied head asks a checkpoint for."""
    hidden, wide = config.hidden_size, config.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    for index, layer in enumerate(config.layers):
        query, key = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
        for name, shape in {
            "self_attn.q_proj": (query, hidden),
            "self_attn.k_proj": (key, hidden),
            "self_attn.v_proj": (key, hidden),
            "self_attn.o_proj": (hidden, query),
            "self_attn.q_norm": (layer.head_dim,),
            "self_attn.k_norm": (layer.head_dim,),
            "mlp.gate_proj": (wide, hidden),
            "mlp.up_proj": (wide, hidden),
            "mlp.down_proj": (hidden, wide),
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
        }.items():
            shapes[f"model.layers.{index}.{name}.weight"] = shape
    return shapes


@dataclass
class Load:
    """Requests of one engine, and what a step of theirs took in every round."""

    model: str
    engine: Engine
    requests: int
    verify: int
    runs_ms: list[float] = field(default_factory=list)

    def run(self, seed: int) -> None:
        """Once more."""
        config = self.engine.target.config
        asked = random_requests(self.requests, PROMPT, TOKENS, config, seed, self.verify)
        self.runs_ms.append(describe(run_requests(self.engine, asked))["step_ms"])

    def as_row(self) -> dict[str, Any]:
        """The quickest round; the first warms up."""
        found = {"model": self.model, "requests": self.requests, "verify": self.verify}
        return {**found, "step_ms": min(self.runs_ms[1:]), "runs_ms": self.runs_ms[1:]}


def make_loads() -> Iterator[Load]:
    """The default pair at several verify lengths and batches, and the larger model, plain."""
    default = LLM(DEFAULT_MODEL, device="cpu", dtype="int8").engine
    for requests, verify in [*((1, one) for one in VERIFY), (BATCHES[-1], 0)]:
        yield Load(DEFAULT_MODEL, default, requests, verify)
    config, kernels = _large(), select_kernels("cpu", "int8")
    source = RandomSource(_shapes(config), torch.device("cpu"), torch.float32, 0)
    large = Engine(build_target(config, source, kernels), None, EngineConfig(ngram=False))
    for requests in BATCHES:
        yield Load(f"{LARGE}, {LARGE_LAYERS} layers, random weights", large, requests, 0)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, write the file, print measured beside predicted."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--rounds", type=int, default=6)
    options = parser.parse_args(argv)
    average = os.getloadavg()[0]
    machine = this_machine()
    if not machine.is_cpu:
        machine = replace(machine, is_cpu=True, efficiency=CPU_EFFICIENCY)
    if with_speed(machine).bandwidth_tb_s is None:
        print("The native CPU kernels are not built; make setup builds them.", file=sys.stderr)
        return 2
    loads, probes = list(make_loads()), []
    for turn in range(options.rounds + 1):
        for load in loads:
            probes.append(with_speed(machine))
            load.run(turn)
    processor = describe_machine([])["device"]
    document = {
        "environment": {
            **describe_environment("benchmarks.plan_cpu", torch.device("cpu")),
            "processor": processor,
            "load_average_at_start": round(average, 2),
        },
        "card": {
            "title": processor,
            "cores": num_cores(Path("/")),
            "memory_gb": round(machine.memory_bytes / GB, 2),
            "free_gb": round(machine.free_bytes / GB, 2),
            "bandwidth_gb_s": round(1e3 * max(one.bandwidth_tb_s or 0 for one in probes), 2),
            "tflops": round(max(one.tflops or 0 for one in probes), 4),
            "probes_gb_s": [round(1e3 * (one.bandwidth_tb_s or 0), 2) for one in probes],
        },
        "conditions": f"prompts of {PROMPT} random tokens, {TOKENS} tokens each; of all rounds "
        "the quickest median step and the fastest probe",
        "rows": [load.as_row() for load in loads],
    }
    write_results(options.output, document)
    print("\n".join(table(document)))
    return 0


def table(document: Mapping[str, Any]) -> Iterator[str]:
    """Measured beside predicted, as Markdown."""
    yield "| model | requests | verify | step, ms | predicted | error |"
    yield "|---|---|---|---|---|---|"
    for row, milliseconds in checks(document):
        yield (
            f"| {row['model']} | {row['requests']} | {row['verify']} | {row['step_ms']:.2f} | "
            f"{milliseconds:.2f} | {milliseconds / row['step_ms'] - 1:+.0%} |"
        )
    yield ""
    yield summary(document)


def summary(document: Mapping[str, Any]) -> str:
    """How far off the predictions are."""
    rows = list(checks(document))
    errors = [abs(found / row["step_ms"] - 1) for row, found in rows]
    row, _ = max(rows, key=lambda one: abs(one[1] / one[0]["step_ms"] - 1))
    return (
        f"A step's time is off by {statistics.fmean(errors):.0%} on average over {len(rows)} rows "
        f"and by {max(errors):.0%} at most ({row['model']}, {row['requests']} at once)."
    )


if __name__ == "__main__":
    sys.exit(main())
