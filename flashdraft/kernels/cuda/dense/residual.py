# Triton's decorators carry no types that mypy can see.
# mypy: disallow-untyped-decorators=False
"""What stands between two linears of a layer, in one Triton launch: norms, sums, a scalar.

CUDA only. It rounds where the chain of single kernels rounds, and every program works on one row by
itself, so results do not depend on the batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashdraft.kernels.cuda.overlap import overlap, stand_by
from flashdraft.kernels.interface import Residual

MAX_OUTPUTS = 3


def residual_norm_rows(
    residual: Residual, outputs: Sequence[Tensor], eps: float
) -> tuple[Tensor, list[Tensor]]:
    """`Kernels.residual_norms`, where something is added."""
    x, deltas = residual.x, residual.deltas
    if not 1 <= len(deltas) <= 2 or len(outputs) > MAX_OUTPUTS:
        raise ValueError(
            f"{len(deltas)} deltas and {len(outputs)} outputs; one launch takes one or two deltas "
            f"and at most {MAX_OUTPUTS} outputs."
        )
    num_rows, width = x.shape
    stream = torch.empty_like(x, memory_format=torch.contiguous_format)
    normed = [torch.empty_like(stream) for _ in outputs]
    if num_rows == 0:
        return stream, normed
    (first, first_weight), *others = deltas
    second, second_weight = others[0] if others else (None, None)
    missing = [None] * (MAX_OUTPUTS - len(outputs))
    block = triton.next_power_of_2(width)
    _residual_norms[(num_rows,)](
        x.contiguous(),
        first.contiguous(),
        first_weight,
        None if second is None else second.contiguous(),
        second_weight,
        residual.post,
        residual.scalar,
        stream,
        *outputs,
        *missing,
        *normed,
        *missing,
        eps,
        WIDTH=width,
        BLOCK=block,
        **overlap(x, is_small=True),
        num_warps=min(16, max(1, block // 512)),
    )
    return stream, normed


@triton.jit
def _scale(row: tl.tensor, eps: tl.tensor, WIDTH: tl.constexpr) -> tl.tensor:
    return row * tl.rsqrt(tl.sum(row * row, 0) / WIDTH + eps)


@triton.jit
def _residual_norms(
    x: tl.tensor,
    first: tl.tensor,
    first_weight: tl.tensor,
    second: tl.tensor,  # None: one delta
    second_weight: tl.tensor,
    post: tl.tensor,  # None: the delta is not normed again
    scalar: tl.tensor,  # None: the stream is not scaled
    stream: tl.tensor,
    weight0: tl.tensor,  # None: no such output
    weight1: tl.tensor,
    weight2: tl.tensor,
    output0: tl.tensor,
    output1: tl.tensor,
    output2: tl.tensor,
    eps: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    lanes = tl.arange(0, BLOCK)
    real = lanes < WIDTH
    place = tl.program_id(0).to(tl.int64) * WIDTH + lanes
    kind: tl.constexpr = stream.dtype.element_ty
    # Weights are asked for before the wait: they come from far, since a step reads so many others.
    scale = tl.load(first_weight + lanes, mask=real, other=0.0)
    if second is not None:
        other_scale = tl.load(second_weight + lanes, mask=real, other=0.0)
    if post is not None:
        post_scale = tl.load(post + lanes, mask=real, other=0.0)
    if scalar is not None:
        factor = tl.load(scalar)
    if output0 is not None:
        scale0 = tl.load(weight0 + lanes, mask=real, other=0.0)
    if output1 is not None:
        scale1 = tl.load(weight1 + lanes, mask=real, other=0.0)
    if output2 is not None:
        scale2 = tl.load(weight2 + lanes, mask=real, other=0.0)
    stand_by(PDL)
    row = tl.load(x + place, mask=real, other=0.0)
    delta = tl.load(first + place, mask=real, other=0.0).to(tl.float32)
    if second is not None:  # before a reduction, which waits: nothing is loaded across it
        other = tl.load(second + place, mask=real, other=0.0).to(tl.float32)
    delta = (_scale(delta, eps, WIDTH) * scale.to(tl.float32)).to(kind).to(tl.float32)
    if second is not None:
        other = (_scale(other, eps, WIDTH) * other_scale.to(tl.float32)).to(kind).to(tl.float32)
        delta = (delta + other).to(kind).to(tl.float32)
    if post is not None:
        delta = (_scale(delta, eps, WIDTH) * post_scale.to(tl.float32)).to(kind).to(tl.float32)
    total = (row.to(tl.float32) + delta).to(kind).to(tl.float32)
    if scalar is not None:
        total = (total * factor.to(tl.float32)).to(kind).to(tl.float32)
    tl.store(stream + place, total.to(kind), mask=real)
    if output0 is not None:
        total = _scale(total, eps, WIDTH)
        tl.store(output0 + place, (total * scale0.to(tl.float32)).to(kind), mask=real)
    if output1 is not None:
        tl.store(output1 + place, (total * scale1.to(tl.float32)).to(kind), mask=real)
    if output2 is not None:
        tl.store(output2 + place, (total * scale2.to(tl.float32)).to(kind), mask=real)
