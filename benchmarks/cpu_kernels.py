"""Time the native CPU kernels on SmolLM2-135M's shapes, at widths of 1 to 16 tokens.

Owns the shapes and the clock; knows nothing of models. Prints a table and one JSON line:
    python benchmarks/cpu_kernels.py [--repeats 15] [--context 512]
"""

from __future__ import annotations

import argparse
import functools
import json
import platform
import time
from collections.abc import Callable
from typing import Any

import torch

from flashdraft.kernels.cpu.backend import CpuKernels
from flashdraft.kernels.interface import CAUSAL, Heads, PagedKeys, PageView, QKVSpec, RopeTable
from flashdraft.kernels.kinds import Activation

WIDTHS = (1, 2, 4, 8, 16)
LAYERS = 30
LAYER_SHAPES = {"qkv": (960, 576), "o": (576, 576), "gate_up": (3072, 576), "down": (576, 1536)}
HEAD_SHAPE = (49152, 576)
HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE = 9, 3, 64, 32
Weights = list[Any]


def pack_model(kernels: CpuKernels) -> Weights:
    """Every weight of the model, each with its own memory, as in a real step."""
    torch.manual_seed(0)
    shapes = list(LAYER_SHAPES.values()) * LAYERS + [HEAD_SHAPE]
    return [kernels.pack(torch.randn(shape) / shape[1] ** 0.5) for shape in shapes]


def run_linears(kernels: CpuKernels, weights: Weights, inputs: dict[int, torch.Tensor]) -> None:
    """All linears of one step."""
    for weight in weights:
        kernels.linear(inputs[weight.in_features], weight)


def make_step(
    kernels: CpuKernels, weights: Weights, width: int, context: int
) -> Callable[[], object]:
    """A decode step as a model makes it: every kernel, and a small torch operation now and then."""
    num_keys = context + width
    num_pages = -(-num_keys // PAGE_SIZE)
    caches = torch.randn(LAYERS, 2, num_pages, PAGE_SIZE, KV_HEADS, HEAD_DIM)
    positions = torch.arange(context, num_keys)
    view = PageView(
        query_start=torch.tensor([0, width], dtype=torch.int32),
        context_lens=torch.tensor([context], dtype=torch.int32),
        block_table=torch.arange(num_pages, dtype=torch.int32).unsqueeze(0),
        slots=positions,
        page_size=PAGE_SIZE,
        max_query_len=width,
        max_key_len=num_keys,
    )
    angles = torch.rand(num_keys, HEAD_DIM // 2)
    rope = RopeTable(angles.cos(), angles.sin())
    spec = QKVSpec(HEADS, KV_HEADS, HEAD_DIM, eps=1e-5)
    embedding, norm = torch.randn(1000, 576), torch.ones(576)
    tokens = torch.arange(width)

    def step() -> object:
        hidden = embedding[tokens]  # torch's own operation, on torch's own threads
        delta = torch.zeros_like(hidden)
        for layer in range(LAYERS):
            qkv, out, gate_up, down = weights[4 * layer : 4 * layer + 4]
            hidden, normed = kernels.add_rms_norm(hidden, delta, norm, 1e-5)
            keys, values = caches[layer]
            query = kernels.prepare_qkv(
                kernels.linear(normed, qkv), Heads(spec, rope, positions), keys, values, view.slots
            )
            mixed = kernels.attention(
                query, PagedKeys(keys, values, view, scale=0.125, window=None, mask=CAUSAL)
            )
            hidden, normed = kernels.add_rms_norm(hidden, kernels.linear(mixed, out), norm, 1e-5)
            gates = kernels.gated(kernels.linear(normed, gate_up), Activation.SILU)
            delta = kernels.linear(gates, down)
        logits = kernels.linear(kernels.rms_norm(hidden + delta, norm, 1e-5), weights[-1])
        return kernels.argmax(logits)

    return step


def milliseconds(work: Callable[[], object], repeats: int) -> tuple[float, float]:
    """(median, best) of several runs, after one that warms up."""
    work()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append((time.perf_counter() - start) * 1000)
    return sorted(times)[repeats // 2], min(times)


def measure(kernels: CpuKernels, repeats: int, context: int) -> dict[str, dict[int, float]]:
    """Milliseconds by width: all linears, and a whole step; the median and the best run."""
    weights = pack_model(kernels)
    results: dict[str, dict[int, float]] = {}
    for width in WIDTHS:
        inputs = {size: torch.randn(width, size) for size in (576, 1536)}
        works: dict[str, Callable[[], object]] = {
            "linears": functools.partial(run_linears, kernels, weights, inputs),
            "step": make_step(kernels, weights, width, context),
        }
        for name, work in works.items():
            median, best = milliseconds(work, repeats)
            results.setdefault(name, {})[width] = median
            results.setdefault(f"{name} (best)", {})[width] = best
    return results


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--context", type=int, default=512)
    arguments = parser.parse_args()
    results = {}
    print(
        "milliseconds by width".ljust(30) + "".join(f"{width:>9}" for width in WIDTHS) + "   8 / 1"
    )
    for quantize in (False, True):
        kernels = CpuKernels(quantize)
        results[kernels.name] = measure(kernels, arguments.repeats, arguments.context)
        for what, times in results[kernels.name].items():
            cells = "".join(f"{times[width]:>9.2f}" for width in WIDTHS)
            print(f"{kernels.name} {what}".ljust(30) + cells + f"{times[8] / times[1]:>8.2f}")
    environment = {
        "machine": platform.machine(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }
    print(json.dumps({"environment": environment, "arguments": vars(arguments), **results}))


if __name__ == "__main__":
    main()
