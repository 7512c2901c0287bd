"""Where the device's time goes while traffic runs: kernels by time, over some steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

NUM_KERNELS = 48  # those that take longest
NAME_LENGTH = 88


def profile_steps(num_steps: int, work: Callable[[], None]) -> dict[str, Any]:
    """Kernels of what `work` runs, which takes so many steps. What runs after it is slower."""
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        work()
        torch.cuda.synchronize()
    micros: defaultdict[str, float] = defaultdict(float)
    counts: defaultdict[str, int] = defaultdict(int)
    for event in found.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            micros[event.name] += event.device_time
            counts[event.name] += 1
    longest = sorted(micros, key=lambda name: -micros[name])[:NUM_KERNELS]
    return {
        "steps": num_steps,
        "device_ms": round(sum(micros.values()) / 1e3 / num_steps, 3),
        "kernels": [
            {
                "name": name[:NAME_LENGTH],
                "ms": round(micros[name] / 1e3 / num_steps, 4),
                "launches": round(counts[name] / num_steps, 2),
            }
            for name in longest
        ],
    }
