"""What a training run will take, before it starts: tokens, steps, memory, work, time and disk.

Counted from shapes. The time comes from a table of devices and is rough; the trainer's own log
says better after its first steps.
"""

from __future__ import annotations

import math
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

from flashdraft.errors import TrainingError
from flashdraft.models.config.target import ModelConfig
from flashdraft.models.drafter.config import DrafterConfig
from flashdraft.train.fit.schedule import TrainConfig, known_length

# dense bf16 products per second, as reached by large ones
_DEVICE_FLOPS = {
    "B200": 1700e12,
    "GB200": 1700e12,
    "H200": 790e12,
    "GH200": 790e12,
    "H100": 700e12,
    "A100": 250e12,
    "L40S": 280e12,
    "4090": 150e12,
    "5090": 200e12,
}
_OTHER_GPU_FLOPS = 60e12
_CPU_CORE_FLOPS = 20e9  # float32
_REACHED = 0.35  # small products, attention and element-wise work hold a step back
_GB = 1e9


@dataclass(frozen=True)
class Estimate:
    """What a run will take. Memory is the device's, on top of what is loaded already."""

    num_examples: int
    answer_tokens: int
    drafter_parameters: int
    batches_per_epoch: int
    steps: int | None  # None = as many as the budget allows
    step_flops: float
    step_s: float
    seconds: float
    memory_gb: float
    disk_gb: float

    def describe(self) -> list[str]:
        """The same in words, a line each."""
        steps = "as many steps as fit" if self.steps is None else f"{self.steps:,} steps"
        return [
            f"{self.num_examples:,} answers, {self.answer_tokens:,} answer tokens, "
            f"{self.batches_per_epoch:,} batches an epoch",
            f"drafter of {self.drafter_parameters / 1e6:.1f} M parameters, {steps} of about "
            f"{_duration(self.step_s)} ({self.step_flops / 1e12:.3g} TFLOP)",
            f"about {_duration(self.seconds)}, {self.memory_gb:.1f} GB of memory besides the "
            f"target, {self.disk_gb:.2f} GB of disk",
        ]


def estimate(
    drafter: DrafterConfig,
    target: ModelConfig,
    config: TrainConfig,
    *,
    num_examples: int,
    answer_tokens: int,
    num_batches: int,
    device: torch.device,
    world: int = 1,
) -> Estimate:
    """Estimate a run of `num_batches` an epoch on `world` devices like this one."""
    parameters = drafter_parameters(drafter)
    per_step = config.accumulation * batch_flops(drafter, target, config.rows, config.blocks)
    step_s = per_step / (device_flops(device) * _REACHED)
    length = known_length(config, num_batches / world / config.accumulation)
    seconds = (config.minutes or 0) * 60 if length is None else length.steps * step_s
    # parameters and two moments in float32, for every state that is kept and the one being written
    disk = parameters * 12 * (config.keep_last + 2) + parameters * 2
    return Estimate(
        num_examples=num_examples,
        answer_tokens=answer_tokens,
        drafter_parameters=parameters,
        batches_per_epoch=num_batches // world,
        steps=None if length is None else length.steps,
        step_flops=per_step,
        step_s=step_s,
        seconds=seconds,
        memory_gb=batch_bytes(drafter, target, config, device) / _GB,
        disk_gb=disk / _GB,
    )


def drafter_parameters(config: DrafterConfig) -> int:
    """How many weights a drafter has."""
    hidden, dim = config.hidden_size, config.head_dim
    attention = 2 * hidden * dim * (config.num_heads + config.num_kv_heads) + 2 * dim
    layer = attention + 3 * hidden * config.intermediate_size + 2 * hidden
    return config.num_layers * layer + (len(config.tap_layers) * hidden + 2) * hidden


def target_parameters(config: ModelConfig) -> int:
    """How many weights of the target's layers take part in a token (its experts': the chosen)."""
    hidden, total = config.hidden_size, 0
    for layer in config.layers:
        kinds = 0 if layer.kv_source is not None else 1 if layer.share_kv else 2
        total += hidden * layer.head_dim * (2 * layer.num_heads + kinds * layer.num_kv_heads)
        total += 3 * hidden * layer.intermediate_size
        if config.experts is not None:
            total += 3 * hidden * config.experts.intermediate_size * config.experts.num_chosen
    return total


def batch_flops(drafter: DrafterConfig, target: ModelConfig, rows: int, blocks: int) -> float:
    """Products of one batch: the target forwards, the drafter forwards and backwards."""
    hidden = drafter.hidden_size
    context = hidden * len(drafter.tap_layers) * hidden
    context += drafter.num_layers * 2 * hidden * drafter.num_kv_heads * drafter.head_dim
    layers = drafter_parameters(drafter) - len(drafter.tap_layers) * hidden * hidden
    head = drafter.vocab_size * hidden
    block_rows, slots = blocks * drafter.block_size, blocks * (drafter.block_size - 1)
    # the head is frozen: forwards, and backwards to its input alone
    return (
        2.0 * target_parameters(target) * rows
        + 6.0 * context * rows
        + 6.0 * layers * block_rows
        + 4.0 * head * slots
    )


def batch_bytes(
    drafter: DrafterConfig, target: ModelConfig, config: TrainConfig, device: torch.device
) -> float:
    """Device memory of a step besides the target's weights."""
    value = 2 if device.type == "cuda" else 4
    hidden, layers = drafter.hidden_size, drafter.num_layers
    kv = 2 * drafter.num_kv_heads * drafter.head_dim
    cache = (
        sum(2 * layer.num_kv_heads * layer.head_dim for layer in target.cached_layers) * config.rows
    )
    features = config.rows * hidden * (len(drafter.tap_layers) + 3)
    context = config.rows * (2 * hidden + layers * 2 * kv)
    per_row = 8 * hidden + 3 * drafter.intermediate_size
    per_row += 3 * (drafter.num_heads + drafter.num_kv_heads) * drafter.head_dim
    kept = config.blocks * drafter.block_size * per_row * layers  # for the backward pass
    # weights, gradient and moments in float32, and the weights once more as they are computed with
    optimizer = drafter_parameters(drafter) * (16 + value)
    return float(optimizer + value * (cache + features + context + kept))


def device_flops(device: torch.device) -> float:
    """How many products a second a device does, roughly."""
    if device.type != "cuda":
        return _CPU_CORE_FLOPS * (os.cpu_count() or 1)
    words = torch.cuda.get_device_name(device).replace("-", " ").split()
    known = [flops for name, flops in _DEVICE_FLOPS.items() if name in words]
    return known[0] if known else _OTHER_GPU_FLOPS


def check_disk(folder: Path, needed_gb: float) -> None:
    """Refuse to start where the run's states will not fit."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free_gb = shutil.disk_usage(existing).free / _GB
    if needed_gb > free_gb:
        raise TrainingError(
            f"The run needs about {needed_gb:.2f} GB in {folder}, where {free_gb:.2f} GB are free; "
            "make room, name another --out folder, or train a smaller drafter (--layers)."
        )


def _duration(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 90:
        return f"{seconds:.1f} s"
    minutes = math.ceil(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes / 60:.1f} h"
