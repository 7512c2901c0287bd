"""What a pair needs of the engine's GPUs: whether it fits, and how long a prefill step may be.

Estimates, on the safe side, from the configs and the memory that is free now. What the engine then
measures and reserves is its own business.
"""

from __future__ import annotations

from collections.abc import Sequence

from flashdraft.errors import CapacityError
from flashdraft.external.command import EngineSettings
from flashdraft.external.pairs import EnginePair
from flashdraft.external.versions import Gpu, Installation

GB = 1e9
MOST_BATCHED_TOKENS = 32768  # what the drafters' makers recommend
LEAST_BATCHED_TOKENS = 2048
USABLE = 0.9  # of a GPU's memory; the engines take about as much
RUNTIME_BYTES = 2 * GB  # contexts, graphs and libraries
ACTIVATION_SHARE = 0.25  # of what the weights leave; the rest is for keys and values
_BYTES = 2  # activations are 16 bits wide


def check_fits(pair: EnginePair, gpus: Sequence[Gpu], num_gpus: int, total_gpus: int) -> None:
    """Refuse a pair whose weights cannot fit `total_gpus`, `num_gpus` of which are here."""
    if len(gpus) < num_gpus:
        raise CapacityError(
            f"{num_gpus} GPUs are wanted on this machine and there are {len(gpus)}; lower "
            "--tensor-parallel, or spread it over machines with --nodes."
        )
    if pair.weight_bytes is None:
        return
    used = sorted(gpus, key=lambda gpu: gpu.free_bytes, reverse=True)[:num_gpus]
    room, total = used[-1].free_bytes, used[-1].total_bytes
    needed = pair.weight_bytes / total_gpus + RUNTIME_BYTES
    if needed <= min(room, USABLE * total):
        return
    times = total_gpus
    while times < 64 and pair.weight_bytes / times + RUNTIME_BYTES > USABLE * total:
        times *= 2
    remedy = f"use --tensor-parallel {times}, or a quantised checkpoint"
    if pair.weight_bytes / total_gpus + RUNTIME_BYTES <= USABLE * total:
        remedy = "end what else runs on it"
    raise CapacityError(
        f"The weights need {needed / GB:.0f} GB on each of {total_gpus} GPU"
        f"{'' if total_gpus == 1 else 's'}; the {used[-1].name} has {room / GB:.0f} GB free of "
        f"{total / GB:.0f} GB: {remedy}."
    )


def fit_notes(
    pair: EnginePair, settings: EngineSettings, installation: Installation, is_rehearsal: bool
) -> list[str]:
    """Refuse what does not fit; where it may yet, on another machine or by a flag, say so only."""
    try:
        check_fits(pair, installation.gpus, settings.gpus_here, settings.tensor_parallel)
    except CapacityError as error:
        if not (is_rehearsal or settings.extra):
            raise
        return [str(error)]
    return []


def batched_tokens(pair: EnginePair, gpus: Sequence[Gpu], total_gpus: int) -> int:
    """The most tokens of a prefill step that the memory beside the weights allows."""
    tokens = MOST_BATCHED_TOKENS
    if pair.weight_bytes is None or pair.target is None or not gpus:
        return tokens
    smallest = min(min(gpu.free_bytes, USABLE * gpu.total_bytes) for gpu in gpus)
    room = smallest - pair.weight_bytes / total_gpus - RUNTIME_BYTES
    each = activation_bytes(pair, total_gpus)
    while tokens > LEAST_BATCHED_TOKENS and tokens * each > ACTIVATION_SHARE * room:
        tokens //= 2
    return tokens


def activation_bytes(pair: EnginePair, total_gpus: int) -> float:
    """What one token of a prefill step occupies while it passes through a layer, and its taps."""
    assert pair.target is not None
    hidden, inner = pair.target.hidden_size, pair.target.intermediate_size
    values = 8.0 * hidden + 3 * inner / total_gpus
    experts = pair.target.experts
    if experts is not None:
        values += experts.num_chosen * (hidden + 3 * experts.intermediate_size / total_gpus)
    if pair.drafter_config is not None:
        values += len(pair.drafter_config.tap_layers) * hidden
    return values * _BYTES
