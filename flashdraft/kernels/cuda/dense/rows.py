# Triton's decorators carry no types that mypy can see.
# mypy: disallow-untyped-decorators=False
"""Row-wise kernels in Triton: norms, gates, and the preparation of q, k and v. CUDA only.

Each replaces a chain of small torch kernels by one launch, and rounds where the chain rounds. Every
program works on one row (or one head of it) by itself, so results do not depend on the batch.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashdraft.kernels.cuda.overlap import overlap, stand_by, wait
from flashdraft.kernels.interface import Heads
from flashdraft.kernels.kinds import Activation
from flashdraft.kernels.quantized import LARGEST_FP8

GATE_BLOCK = 1024
MAX_HEADS = 4  # of one row that a program prepares
FP8_LIMIT = tl.constexpr(LARGEST_FP8)


def norm_rows(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """`Kernels.rms_norm`."""
    x = x.contiguous()
    output = torch.empty_like(x)
    _launch_norm(x, None, weight, None, output, eps)
    return output


def add_norm_rows(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`Kernels.add_rms_norm`."""
    x, delta = x.contiguous(), delta.contiguous()
    total, output = torch.empty_like(x), torch.empty_like(x)
    _launch_norm(x, delta, weight, total, output, eps)
    return total, output


def _launch_norm(
    x: Tensor,
    delta: Tensor | None,
    weight: Tensor | None,
    total: Tensor | None,
    output: Tensor,
    eps: float,
) -> None:
    num_features = x.shape[-1]
    if x.numel() == 0:
        return
    block = triton.next_power_of_2(num_features)
    _norm[(x.numel() // num_features,)](
        x,
        delta,
        weight,
        total,
        output,
        eps,
        num_features,
        block,
        **overlap(x, is_small=True),
        num_warps=min(8, max(1, block // 512)),
    )


def gate_rows(gate_up: Tensor, activation: Activation) -> Tensor:
    """`Kernels.gated`."""
    num_rows, width = gate_up.shape
    output = torch.empty(num_rows, width // 2, device=gate_up.device, dtype=gate_up.dtype)
    if output.numel():
        grid = (num_rows, triton.cdiv(width // 2, GATE_BLOCK))
        gelu = activation is Activation.GELU_TANH
        _gate[grid](
            gate_up.contiguous(),
            output,
            width // 2,
            gelu,
            GATE_BLOCK,
            **overlap(output),
            num_warps=4,
        )
    return output


def prepare_heads(
    qkv: Tensor,
    heads: Heads,
    key_cache: Tensor | None,
    value_cache: Tensor,
    slots: Tensor,
) -> Tensor:
    """`Kernels.prepare_qkv`."""
    spec, rope, positions = heads.spec, heads.rope, heads.positions
    num_rows = qkv.shape[0]
    shape = (num_rows, spec.num_heads, spec.head_dim)
    query = torch.empty(shape, device=qkv.device, dtype=qkv.dtype)
    if num_rows == 0:
        return query
    assert value_cache.stride(3) == 1
    assert key_cache is None or key_cache.stride() == value_cache.stride()
    assert rope.cos.stride() == rope.sin.stride() and rope.cos.stride(1) == 1
    # Heads of one kind share a program: fewer, fuller ones.
    shared = math.gcd(spec.num_heads, spec.num_kv_heads, MAX_HEADS)
    _prepare[(num_rows, spec.width // spec.head_dim // shared)](
        qkv.contiguous(),
        spec.q_norm,
        spec.k_norm,
        rope.cos,
        rope.sin,
        positions,
        slots,
        query,
        key_cache,
        value_cache,
        spec.eps,
        rope.cos.stride(0),
        *value_cache.stride()[:3],
        spec.num_heads,
        spec.num_kv_heads,
        spec.head_dim,
        shared,
        triton.next_power_of_2(spec.head_dim // 2),
        value_cache.shape[1],
        spec.v_norm,
        spec.share_kv,
        **overlap(qkv, is_small=True),
        num_warps=min(4, shared * (1 if spec.head_dim <= 256 else 2)),
    )
    return query


@triton.jit
def _norm(
    x: tl.tensor,
    delta: tl.tensor,  # None: plain norm
    weight: tl.tensor,  # None: no weight
    total: tl.tensor,
    output: tl.tensor,
    eps: tl.tensor,
    NUM_FEATURES: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    start = tl.program_id(0).to(tl.int64) * NUM_FEATURES
    columns = tl.arange(0, BLOCK)
    real = columns < NUM_FEATURES
    if weight is not None:
        scale = tl.load(weight + columns, mask=real, other=0.0)
    stand_by(PDL)
    y = tl.load(x + start + columns, mask=real, other=0.0).to(tl.float32)
    if delta is not None:
        y += tl.load(delta + start + columns, mask=real, other=0.0).to(tl.float32)
        rounded = y.to(total.dtype.element_ty)
        tl.store(total + start + columns, rounded, mask=real)
        y = rounded.to(tl.float32)
    y = y * tl.rsqrt(tl.sum(y * y, 0) / NUM_FEATURES + eps)
    if weight is not None:
        y = y * scale.to(tl.float32)
    tl.store(output + start + columns, y.to(output.dtype.element_ty), mask=real)


@triton.jit
def gate(gates: tl.tensor, ups: tl.tensor, dtype: tl.constexpr, GELU: tl.constexpr) -> tl.tensor:
    """activation(gate) * up in float32, the factors rounded to `dtype` as single kernels do it."""
    gates = gates.to(dtype).to(tl.float32)
    if GELU:  # x (1 + tanh u) / 2 = x sigmoid(2 u), with u = sqrt(2 / pi) (x + 0.044715 x^3)
        gates *= tl.sigmoid(1.5957691216057308 * (gates + 0.044715 * gates * gates * gates))
    else:
        gates *= tl.sigmoid(gates)
    return gates.to(dtype).to(tl.float32) * ups.to(dtype).to(tl.float32)


@triton.jit
def _gate(
    gate_up: tl.tensor,
    output: tl.tensor,
    NUM_FEATURES: tl.constexpr,
    GELU: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = columns < NUM_FEATURES
    source = gate_up + row * (2 * NUM_FEATURES) + columns
    gates = tl.load(source, mask=real, other=0.0)
    ups = tl.load(source + NUM_FEATURES, mask=real, other=0.0)
    dtype: tl.constexpr = output.dtype.element_ty
    target = output + row * NUM_FEATURES + columns
    tl.store(target, gate(gates, ups, dtype, GELU).to(dtype), mask=real)


@triton.jit
def _load_halves(
    weight: tl.tensor, dims: tl.tensor, HALF: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """The left and the right half of a head's norm; ones where there is none."""
    left = tl.full(dims.shape, 1.0, tl.float32)
    right = left
    if weight is not None:
        left = tl.load(weight + dims, mask=dims < HALF, other=0.0).to(tl.float32)
        right = tl.load(weight + HALF + dims, mask=dims < HALF, other=0.0).to(tl.float32)
    return left, right


@triton.jit
def _norm_halves(
    left: tl.tensor,
    right: tl.tensor,
    weight_left: tl.tensor,
    weight_right: tl.tensor,
    eps: tl.tensor,
    dtype: tl.constexpr,
    HALF: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    mean = (tl.sum(left * left, 1) + tl.sum(right * right, 1)) / (2 * HALF)
    scale = tl.rsqrt(mean + eps)[:, None]
    left = left * scale * weight_left
    right = right * scale * weight_right
    return left.to(dtype).to(tl.float32), right.to(dtype).to(tl.float32)


@triton.jit
def _store_halves(
    target: tl.tensor,
    left: tl.tensor,
    right: tl.tensor,
    dims: tl.tensor,
    dtype: tl.constexpr,
    HALF: tl.constexpr,
) -> None:
    stored: tl.constexpr = target.dtype.element_ty
    left, right = left.to(dtype), right.to(dtype)
    if stored == tl.float8e4nv:
        left, right = _saturate(left), _saturate(right)
    tl.store(target + dims, left.to(stored), mask=dims < HALF)
    tl.store(target + HALF + dims, right.to(stored), mask=dims < HALF)


@triton.jit
def _saturate(x: tl.tensor) -> tl.tensor:
    """The nearest that fp8 can hold; NaN stays NaN, so that a broken step is still seen as one."""
    return tl.clamp(x.to(tl.float32), -FP8_LIMIT, FP8_LIMIT, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _prepare(
    qkv: tl.tensor,
    q_norm: tl.tensor,  # None: no norm
    k_norm: tl.tensor,  # None: no norm
    cos: tl.tensor,
    sin: tl.tensor,
    positions: tl.tensor,
    slots: tl.tensor,
    query: tl.tensor,
    key_cache: tl.tensor,  # None: no keys are written
    value_cache: tl.tensor,
    eps: tl.tensor,
    rope_stride: tl.tensor,
    page_stride: tl.tensor,
    slot_stride: tl.tensor,
    head_stride: tl.tensor,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS: tl.constexpr,  # in a program, all of them queries', keys' or values'
    BLOCK: tl.constexpr,  # of half a head
    PAGE_SIZE: tl.constexpr,
    V_NORM: tl.constexpr,
    SHARE_KV: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """A few heads of one row: queries', keys' (with their values where shared) or values'."""
    HALF: tl.constexpr = HEAD_DIM // 2
    dtype: tl.constexpr = qkv.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * HEADS
    heads = first + tl.arange(0, HEADS)[:, None]
    dims = tl.arange(0, BLOCK)[None, :]
    # All that is not qkv is there already: it is older than the linear that computes qkv.
    angle = tl.load(positions + row) * rope_stride + dims
    cosine = tl.load(cos + angle, mask=dims < HALF, other=0.0)
    sine = tl.load(sin + angle, mask=dims < HALF, other=0.0)
    slot = tl.load(slots + row)
    place = slot // PAGE_SIZE * page_stride + slot % PAGE_SIZE * slot_stride
    q_left, q_right = _load_halves(q_norm, dims, HALF)
    k_left, k_right = _load_halves(k_norm, dims, HALF)
    stand_by(PDL)
    source = qkv + (row * tl.num_programs(1) * HEADS + heads) * HEAD_DIM + dims
    left = tl.load(source, mask=dims < HALF, other=0.0).to(tl.float32)
    right = tl.load(source + HALF, mask=dims < HALF, other=0.0).to(tl.float32)
    kv_heads = heads - NUM_HEADS
    if first < NUM_HEADS:
        if q_norm is not None:
            left, right = _norm_halves(left, right, q_left, q_right, eps, dtype, HALF)
        target = query + (row * NUM_HEADS + heads) * HEAD_DIM
        rotated = right * cosine + left * sine
        _store_halves(target, left * cosine - right * sine, rotated, dims, dtype, HALF)
        return
    if SHARE_KV or first >= NUM_HEADS + NUM_KV_HEADS:
        value_left, value_right = left, right
        if V_NORM:
            value_left, value_right = _norm_halves(left, right, 1.0, 1.0, eps, dtype, HALF)
        target = value_cache + place + kv_heads % NUM_KV_HEADS * head_stride
        _store_halves(target, value_left, value_right, dims, dtype, HALF)
    if key_cache is not None and first < NUM_HEADS + NUM_KV_HEADS:
        if k_norm is not None:
            left, right = _norm_halves(left, right, k_left, k_right, eps, dtype, HALF)
        target = key_cache + place + kv_heads * head_stride
        rotated = right * cosine + left * sine
        _store_halves(target, left * cosine - right * sine, rotated, dims, dtype, HALF)
