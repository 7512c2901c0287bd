"""Cards by name: memory, bandwidth and arithmetic, and how much of them a step gets in practice.

Memory is what the driver reports, bandwidth and arithmetic are the data sheets'. Knows nothing of
models, nor of the machine at hand (machine.py). Used by `flashdraft plan`.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

from flashdraft.errors import RequestError, did_you_mean

GB = 10**9
TERA = 1e12
MIB = 2**20
RUNTIME_BYTES = 7 * GB // 10  # a CUDA context and the kernels' code, before the first weight
CPU_RUNTIME_BYTES = 9 * GB // 10  # Python, torch, the server and the tokenizer's processes
_SAME_MEMORY = 0.1  # a card of this name but another size is another card


@dataclass(frozen=True)
class Efficiency:
    """What of a data sheet's figures a step gets, the same for every model and load."""

    bandwidth: float  # share of the bandwidth that reading weights reaches
    arithmetic: float  # share of the matrix units' rate
    kernel_us: float  # per kernel of a captured step: its start and its tail
    is_measured: bool  # on a card of this class, or carried over from one that was
    unpacks: bool = True  # weights in few bits, which takes time; else they are multiplied as such


# fitted once to all rows of the H200 results together; 4.37 of 4.8 TB/s is what a plain sum reads
_HOPPER = Efficiency(bandwidth=0.91, arithmetic=0.70, kernel_us=3.2, is_measured=True)
_OTHERS = replace(_HOPPER, is_measured=False)


@dataclass(frozen=True)
class Card:
    """A device to plan for. None = not known: nothing is predicted from it."""

    title: str
    memory_bytes: int  # in all
    free_bytes: int  # for weights, cache and activations
    bandwidth_tb_s: float | None = None
    tflops: float | None = None  # bfloat16 matrix products, dense
    efficiency: Efficiency = _OTHERS
    is_cpu: bool = False

    @property
    def runtime_bytes(self) -> int:
        """What the program takes of it before the first weight."""
        return CPU_RUNTIME_BYTES if self.is_cpu else RUNTIME_BYTES


@dataclass(frozen=True)
class _Row:
    title: str
    nominal_gb: int
    memory_mib: int
    bandwidth_tb_s: float
    tflops: float
    efficiency: Efficiency = _OTHERS


_CARDS = {
    "rtx3090": _Row("RTX 3090", 24, 24576, 0.936, 71),
    "rtx4090": _Row("RTX 4090", 24, 24564, 1.008, 165),
    "rtx5090": _Row("RTX 5090", 32, 32607, 1.792, 210),
    "a6000": _Row("RTX A6000", 48, 49140, 0.768, 155),
    "rtx6000ada": _Row("RTX 6000 Ada", 48, 49140, 0.960, 364),
    "l40s": _Row("L40S", 48, 46068, 0.864, 362),
    "a100": _Row("A100", 80, 81920, 2.039, 312),
    "h100pcie": _Row("H100 PCIe", 80, 81559, 2.000, 756),
    "h100": _Row("H100", 80, 81559, 3.350, 989),
    "rtxpro6000": _Row("RTX PRO 6000", 96, 97887, 1.792, 504),
    "h200": _Row("H200", 141, 143771, 4.800, 989, _HOPPER),
    "b200": _Row("B200", 180, 183359, 8.000, 2250),
    "b300": _Row("B300", 288, 275040, 8.000, 2250),
}


def find_card(name: str) -> Card:
    """A card of the table: "h200", "RTX 5090", with its size "a100-80", or in short "5090"."""
    plain = _plain(name)
    for key, row in _CARDS.items():
        if plain in (key, f"{key}{row.nominal_gb}", f"{key}{row.nominal_gb}gb", _plain(row.title)):
            return _card(row)
    ends = [row for key, row in _CARDS.items() if key.endswith(plain)]
    if len(ends) == 1:
        return _card(ends[0])
    known = ", ".join(f"{key} ({row.nominal_gb} GB)" for key, row in _CARDS.items())
    in_short = (key.removeprefix("rtx") for key in _CARDS)
    meant = did_you_mean(plain.replace("o", "0"), (*_CARDS, *in_short))
    raise RequestError(
        f"The GPU {name[:80]!r} is not known; known are {known}.{meant} For another one give "
        "--memory and --bandwidth."
    )


def cards_by_memory() -> list[Card]:
    """Every card of the table, smallest first."""
    return [_card(row) for row in sorted(_CARDS.values(), key=lambda row: row.memory_mib)]


def custom_card(
    memory_gb: float | None, bandwidth_tb_s: float | None, base: Card | None = None
) -> Card:
    """A card by its figures; with `base`, that card with the figures given."""
    for flag, value in (("--memory", memory_gb), ("--bandwidth", bandwidth_tb_s)):
        if value is not None and not 0 < value < math.inf:
            unit = "GB" if flag == "--memory" else "TB/s"
            raise RequestError(f"{flag} is {value:g}; it must be above 0, in {unit}.")
    if base is None or base.is_cpu:
        if memory_gb is None:
            raise RequestError("--bandwidth alone is not a GPU: give --memory or --gpu too.")
        base = Card(f"a GPU of {memory_gb:g} GB", 0, 0)
    if memory_gb is not None:
        total = int(memory_gb * GB)
        base = replace(base, memory_bytes=total, free_bytes=max(0, total - RUNTIME_BYTES))
    if bandwidth_tb_s is not None:
        base = replace(base, bandwidth_tb_s=bandwidth_tb_s)
    return base


def recognise(device_name: str, total: int, free: int) -> Card:
    """The card that a driver calls so: with its data sheet's figures if the table has it."""
    plain = _plain(device_name)
    found = [row for key, row in _CARDS.items() if key in plain and "laptop" not in plain]
    found = [r for r in found if abs(r.memory_mib * MIB - total) < _SAME_MEMORY * total]
    if not found:
        return Card(device_name, total, free)
    longest = max(found, key=lambda row: len(row.title))
    return replace(_card(longest), title=device_name, memory_bytes=total, free_bytes=free)


def _card(row: _Row) -> Card:
    total = row.memory_mib * MIB
    return Card(
        title=f"{row.title} ({row.nominal_gb} GB)",
        memory_bytes=total,
        free_bytes=total - RUNTIME_BYTES,
        bandwidth_tb_s=row.bandwidth_tb_s,
        tflops=row.tflops,
        efficiency=row.efficiency,
    )


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower()).removeprefix("nvidia").removeprefix("geforce")
