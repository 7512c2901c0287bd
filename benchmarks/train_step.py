"""What a training step costs: features, forward and loss, backward, optimizer; then a kernel table.

    python -m benchmarks.train_step --rows 32768 --blocks 4096 --compile

Target and drafter have random weights of SmolLM2-135M's size; documents have random lengths. Each
part is timed by itself, between two waits for the device, and the whole step without any.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from flashdraft.bench.plan.pairs import TARGETS
from flashdraft.kernels.select import select_kernels
from flashdraft.models.config.target import ModelConfig
from flashdraft.models.drafter.config import DrafterConfig
from flashdraft.models.drafter.model import Drafter
from flashdraft.models.registry import build_target
from flashdraft.models.sources import DEFAULT_MODEL
from flashdraft.train.data.answers import Answer, AnswerSet
from flashdraft.train.fit.batches import BatchPlan, PackedBatch, prefetch
from flashdraft.train.fit.step import TrainingStep
from tests import zoo

TARGET = {**TARGETS[DEFAULT_MODEL], "rms_norm_eps": 1e-5, "eos_token_id": 2}
DRAFTER = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    **{key: TARGET[key] for key in ("vocab_size", "hidden_size", "intermediate_size")},
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "hidden_act": "silu",
    "attention_bias": False,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "num_target_layers": 30,
    "dflash_config": {"mask_token_id": 3, "target_layer_ids": [1, 8, 14, 20, 27]},
}


def make_answers(num_rows: int, mean_length: int, seed: int = 0) -> AnswerSet:
    """Documents of random tokens, a quarter of each the prompt; enough for a few batches."""
    random = np.random.default_rng(seed)
    answers, filled = [], 0
    while filled < 4 * num_rows:
        length = int(random.integers(mean_length // 2, 3 * mean_length // 2))
        tokens = random.integers(4, 40000, length).tolist()
        answers.append(Answer(tokens[: length // 4], tokens[length // 4 :]))
        filled += length
    return AnswerSet.from_answers(answers)


class Bench:
    """A target, a drafter, an optimizer and some batches."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.kernels = select_kernels(options.device, options.dtype)
        self.device = self.kernels.device
        model = ModelConfig.from_hf({**TARGET, "num_hidden_layers": options.target_layers})
        taps = [tap for tap in (1, 8, 14, 20, 27) if tap < options.target_layers]
        config = DrafterConfig.from_hf(
            {
                **DRAFTER,
                "num_hidden_layers": options.layers,
                "block_size": options.block_size,
                "num_target_layers": options.target_layers,
                "dflash_config": {"mask_token_id": 3, "target_layer_ids": taps},
            }
        )
        tensors = zoo.Tensors(zoo.random_tensors(model))
        target = build_target(model, tensors, self.kernels, config.tap_layers)
        torch.manual_seed(0)
        self.drafter = Drafter(config).to(self.device)
        self.step = TrainingStep(
            self.drafter,
            target,
            max_rows=options.rows,
            compile=options.compile,
            chunk_rows=options.chunk_rows,
        )
        fused = self.device.type == "cuda"
        self.optimizer = torch.optim.AdamW(self.drafter.parameters(), lr=1e-4, fused=fused)
        plan = BatchPlan(
            make_answers(options.rows, options.mean_length),
            max_rows=options.rows,
            num_blocks=options.blocks,
            block_size=options.block_size,
            seed=0,
        )
        begin = time.perf_counter()
        self.host_batches = list(plan.batches(0))
        self.host_ms = (time.perf_counter() - begin) * 1e3 / len(self.host_batches)
        self.batches = list(prefetch(iter(self.host_batches), self.device))

    def batch(self, number: int) -> PackedBatch:
        return self.batches[number % len(self.batches)]

    def whole(self, number: int) -> torch.Tensor:
        """One step as the trainer runs it."""
        report = self.step.backward(self.batch(number))
        torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return report.loss

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def time(self, run: Callable[[int], object], repeats: int) -> float:
        """Milliseconds of a call: the mean of some, after one that warms up."""
        run(0)
        self.wait()
        begin = time.perf_counter()
        for number in range(repeats):
            run(number)
        self.wait()
        return (time.perf_counter() - begin) * 1e3 / repeats


def measure(bench: Bench, repeats: int) -> dict[str, Any]:
    """Milliseconds of the parts and of the whole; the parts reach into the step on purpose."""
    begin = time.perf_counter()
    bench.whole(0)
    bench.wait()
    first_s = time.perf_counter() - begin
    step = bench.step
    features = [step.features.run(batch) for batch in bench.batches]

    def features_of(number: int) -> Any:
        return features[number % len(features)]

    def hidden(number: int) -> Any:
        with torch.no_grad():
            return step._forward(bench.batch(number), features_of(number))

    def training_hidden(number: int) -> None:
        rows = step._forward(bench.batch(number), features_of(number))
        rows.backward(torch.ones_like(rows))

    times = {
        "host batch": bench.host_ms,
        "features": bench.time(lambda number: step.features.run(bench.batch(number)), repeats),
        "drafter forward": bench.time(hidden, repeats),
        "drafter forward and backward": bench.time(training_hidden, repeats),
        "forward, loss and backward": bench.time(
            lambda number: step.backward(bench.batch(number), features_of(number)), repeats
        ),
        "predict": bench.time(
            lambda number: step.predict(bench.batch(number), features_of(number)), repeats
        ),
        "clip and optimizer": bench.time(lambda number: _optimize(bench), repeats),
        "whole step": bench.time(bench.whole, repeats),
    }
    result: dict[str, Any] = {"first step, s": round(first_s, 2)}
    result["ms"] = {name: round(value, 2) for name, value in times.items()}
    if bench.device.type == "cuda":
        result["peak GiB"] = round(torch.cuda.max_memory_allocated(bench.device) / 2**30, 2)
    return result


def _optimize(bench: Bench) -> None:
    torch.nn.utils.clip_grad_norm_(bench.drafter.parameters(), 1.0)
    bench.optimizer.step()


def profile(bench: Bench, steps: int = 3) -> str:
    """The kernels that take most of a step."""
    on_cuda = bench.device.type == "cuda"
    activities = [torch.profiler.ProfilerActivity.CPU]
    if on_cuda:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profiler:
        for number in range(steps):
            bench.whole(number)
        bench.wait()
    key = "self_cuda_time_total" if on_cuda else "self_cpu_time_total"
    return profiler.key_averages().table(sort_by=key, row_limit=20, max_name_column_width=90)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--rows", type=int, default=32768)
    parser.add_argument("--blocks", type=int, default=4096)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--target-layers", type=int, default=30)
    parser.add_argument("--mean-length", type=int, default=400)
    parser.add_argument("--chunk-rows", type=int, default=4096)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--no-profile", action="store_true")
    options = parser.parse_args(arguments)
    bench = Bench(options)
    print(json.dumps({"options": vars(options), **measure(bench, options.repeats)}, indent=1))
    if not options.no_profile:
        print(profile(bench))


if __name__ == "__main__":
    main(sys.argv[1:])
