"""What the CUDA backend does with weights that stay quantised: pack, multiply, look up, mix.

Few rows read the codes themselves. Many rows are a matter of arithmetic, not of memory: for them a
weight becomes bfloat16 for the moment, some rows of it at a time, and torch multiplies. With
`exact` every row goes the first way.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from flashdraft.kernels.interface import Activation
from flashdraft.kernels.quantized import Matrix, Quantized, Scheme, quantize, stack_rows
from flashdraft.kernels.triton_quantized import (
    MAX_ROWS,
    dequantize,
    multiply_quantized,
    plan_quantized,
)
from flashdraft.kernels.triton_quantized_experts import mix_quantized
from flashdraft.kernels.triton_quantized_layout import (
    PackedWeight,
    pack_quantized,
    stack_packed,
)

FLOAT_BYTES = 64 << 20  # of a weight that is bfloat16 for the moment
EXACT_ROWS = 1024  # at a time: the parts of a cut depth take memory for every row

Pieces = tuple[PackedWeight | Tensor, ...]
"""Weights of the same inputs in different formats, by output rows."""


def pack_rows(
    parts: Sequence[Matrix], scheme: Scheme | None, device: torch.device
) -> PackedWeight | Pieces:
    """Weights of the same inputs as few packed ones as their formats allow."""
    held = [_hold(part, scheme, device) for part in parts]
    few = [part for part in held if isinstance(part, Quantized)]
    joined = stack_rows(few) if len(few) == len(held) else None
    if joined is not None:
        return pack_quantized(joined)
    return tuple(
        pack_quantized(part)
        if isinstance(part, Quantized)
        else part.to(torch.bfloat16).contiguous()
        for part in held
    )


def pack_stack(weight: Matrix, scheme: Scheme | None, device: torch.device) -> PackedWeight:
    """The weights of all experts; floats are quantised one expert at a time."""
    if isinstance(weight, Quantized):
        return pack_quantized(weight.to(device))
    assert scheme is not None
    return stack_packed([pack_quantized(quantize(one.to(device), scheme)) for one in weight])


def is_held(parts: Sequence[Matrix], scheme: Scheme | None) -> bool:
    """Whether any of these stays, or becomes, quantised."""
    return scheme is not None or any(isinstance(part, Quantized) for part in parts)


def multiply(
    x: Tensor, weight: PackedWeight, arrivals: Tensor, num_processors: int, exact: bool
) -> Tensor:
    """x @ weight.T for any number of rows."""
    num_rows = x.shape[0]
    if num_rows <= MAX_ROWS or exact:
        plan = plan_quantized(num_rows, weight, num_processors, exact)
        if num_rows <= EXACT_ROWS:
            return multiply_quantized(x, weight, plan, arrivals)
        pieces = [x[start : start + EXACT_ROWS] for start in range(0, num_rows, EXACT_ROWS)]
        return torch.cat([multiply_quantized(p, weight, plan, arrivals) for p in pieces])
    columns, depth = weight.shape
    output = torch.empty(num_rows, columns, device=x.device, dtype=x.dtype)
    count = max(1, FLOAT_BYTES // (2 * depth))
    for first in range(0, columns, count):
        some = min(count, columns - first)
        floats = dequantize(weight, x.dtype, first=first, count=some)
        output[:, first : first + some] = F.linear(x, floats)
    return output


def look_up(token_ids: Tensor, table: PackedWeight, dtype: torch.dtype) -> Tensor:
    """Rows of an embedding table."""
    rows = dequantize(table, dtype, token_ids.flatten())
    return rows.view(*token_ids.shape, -1)


def mix(
    x: Tensor,
    gate_up: PackedWeight,
    down: PackedWeight,
    chosen: Tensor,
    weights: Tensor,
    activation: Activation,
    arrivals: Tensor,
    num_processors: int,
    exact: bool,
) -> Tensor:
    """`Kernels.experts` over the codes themselves, MAX_ROWS rows at a time."""
    pieces = [
        mix_quantized(
            x[start : start + MAX_ROWS],
            gate_up,
            down,
            chosen[start : start + MAX_ROWS],
            weights[start : start + MAX_ROWS],
            activation,
            num_processors,
            arrivals,
            exact,
        )
        for start in range(0, max(1, x.shape[0]), MAX_ROWS)
    ]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _hold(part: Matrix, scheme: Scheme | None, device: torch.device) -> Matrix:
    if isinstance(part, Quantized):
        return part.to(device)
    part = part.detach().to(device)
    return part if scheme is None else quantize(part, scheme)
