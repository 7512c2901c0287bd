"""What the CUDA backend does with weights that stay quantised: pack, multiply, look up, mix.

Up to some hundred rows a product reads the codes themselves (quantized/ways.py, linear.py). More
are a matter of arithmetic: for them a weight becomes bfloat16 for the moment, some rows of it at a
time, and torch multiplies; many_rows.py multiplies by the same numbers. With `exact` every row goes
Triton's way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor

from flashdraft.kernels.cuda.dense.rows import gate_rows
from flashdraft.kernels.cuda.experts.quantized import MAX_ROWS, mix_quantized
from flashdraft.kernels.cuda.experts.quantized_one_row import mix_one, mix_row
from flashdraft.kernels.cuda.plan import DeviceLimits
from flashdraft.kernels.cuda.quantized.few_rows import multiply_normed
from flashdraft.kernels.cuda.quantized.few_rows_plan import Experts
from flashdraft.kernels.cuda.quantized.layout import (
    ROW_TILE,
    PackedWeight,
    pack_quantized,
    round_activations,
    stack_packed,
)
from flashdraft.kernels.cuda.quantized.linear import dequantize, multiply_quantized, plan_quantized
from flashdraft.kernels.cuda.quantized.ways import multiply_fast
from flashdraft.kernels.interface import Mixture, Residual
from flashdraft.kernels.kinds import Activation, Scheme
from flashdraft.kernels.quantized import Matrix, Quantized, quantize, stack_rows

# Rows up to which Triton reads the codes. Estimated: on an H200 it was the faster way for 128 rows
# of 31B's weights, floats for 256.
FEW_ROWS = 192
FEW_EXPERT_ROWS = 512  # likewise; as floats 26B's experts would take 1.5 GB for the moment
FLOAT_BYTES = 112 << 20  # of a weight that is bfloat16 for the moment: 31B's largest in four pieces
EXACT_ROWS = 256  # at a time: the parts of a cut depth take memory for every row

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


def round_before(packed: Any, scheme: Scheme | None) -> Any:
    """What `pack_rows` made, or a float weight; rows become 8 bits before those that fit."""
    if scheme is not None and isinstance(packed, tuple):
        return tuple(round_before(piece, scheme) for piece in packed)
    if scheme is not None and isinstance(packed, PackedWeight):
        return round_activations(packed, scheme)
    return packed


def is_packed(weight: Any) -> TypeGuard[PackedWeight]:
    """Whether this weight stays in few bits, all of it in one format."""
    return isinstance(weight, PackedWeight)


def floats_of(weight: PackedWeight | Tensor, dtype: torch.dtype) -> Tensor:
    """The whole weight as floats."""
    return dequantize(weight, dtype) if isinstance(weight, PackedWeight) else weight


def is_held(parts: Sequence[Matrix], scheme: Scheme | None) -> bool:
    """Whether any of these stays, or becomes, quantised."""
    return scheme is not None or any(isinstance(part, Quantized) for part in parts)


def multiply(
    x: Tensor,
    weight: PackedWeight,
    arrivals: Tensor,
    limits: DeviceLimits,
    exact: bool,
    activation: Activation | None = None,
) -> Tensor:
    """x @ weight.T for any number of rows; with an activation its gated halves."""
    num_rows = x.shape[0]
    found, x = multiply_fast(x, weight, arrivals, limits, exact, activation)
    if found is not None:
        return found
    if num_rows <= FEW_ROWS or exact:
        gated = activation is not None
        plan = plan_quantized(num_rows, weight, limits.num_processors, exact, gated)
        pieces = [
            multiply_quantized(x[i : i + EXACT_ROWS], weight, plan, arrivals, activation)
            for i in range(0, max(1, num_rows), EXACT_ROWS)
        ]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    columns, depth = weight.shape
    output = torch.empty(num_rows, columns, device=x.device, dtype=x.dtype)
    count = max(1, FLOAT_BYTES // (2 * depth * ROW_TILE)) * ROW_TILE  # aligned for torch
    for first in range(0, columns, count):
        some = min(count, columns - first)
        floats = dequantize(weight, x.dtype, first=first, count=some)
        torch.mm(x, floats.T, out=output[:, first : first + some])
    return output if activation is None else gate_rows(output, activation)


def multiply_residual(
    residual: Residual,
    norm: Tensor,
    eps: float,
    weight: Any,
    activation: Activation | None,
    limits: DeviceLimits,
    arrivals: Tensor,
    exact: bool,
) -> tuple[Tensor, Tensor] | None:
    """`Kernels.residual_linear` in one launch; None where it takes several."""
    if exact or not isinstance(weight, PackedWeight) or weight.activations is not None:
        return None
    return multiply_normed(residual, norm, eps, weight, limits, arrivals, activation)


def mix_residual(
    residual: Residual, parts: Mixture, limits: DeviceLimits, arrivals: Tensor, exact: bool
) -> tuple[Tensor, Tensor, Tensor] | None:
    """`Kernels.mixture` of one row in four launches; None where that is not the way."""
    return None if exact else mix_row(residual, parts, limits, arrivals)


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
    limits: DeviceLimits,
    exact: bool,
    is_settled: bool = False,
) -> Tensor:
    """`Kernels.experts` over the codes themselves, MAX_ROWS rows at a time."""
    if not exact:
        experts = Experts(chosen, weights, is_settled)
        one = mix_one(x, gate_up, down, experts, activation, limits, arrivals)
        if one is not None:
            return one
    pieces = [
        mix_quantized(
            x[start : start + MAX_ROWS],
            gate_up,
            down,
            chosen[start : start + MAX_ROWS],
            weights[start : start + MAX_ROWS],
            activation,
            limits.num_processors,
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
