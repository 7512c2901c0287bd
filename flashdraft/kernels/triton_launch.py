# Triton's decorators carry no types that mypy can see.
# mypy: disallow-untyped-decorators=False
"""How one kernel's start overlaps the end of the one before: programmatic dependent launch.

A kernel that is launched so may start once every program of the kernel before it on the stream has
signalled or ended. Its programs then lie ready, ask the L2 cache for weights, and wait. Every
kernel keeps three rules:

1. Every program waits, before it loads or stores anything but what rule 3 names. The wait ends when
   the kernel before has completed and its writes can be seen. That one cannot have completed before
   its own programs had waited for the one before it, and so on: after the wait **all** earlier
   kernels are complete. So memory may be handed on freely, also what the allocator gives to a later
   kernel because an earlier one no longer needs it: nobody writes before the last reader is done. A
   kernel that is launched plainly (torch's own) starts after all of its predecessor and never
   signals: it keeps the rule by itself.
2. Programs signal at once: it is the next kernel's own wait that protects it. Where a kernel
   promises that more is complete when the next one starts, it signals after its wait: then, when
   the next one starts, everything *before* this one is complete.
3. Before its wait, a program may prefetch anything into L2, where nothing can go stale, since
   writes go there too; and may load what a promise of rule 2 covers.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LINE = 128  # bytes that a prefetch fetches
PREFETCH_BYTES = 16 << 20  # of a launch: a third of the L2 cache, some 4 us of reading
PREFETCHING = tl.constexpr(
    512
)  # programs that can lie ready; later ones start too late to prefetch


@functools.cache
def can_overlap(device: torch.device) -> bool:
    """Whether kernels on this device may start before their predecessors end: Hopper and later."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False  # Triton's interpreter, for one
    return torch.cuda.get_device_capability(device) >= (9, 0)


def overlap(device: torch.device) -> dict[str, Any]:
    """What every launch of ours takes besides its own arguments."""
    return {"PDL": True, "launch_pdl": True} if can_overlap(device) else {"PDL": False}


def prefetch_lines(
    device: torch.device, row_bytes: int, rows_per_program: int, num_programs: int
) -> int:
    """How many lines of each of its weight rows a program may prefetch; 0 for none."""
    if not can_overlap(device):
        return 0
    num_rows = min(num_programs, PREFETCHING.value) * rows_per_program
    lines = min(PREFETCH_BYTES // num_rows, row_bytes) // LINE
    return 1 << (lines.bit_length() - 1) if lines else 0


@triton.jit
def signal(PDL: tl.constexpr) -> None:
    """Let the next kernel start as soon as all programs have come here."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def wait(PDL: tl.constexpr) -> None:
    """Wait until all earlier kernels are complete."""
    if PDL:
        gdc_wait()


@triton.jit
def signal_and_wait(PDL: tl.constexpr) -> None:
    """Both, for kernels with nothing to prefetch."""
    signal(PDL)
    wait(PDL)


@triton.jit
def prefetch(
    weight: tl.tensor,
    rows: tl.tensor,
    first: tl.tensor,
    depth: tl.tensor,
    program: tl.tensor,
    LINES: tl.constexpr,
) -> None:
    """Ask L2 for lines of `rows`, which must exist, of weight [any, depth], from `first` on."""
    if LINES > 0:
        per_line: tl.constexpr = 128 * 8 // weight.dtype.element_ty.primitive_bitwidth
        columns = tl.minimum(first + tl.arange(0, LINES) * per_line, depth - 1)
        places = weight + rows[:, None].to(tl.int64) * depth + columns[None, :]
        if program < PREFETCHING:
            tl.inline_asm_elementwise(
                "prefetch.global.L2 [$1]; // $0",
                "=r,l",
                [places.to(tl.int64)],
                dtype=tl.int32,
                is_pure=False,
                pack=1,
            )
