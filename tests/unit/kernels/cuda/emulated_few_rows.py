"""cuda/quantized/few_rows.cu on a CPU."""

from __future__ import annotations

import ctypes
import math

import torch
from torch import Tensor

from flashdraft.kernels.cuda.quantized.few_rows import Normed, make_flags, prepare
from flashdraft.kernels.cuda.quantized.few_rows_plan import Experts, FewPlan, describe_product
from flashdraft.kernels.cuda.quantized.layout import PackedWeight
from flashdraft.kernels.kinds import Activation
from tests.unit.kernels.cuda.emulated import build


def multiply(
    x: Tensor,
    weight: PackedWeight,
    plan: FewPlan,
    activation: Activation | None = None,
    experts: Experts | None = None,
    normed: Normed | None = None,
) -> Tensor:
    """What `launch` launches."""
    product = describe_product(weight, activation is not None, experts)
    assert product is not None
    if normed is not None:
        product = normed.describe(product)
    arrivals = torch.zeros(1 << 16, dtype=torch.int32)
    work, sizes, output, parts = prepare(x, weight, product, plan, arrivals, experts, normed)
    output.fill_(math.nan)  # until it is written
    guarded = torch.full((parts.numel() + 4096,), 255, dtype=torch.uint8)
    work.parts = guarded.data_ptr()
    flags = make_flags(product, plan, activation)
    num_blocks = plan.num_blocks + product.spare_blocks
    build("few_rows", *flags.items()).run(ctypes.byref(work), num_blocks, sizes.shared_bytes)
    assert not arrivals.any() and bool((guarded[parts.numel() :] == 255).all())
    return output
