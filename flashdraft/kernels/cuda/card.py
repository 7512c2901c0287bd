"""Which card kernels are for: the one place where they ask. Knows no kernels.

Tensors without values, on torch's device "meta", lie on the card that a process is told to compile
for (ahead.py), whether it has one or not.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from flashdraft.kernels.cuda.plan import LEAST_FP8_CAPABILITY, DeviceLimits

_INTERPRETER = DeviceLimits(num_processors=1, shared_bytes=227 * 1024)  # Triton's


class Capability(NamedTuple):
    """Of CUDA: the generation of a card, and what it can do within it."""

    major: int
    minor: int


class _Told(NamedTuple):
    capability: Capability
    limits: DeviceLimits


_told: list[_Told] = []  # at most one: what this process compiles for


def tell(capability: tuple[int, int], limits: DeviceLimits = _INTERPRETER) -> None:
    """From now on tensors without values lie on such a card."""
    _told[:] = [_Told(Capability(*capability), limits)]


def capability_of(device: torch.device) -> Capability | None:
    """What a device can do; None where it is no card of CUDA's, as with Triton's interpreter."""
    if device.type == "meta" and _told:
        return _told[0].capability
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    return Capability(*torch.cuda.get_device_capability(device))


@functools.cache
def is_hopper(device: torch.device) -> bool:
    """Whether a card has what Hopper has and no later one."""
    return capability_of(device) == (9, 0)


def read_limits(device: torch.device) -> DeviceLimits:
    """What a kernel's plan has to keep to."""
    if device.type == "meta" and _told:
        return _told[0].limits
    if device.type != "cuda":
        return _INTERPRETER
    properties: Any = torch.cuda.get_device_properties(device)
    return DeviceLimits(
        properties.multi_processor_count,
        properties.shared_memory_per_block_optin,
        properties.major,
    )


def why_no_fp8(device: torch.device) -> str | None:
    """What keeps this card from reading 8-bit floats, with the remedy."""
    capability = capability_of(device)
    if capability is None or capability >= LEAST_FP8_CAPABILITY:
        return None
    found, least = (".".join(map(str, c)) for c in (capability, LEAST_FP8_CAPABILITY))
    return (
        f"this GPU has compute capability {found}, and reading 8-bit floats needs {least} (Ada) or "
        "newer; use a newer GPU"
    )
