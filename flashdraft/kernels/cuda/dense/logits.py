# Triton's decorators carry no types that mypy can see.
# mypy: disallow-untyped-decorators=False
"""From a head's products to logits, in Triton: one read, one write. CUDA only.

`finish` is the one formula of all kernels that look at logits, so that they agree on every bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashdraft.kernels.cuda.overlap import overlap, wait

BLOCK = 2048  # logits of a program


def finish_logits(
    products: Tensor, multiplier: float, softcap: float | None, forbidden: Tensor | None
) -> Tensor:
    """`Kernels.finish_logits`."""
    num_rows, num_columns = products.shape
    logits = torch.empty(products.shape, device=products.device, dtype=torch.float32)
    assert products.is_contiguous()
    if num_rows:
        _finish_piece[(num_rows, triton.cdiv(num_columns, BLOCK))](
            products,
            products if forbidden is None else forbidden.view(torch.uint8),
            logits,
            num_columns,
            float(multiplier),
            1.0 if softcap is None else float(softcap),
            BLOCK=BLOCK,
            CAPPED=softcap is not None,
            FORBIDS=forbidden is not None,
            **overlap(products),
            num_warps=4,
        )
    return logits


@triton.jit
def finish(
    products: tl.tensor, multiplier: tl.tensor, softcap: tl.tensor, CAPPED: tl.constexpr
) -> tl.tensor:
    """The logits of a head's products; tanh(x) = 2 sigmoid(2 x) - 1."""
    logits = products.to(tl.float32) * multiplier
    if CAPPED:
        logits = (2.0 * tl.sigmoid(2.0 * logits / softcap) - 1.0) * softcap
    return logits


@triton.jit
def _finish_piece(
    products: tl.tensor,
    forbidden: tl.tensor,
    output: tl.tensor,
    num_columns: tl.tensor,
    multiplier: tl.tensor,
    softcap: tl.tensor,
    BLOCK: tl.constexpr,
    CAPPED: tl.constexpr,
    FORBIDS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = columns < num_columns
    place = row * num_columns + columns
    raw = tl.load(products + place, mask=real, other=0.0)
    logits = finish(raw, multiplier, softcap, CAPPED)
    if FORBIDS:
        banned = tl.load(forbidden + columns, mask=real, other=0) != 0
        logits = tl.where(banned, float("-inf"), logits)
    tl.store(output + place, logits, mask=real)
