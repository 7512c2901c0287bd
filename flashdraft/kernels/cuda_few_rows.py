"""A few rows times weights in few bits, in CUDA C++: int4, int8 and e4m3. CUDA only.

Linears for at most MAX_ROWS rows, their norm before them for one, and a mixture of experts for one.
What the kernel does is said in cuda/few_rows.cu; this launches it.
"""

from __future__ import annotations

import ctypes
import math
from ctypes import c_float, c_int, c_uint64, c_void_p
from typing import NamedTuple

import torch
from torch import Tensor

from flashdraft.kernels import triton_launch
from flashdraft.kernels.cuda_driver import Kernel, can_compile
from flashdraft.kernels.cuda_few_rows_plan import (
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
from flashdraft.kernels.interface import Activation, Residual
from flashdraft.kernels.triton_plan import DeviceLimits
from flashdraft.kernels.triton_quantized_layout import Code, PackedWeight

# Rows of x for which this is the way, at most 16. With more than one, Triton is faster at e4m3, and
# at weights with fewer values.
MAX_ROWS = {Code.INT4: 16, Code.INT8: 16, Code.FP8: 1}
MIN_VALUES = 1 << 25


class Normed(NamedTuple):
    """A row that is summed up, and normed, before it is multiplied."""

    residual: Residual
    norm: Tensor
    eps: float
    stream: Tensor  # where the sum is written

    @property
    def tensors(self) -> list[Tensor | None]:
        """As the kernel has them."""
        missing = [None] * (2 - len(self.residual.deltas))
        deltas = [delta for delta, _ in self.residual.deltas]
        norms = [norm for _, norm in self.residual.deltas]
        others = [self.residual.post, self.residual.scalar, self.stream]
        return [self.norm, *deltas, *missing, *norms, *missing, *others]


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
        *((name, c_void_p) for name in ("post", "scalar", "stream")),
    ]


def multiply_few(
    x: Tensor,
    weight: PackedWeight,
    limits: DeviceLimits,
    arrivals: Tensor,
    activation: Activation | None = None,
) -> Tensor | None:
    """x [num_rows, depth] bfloat16 @ weight.T; `arrivals` as in triton_linear.multiply_rows.

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
) -> tuple[Tensor, Tensor] | None:
    """`Kernels.residual_linear` for one row; None where this is not the way."""
    x, num_deltas = residual.x, len(residual.deltas)
    if x.shape[0] != 1 or not beats_triton(1, weight) or not is_readable(x):
        return None
    if num_deltas > 2 or (residual.post is not None and num_deltas != 2):
        return None
    stream = torch.empty_like(x) if residual.deltas else x
    normed = Normed(residual, norm, eps, stream)
    if not all(t is None or _is_readable_row(t) for t in normed.tensors):
        return None
    product = describe_product(weight, activation is not None)
    if product is None:
        return None
    product = product._replace(normed=1 + num_deltas)
    plan = plan_few(1, product, limits)
    if plan is None:
        return None
    return stream, launch(x, weight, product, plan, arrivals, activation, normed=normed)


def _load(
    plan: FewPlan, product: Product, activation: Activation | None, device: torch.device
) -> Kernel:
    flags = make_flags(product, plan, activation)
    return Kernel.load("few_rows.cu", "multiply_few", device, *flags.items())


def beats_triton(num_rows: int, weight: PackedWeight) -> bool:
    """Whether this is taken to be the faster way for so many rows: measured at 1 and 16 of them."""
    is_large = num_rows == 1 or math.prod(weight.shape) >= MIN_VALUES
    return 0 < num_rows <= MAX_ROWS.get(weight.code, 0) and is_large


def mix_one(
    x: Tensor,
    gate_up: PackedWeight,
    down: PackedWeight,
    experts: Experts,
    activation: Activation,
    limits: DeviceLimits,
    arrivals: Tensor,
) -> Tensor | None:
    """`Kernels.experts` for one row, in two launches; None where this is not the way."""
    chosen, shares, _ = experts
    if x.shape[0] != 1 or not beats_triton(1, gate_up) or not is_readable(x):
        return None
    assert chosen.is_contiguous() and chosen.dtype is torch.int64
    assert shares is not None and shares.is_contiguous() and shares.dtype is torch.float32
    # The second of the launches: they were chosen before the first one.
    ups, downs = experts._replace(shares=None), experts._replace(are_settled=True)
    first, second = describe_product(gate_up, True, ups), describe_product(down, False, downs)
    if first is None or second is None:
        return None
    plans = plan_few(1, first, limits), plan_few(1, second, limits)
    if plans[0] is None or plans[1] is None:
        return None
    between = launch(x, gate_up, first, plans[0], arrivals, activation, ups)
    between = between.view(chosen.numel(), -1)
    return launch(between, down, second, plans[1], arrivals, experts=downs)


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
        plan.num_blocks,
        32 * plan.warps,
        sizes.shared_bytes,
        work,
        triton_launch.can_overlap(x.device),
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
    shares = None if experts is None or experts.shares is None else experts.shares
    work = _Work(
        x.data_ptr(),
        weight.codes.data_ptr(),
        weight.scale.values.data_ptr(),
        output.data_ptr(),
        parts.data_ptr(),
        arrivals.data_ptr(),
        None if experts is None else experts.chosen.data_ptr(),
        None if shares is None else shares.data_ptr(),
        weight.num_steps * weight.packed_rows,
        num_rows,
        product.columns,
        product.up_rows,
        weight.packed_rows,
        weight.shape[-1],
        x.stride(0),
        plan.num_slices,
        sizes.slice_steps,
        *divmod(num_units, num_warps),
        product.expert_columns // (plan.tiles * product.unit_columns),
        product.expert_steps,
        sizes.max_parts,
        find_zero(weight),
        *(() if normed is None else (normed.eps, *map(_address, normed.tensors))),
    )
    return work, sizes, output, parts


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


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


def _is_readable_row(tensor: Tensor) -> bool:
    """Likewise all of it, one value or a row."""
    is_one = tensor.numel() == 1 and tensor.dtype is torch.bfloat16
    return is_one or (tensor.is_contiguous() and is_readable(tensor.view(1, -1)))
