"""Where a step's time goes: bandwidth of the device, bytes a step must read, time by kernel.

For h200.py. Bytes are counted from the configurations: every matrix a step reads, once, the experts
that are chosen, keys and values in reach. Activations are left out; they are small.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any, cast

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.h200_measure import random_requests
from flashdraft.engine.engine import Engine
from flashdraft.models.config.target import ModelConfig
from flashdraft.models.drafter.config import DrafterConfig

NUM_KERNELS = 25  # lines of a table; the rest is one line
MAX_NAME = 100  # characters of a kernel's name
WARM_STEPS = 6  # before the profiler looks


def measure_bandwidth(device: torch.device) -> dict[str, float]:
    """Bytes per second of reading, and of copying (read and written), in TB/s; the best of five."""
    size = 2**31 if device.type == "cuda" else 2**22
    source = torch.ones(size, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    num_bytes = source.numel() * source.element_size()
    read = _fastest(lambda: source.sum(), device)
    copy = _fastest(lambda: target.copy_(source), device)
    return {
        "read_tb_s": round(num_bytes / read / 1e12, 4),
        "copy_tb_s": round(2 * num_bytes / copy / 1e12, 4),
    }


def _fastest(function: Callable[[], object], device: torch.device) -> float:
    best, event = float("inf"), cast(Any, torch.cuda.Event)
    for _ in range(6):
        if device.type != "cuda":
            begin = time.perf_counter()
            function()
            best = min(best, time.perf_counter() - begin)
            continue
        start, end = (event(enable_timing=True) for _ in range(2))
        start.record()
        function()
        end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end) / 1e3)
    return best


def target_bytes(
    config: ModelConfig, item: int, requests: int, context: float, experts: float
) -> dict[str, float]:
    """What one step of the target reads; `experts` of a layer's experts are read."""
    hidden = config.hidden_size
    dense = chosen = cache = 0.0
    for layer in config.layers:
        query, key = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
        dense += hidden * (2 * query + key * (1 if layer.share_kv else 2))
        dense += 3 * hidden * config.intermediate_size
        if config.experts is not None:
            dense += hidden * config.experts.num_experts
            chosen += experts * 3 * hidden * config.experts.intermediate_size
        cache += requests * min(context, layer.window or context) * 2 * key
    return {
        "target_dense": item * dense,
        "target_experts": item * chosen,
        "target_head": item * float(config.vocab_size * hidden),
        "target_kv": item * cache,
    }


def drafter_bytes(
    config: DrafterConfig, item: int, requests: int, context: float
) -> dict[str, float]:
    """What one pass of the drafter reads: its layers, the context's projections, the head again."""
    hidden, key = config.hidden_size, config.num_kv_heads * config.head_dim
    query = config.num_heads * config.head_dim
    layer = hidden * (2 * query + 2 * key) + 3 * hidden * config.intermediate_size
    fold = hidden * len(config.tap_layers) * hidden + config.num_layers * 2 * key * hidden
    cache = sum(requests * min(context, window or context) * 2 * key for window in config.windows)
    return {
        "drafter_layers": item * float(config.num_layers * layer),
        "drafter_context": item * float(fold),
        "drafter_head": item * float(config.vocab_size * hidden),
        "drafter_kv": item * float(cache),
    }


def count_bytes(
    engine: Engine,
    drafter: DrafterConfig | None,
    *,
    requests: int,
    context: float,
    experts: float,
    step_s: float,
    read_tb_s: float,
    scheme: str | None = None,
) -> dict[str, Any]:
    """Gigabytes of a step by what they are, and the share of the bandwidth that is used."""
    item = engine.target.kernels.dtype.itemsize
    parts = target_bytes(engine.target.config, item, requests, context, experts)
    if drafter is not None:
        parts |= drafter_bytes(drafter, item, requests, context)
    if scheme is not None:
        parts = {
            name: value if name.endswith("_kv") else value / item * _bytes_of(name, scheme)
            for name, value in parts.items()
        }
    total = sum(parts.values())
    return {
        "gb": {name: round(value / 1e9, 4) for name, value in parts.items()},
        "total_gb": round(total / 1e9, 4),
        "floor_ms": round(total / (read_tb_s * 1e12) * 1e3, 3),
        "step_ms": round(step_s * 1e3, 3),
        "bandwidth_fraction": round(total / step_s / (read_tb_s * 1e12), 4),
    }


def _bytes_of(part: str, scheme: str) -> float:
    """Of a weight and its share of the scales: head and drafter have 8 bits or more."""
    if scheme == "int4" and part in ("target_dense", "target_experts"):
        return 4.5 / 8
    return 1.0 if scheme == "fp8" else 8.5 / 8


def profile_steps(
    engine: Engine, requests: int, prompt_tokens: int, *, seed: int, num_steps: int
) -> dict[str, Any]:
    """Time per kernel over some decode steps of so many requests."""
    device = engine.target.kernels.device
    on_gpu = device.type == "cuda"
    per_step = 1 if engine.proposer is None else 1 + engine.proposer.max_drafts
    tokens = (2 * WARM_STEPS + num_steps) * per_step  # none may end meanwhile
    many = random_requests(requests, prompt_tokens, tokens, engine.target.config, seed)
    for request in many:
        engine.submit(request)
    begun: set[str] = set()
    while len(begun) < requests:
        begun |= {event.request_id for event in engine.step() if event.token_ids}
    for _ in range(WARM_STEPS):
        engine.step()
    if on_gpu:
        torch.cuda.synchronize(device)
    kinds = [ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]
    widths: list[int] = []
    with profile(activities=kinds) as recorded:
        begin = time.perf_counter()
        for _ in range(num_steps):
            engine.step()
            widths += engine.last_step.verify_lengths
        if on_gpu:
            torch.cuda.synchronize(device)
        seconds = time.perf_counter() - begin
    for request in many:
        engine.cancel(request.id)
    while engine.has_work:
        engine.step()
    wanted = DeviceType.CUDA if on_gpu else DeviceType.CPU
    totals: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for event in recorded.events():
        if event.device_type == wanted:
            spent = event.time_range.elapsed_us() if on_gpu else event.self_cpu_time_total
            totals[event.name][0] += spent
            totals[event.name][1] += 1
    return {
        "requests": requests,
        "steps": num_steps,
        "mean_verify_width": round(sum(widths) / max(1, len(widths)), 2),
        "profiled_step_ms": round(seconds / num_steps * 1e3, 3),
        **_table(totals, num_steps),
    }


def _table(totals: dict[str, list[float]], num_steps: int) -> dict[str, Any]:
    """Microseconds and launches per step, the longest first."""
    everything = sum(spent for spent, _ in totals.values()) or 1.0
    order = sorted(totals, key=lambda name: -totals[name][0])
    lines = [
        {
            "kernel": name[:MAX_NAME],
            "us_per_step": round(totals[name][0] / num_steps, 2),
            "launches_per_step": round(totals[name][1] / num_steps, 2),
            "share": round(totals[name][0] / everything, 4),
        }
        for name in order[:NUM_KERNELS]
    ]
    rest = [totals[name] for name in order[NUM_KERNELS:]]
    if rest:
        spent, launches = sum(r[0] for r in rest), sum(r[1] for r in rest)
        lines.append(
            {
                "kernel": f"({len(rest)} others)",
                "us_per_step": round(spent / num_steps, 2),
                "launches_per_step": round(launches / num_steps, 2),
                "share": round(spent / everything, 4),
            }
        )
    return {
        "kernels_ms_per_step": round(everything / num_steps / 1e3, 3),
        "launches_per_step": round(sum(n for _, n in totals.values()) / num_steps, 1),
        "kernels": lines,
    }
