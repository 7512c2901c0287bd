"""A few rows times weights in few bits, in CUDA C++: int4, int8 and e4m3. CUDA only.

Linears for at most MAX_ROWS rows, and for one their norm before them. What the kernel does is said
in few_rows.cu; this launches it, as does experts/quantized_one_row.py.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from ctypes import c_float, c_int, c_uint64, c_void_p
from typing import NamedTuple

import torch
from torch import Tensor

from flashdraft.kernels.cuda import overlap
from flashdraft.kernels.cuda.driver import Kernel, can_compile
from flashdraft.kernels.cuda.plan import DeviceLimits
from flashdraft.kernels.cuda.quantized.few_rows_plan import (
    EARLY,
    Experts,
    FewPlan,
    Product,
    Sizes,
    describe_product,
    find_sizes,
    find_zero,
    plan_few,
)
from flashdraft.kernels.cuda.quantized.layout import Code, PackedWeight
from flashdraft.kernels.interface import Residual
from flashdraft.kernels.kinds import Activation

# Rows of x for which this is the way, at most 16. With more than one, Triton is faster at e4m3.
MAX_ROWS = {Code.INT4: 16, Code.INT8: 16, Code.FP8: 1}
MIN_VALUES = 1 << 25  # of a weight, for more than one row: measured with those of 31B, which have


class Routed(NamedTuple):
    """A router of the same row, by a norm of its own, and where its choice is written."""

    router: Tensor  # [experts, depth]
    norm: Tensor
    scale: Tensor  # [experts] float32, of shares
    chosen: Tensor  # [1, how many] int64
    shares: Tensor  # likewise, float32


class Normed(NamedTuple):
    """A row that is summed up, and normed, before it is multiplied."""

    residual: Residual
    norm: Tensor
    eps: float
    stream: Tensor  # where the sum is written
    routed: Routed | None = None

    @property
    def tensors(self) -> list[Tensor | None]:
        """As the kernel has them."""
        missing = [None] * (2 - len(self.residual.deltas))
        deltas = [delta for delta, _ in self.residual.deltas]
        norms = [norm for _, norm in self.residual.deltas]
        others = [self.residual.post, self.residual.scalar, self.stream]
        return [self.norm, *deltas, *missing, *norms, *missing, *others]

    def describe(self, product: Product) -> Product:
        """The product of such a row."""
        num_to_choose = 0 if self.routed is None else self.routed.chosen.numel()
        return product._replace(normed=1 + len(self.residual.deltas), num_to_choose=num_to_choose)


_NORMED = ("norm", "delta", "other", "delta_norm", "other_norm", "post", "scalar", "stream")
_ROUTED = ("router", "router_norm", "expert_scale", "choice", "choice_shares")


class _Work(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("x", "codes", "scale", "output", "parts", "arrivals")),
        *((name, c_void_p) for name in ("chosen", "shares")),
        ("expert_rows", c_uint64),
        *((name, c_int) for name in ("num_rows", "num_columns", "up_rows", "packed_rows")),
        *((name, c_int) for name in ("depth", "row_stride", "num_slices", "slice_steps")),
        *((name, c_int) for name in ("warp_units", "spare_units")),
        *((name, c_int) for name in ("expert_tiles", "expert_steps", "max_parts")),
        *((name, c_float) for name in ("zero", "eps")),
        *((name, c_void_p) for name in ("norm", "delta", "other", "delta_norm", "other_norm")),
        *((name, c_void_p) for name in ("post", "scalar", "stream", "router", "router_norm")),
        *((name, c_void_p) for name in ("expert_scale", "logits", "choice", "choice_shares")),
        *((name, c_int) for name in ("num_experts", "chooser")),
    ]


def multiply_few(
    x: Tensor,
    weight: PackedWeight,
    limits: DeviceLimits,
    arrivals: Tensor,
    activation: Activation | None = None,
) -> Tensor | None:
    """x [num_rows, depth] bfloat16 @ weight.T; `arrivals` as in dense.linear.multiply_rows.

    With an activation the weight is [gate | up] by its rows: the result is that of `Kernels.gated`.
    None where this is not the way to multiply.
    """
    if not beats_triton(x.shape[0], weight) or not is_readable(x):
        return None
    product = describe_product(weight, activation is not None)
    if product is None:
        return None
    plan = plan_few(x.shape[0], product, limits)
    return None if plan is None else launch(x, weight, product, plan, arrivals, activation)


def multiply_normed(
    residual: Residual,
    norm: Tensor,
    eps: float,
    weight: PackedWeight,
    limits: DeviceLimits,
    arrivals: Tensor,
    activation: Activation | None = None,
    routed: Routed | None = None,
) -> tuple[Tensor, Tensor] | None:
    """`Kernels.residual_linear` for one row; None where this is not the way."""
    x, num_deltas = residual.x, len(residual.deltas)
    if x.shape[0] != 1 or not beats_triton(1, weight) or not is_readable(x):
        return None
    if num_deltas > 2 or (residual.post is not None and num_deltas != 2):
        return None
    stream = torch.empty_like(x) if residual.deltas else x
    normed = Normed(residual, norm, eps, stream, routed)
    if not all(t is None or is_readable_row(t) for t in normed.tensors):
        return None
    product = describe_product(weight, activation is not None)
    if product is None:
        return None
    product = normed.describe(product)
    plan = plan_few(1, product, limits)
    if plan is None:
        return None
    return stream, launch(x, weight, product, plan, arrivals, activation, normed=normed)


def _load(
    plan: FewPlan, product: Product, activation: Activation | None, device: torch.device
) -> Kernel:
    flags = make_flags(product, plan, activation)
    return Kernel.load("quantized/few_rows.cu", "multiply_few", device, *flags.items())


def beats_triton(num_rows: int, weight: PackedWeight) -> bool:
    """Whether this is taken to be the faster way for so many rows: measured at 1 and 16 of them."""
    is_large = num_rows == 1 or math.prod(weight.shape) >= MIN_VALUES
    return 0 < num_rows <= MAX_ROWS.get(weight.code, 0) and is_large


def launch(
    x: Tensor,
    weight: PackedWeight,
    product: Product,
    plan: FewPlan,
    arrivals: Tensor,
    activation: Activation | None = None,
    experts: Experts | None = None,
    normed: Normed | None = None,
) -> Tensor:
    """A product on the current stream."""
    work, sizes, output, _parts = prepare(x, weight, product, plan, arrivals, experts, normed)
    _load(plan, product, activation, x.device).launch(
        plan.num_blocks + product.spare_blocks,
        32 * plan.warps,
        sizes.shared_bytes,
        work,
        overlap.can_overlap(x.device),
    )
    return output


def prepare(
    x: Tensor,
    weight: PackedWeight,
    product: Product,
    plan: FewPlan,
    arrivals: Tensor,
    experts: Experts | None = None,
    normed: Normed | None = None,
) -> tuple[_Work, Sizes, Tensor, Tensor]:
    """The kernel's argument, with what it points to besides its inputs."""
    sizes, num_rows = find_sizes(plan, product), 1 if product.experts else x.shape[0]
    num_warps = plan.num_blocks // plan.num_slices * plan.warps
    assert product.num_steps % plan.num_slices == 0 and num_rows <= plan.stored_rows
    assert plan.num_blocks % plan.num_slices == 0
    num_units = sizes.num_tiles * sizes.slice_steps
    assert 0 < num_warps <= num_units < 1 << 31
    assert 4 * arrivals.numel() >= sizes.arrivals_bytes and x.stride(1) == 1
    output = torch.empty(num_rows, product.columns, device=x.device, dtype=x.dtype)
    parts = torch.empty(sizes.parts_bytes, device=x.device, dtype=torch.uint8)
    work = _Work(
        x.data_ptr(),
        weight.codes.data_ptr(),
        weight.scale.values.data_ptr(),
        output.data_ptr(),
        parts.data_ptr(),
        arrivals.data_ptr(),
        expert_rows=weight.num_steps * weight.packed_rows,
        num_rows=num_rows,
        num_columns=product.columns,
        up_rows=product.up_rows,
        packed_rows=weight.packed_rows,
        depth=weight.shape[-1],
        row_stride=x.stride(0),
        num_slices=plan.num_slices,
        slice_steps=sizes.slice_steps,
        warp_units=num_units // num_warps,
        spare_units=num_units % num_warps,
        expert_tiles=product.expert_columns // (plan.tiles * product.unit_columns),
        expert_steps=product.expert_steps,
        max_parts=sizes.max_parts,
        zero=find_zero(weight),
    )
    if experts is not None:
        _point(work, ("chosen", "shares"), (experts.chosen, experts.shares))
    if normed is not None:
        work.eps = normed.eps
        _point(work, _NORMED, normed.tensors)
        if normed.routed is not None:
            _point(work, _ROUTED, normed.routed)
            work.num_experts, work.chooser = len(normed.routed.router), plan.num_blocks
            place = -(-sizes.arrivals_bytes // 8) * 8  # behind the boxes of sums
            assert 4 * arrivals.numel() >= place + 8 * work.num_experts
            # What the block has that chooses: the logits, and of each choice three words.
            assert 4 * work.num_experts + 12 * product.num_to_choose <= sizes.shared_bytes
            work.logits = arrivals.data_ptr() + place
    return work, sizes, output, parts


def _point(work: _Work, names: Sequence[str], tensors: Sequence[Tensor | None]) -> None:
    for name, tensor in zip(names, tensors, strict=True):
        setattr(work, name, None if tensor is None else tensor.data_ptr())


def make_flags(product: Product, plan: FewPlan, activation: Activation | None) -> dict[str, int]:
    """What the kernel is compiled with."""
    return {
        "CODE": int(product.code),
        "WIDTH": product.width,
        "SCALES": product.num_scales,
        "SCALE": product.scale,
        "ROWS": plan.stored_rows,
        "GATED": int(product.up_rows > 0),
        "GELU": int(activation is Activation.GELU_TANH),
        "EXPERTS": product.experts,
        "SETTLED": int(product.is_settled),
        "NORMED": product.normed,
        "CHOSEN": product.num_to_choose,
        "CHUNKS": -(-product.num_steps * product.step // (256 * plan.warps))
        if product.normed
        else 1,
        "TILES": plan.tiles,
        "WARPS": plan.warps,
        "DEPTH": plan.depth,
        "EARLY": min(EARLY, plan.depth - 1),
        "BLOCKS": 1,
        "JOB_PIECES": plan.job_pieces,
        "SLICED": int(plan.num_slices > 1),
    }


def is_readable(x: Tensor) -> bool:
    """Whether rows can be read sixteen bytes at a time, here and on this device."""
    is_aligned = x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0
    return x.dtype is torch.bfloat16 and is_aligned and can_compile(x.device)


def is_readable_row(tensor: Tensor) -> bool:
    """Likewise all of it, one value or a row."""
    is_one = tensor.numel() == 1 and tensor.dtype is torch.bfloat16
    return is_one or (tensor.is_contiguous() and is_readable(tensor.view(1, -1)))
