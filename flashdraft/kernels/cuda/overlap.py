# Triton's decorators carry no types that mypy can see.
# mypy: disallow-untyped-decorators=False
"""How one kernel's start overlaps the end of the one before: programmatic dependent launch.

A kernel that is launched so may start once every program of the kernel before it on the stream has
signalled or ended: its programs then lie ready. Every kernel keeps two rules:

1. Every program waits before it loads or stores anything but weights, and what is older than the
   last linear (positions, pages). The wait ends when the kernel before has completed and its writes
   can be seen. That one cannot have completed before its own programs had waited for the one
   before it, and so on: after the wait **all** earlier kernels are complete. So memory may be
   handed on freely, also what the allocator gives to a later kernel because an earlier one no
   longer needs it: nobody writes before the last reader is done. A kernel that is launched plainly
   (torch's own) starts after all of its predecessor and never signals: it keeps the rule by itself.
2. A linear, and what else keeps the device busy, signals right after its wait (`wait`): so when the
   next kernel starts, everything *before* the linear is complete, and few kernels share the
   processors. The small ones between two linears signal before they wait (`stand_by`): they all lie
   ready with their weights and tables, and the next linear with the first of its own, while the
   last one ends. What is read before the wait besides weights rests on this rule: between what
   writes a table and what reads it early lies a linear, or a kernel that is launched plainly.

It pays where kernels are short: in steps of few rows. It does not for Triton's linears with weights
in few bits, whose many programs come to lie unevenly: they are launched plainly. Those in CUDA C++
(quantized/few_rows.py and many_rows.py) have one block for each processor, and gain. Asking L2 for
weights before the wait, or at the end of the linear before, gains nothing. All this was tried on an
H200.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from flashdraft.kernels.cuda.card import capability_of

# With more rows, programs that lie ready take more room than their start is worth: those that read
# weights or a cache, and the small ones between them.
MAX_ROWS = 4
MAX_SMALL_ROWS = 16


@functools.cache
def can_overlap(device: torch.device) -> bool:
    """Whether kernels on this device may start before their predecessors end: Hopper and later."""
    capability = capability_of(device)
    return capability is not None and capability >= (9, 0)


def overlap(rows: Tensor, is_small: bool = False) -> dict[str, Any]:
    """What a launch over these rows takes besides its own arguments."""
    most = MAX_SMALL_ROWS if is_small else MAX_ROWS
    if rows.shape[0] <= most and can_overlap(rows.device):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


@triton.jit
def wait(PDL: tl.constexpr) -> None:
    """Wait until all earlier kernels are complete; then the next one may start."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def stand_by(PDL: tl.constexpr) -> None:
    """Let the next kernel start; then wait until all earlier ones are complete."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
