"""Microseconds of a draw over Gemma 4's vocabulary: python -m benchmarks.h200_draw [--dtype D]

From graph replays, with a head's products that are not in the cache, made logits on the way. Beside
each time stands what reading them once takes.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from benchmarks.h200_timing import BANDWIDTH, graph_microseconds, num_copies
from flashdraft.core import SamplingParams
from flashdraft.kernels.cuda.backend import TritonKernels
from flashdraft.kernels.draw.rule import DrawnRows, HeadProducts, SlotRequest, SlotSettings

CUDA = torch.device("cuda")
VOCABULARY = 262144
ROWS = (16, 32, 128, 256, 512)
ROWS_A_SLOT = 16  # anchor and draft tokens


@dataclass(frozen=True)
class Kind:
    """Settings of all slots, and how flat the logits are."""

    params: dict[str, Any] = field(default_factory=dict)
    spread: float = 2.5


KINDS = {
    "greedy": Kind(),
    "free": Kind({"temperature": 1.0}),
    "top_k 64, top_p 0.95": Kind({"temperature": 1.0, "top_k": 64, "top_p": 0.95}),
    "top_p 0.95": Kind({"temperature": 1.0, "top_p": 0.95}),
    "top_p 0.95, peaked": Kind({"temperature": 1.0, "top_p": 0.95}, spread=6.0),
    "top_k 1000": Kind({"temperature": 1.0, "top_k": 1000}),
    "penalised": Kind(
        {"temperature": 1.0, "top_k": 64, "top_p": 0.95, "presence_penalty": 1.0, "seed": 1}
    ),
    "log-probabilities 5": Kind({"temperature": 1.0, "top_k": 64, "top_p": 0.95, "logprobs": 5}),
}


def measure(kernels: TritonKernels, kind: Kind, num_rows: int) -> tuple[float, float]:
    """Microseconds of one draw, and of reading its logits."""
    num_slots = max(1, num_rows // ROWS_A_SLOT)
    settings = SlotSettings.allocate(num_slots, VOCABULARY, CUDA)
    params = SamplingParams(**kind.params)
    settings.set({s: SlotRequest(params, s, list(range(100))) for s in range(num_slots)})
    number = torch.arange(num_rows, device=CUDA)
    owner, place = number % num_slots, number // num_slots
    followed = torch.randint(0, VOCABULARY, (num_slots, ROWS_A_SLOT), device=CUDA)
    rows = DrawnRows(owner, 100 + place, followed, (2 << place) - 1)
    num_bytes = num_rows * VOCABULARY * kernels.dtype.itemsize
    copies = [
        (torch.randn(num_rows, VOCABULARY, device=CUDA) * kind.spread).to(kernels.dtype)
        for _ in range(num_copies(num_bytes))
    ]
    heads = [HeadProducts(one, 1.0, 30.0) for one in copies]  # Gemma 4's cap
    draws = [partial(kernels.draw, one, settings, rows) for one in heads]
    return graph_microseconds(draws), num_bytes / BANDWIDTH * 1e6


def main() -> None:
    """Print a table: kinds down, rows across."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    kernels = TritonKernels(CUDA, getattr(torch, parser.parse_args().dtype))
    torch.manual_seed(0)
    print(f"{'microseconds (floor)':24}" + "".join(f"{rows:>16} rows" for rows in ROWS))
    for name, kind in KINDS.items():
        cells = []
        for num_rows in ROWS:
            time, floor = measure(kernels, kind, num_rows)
            cells.append(f"{time:12.1f} ({floor:5.1f})")
            torch.cuda.empty_cache()
        print(f"{name:24}" + "  ".join(cells), flush=True)


if __name__ == "__main__":
    main()
