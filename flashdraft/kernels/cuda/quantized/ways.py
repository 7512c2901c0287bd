"""Which of the faster ways a product with a weight in few bits goes, by its rows. CUDA only."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from flashdraft.kernels.cuda.plan import DeviceLimits
from flashdraft.kernels.cuda.quantized.activations import round_rows
from flashdraft.kernels.cuda.quantized.coded_rows import multiply_coded
from flashdraft.kernels.cuda.quantized.few_rows import multiply_few
from flashdraft.kernels.cuda.quantized.layout import PackedWeight
from flashdraft.kernels.cuda.quantized.many_rows import multiply_many
from flashdraft.kernels.kinds import Activation


class Multiplied(NamedTuple):
    """A product; where it is None, the rows for another way to make it."""

    product: Tensor | None
    rows: Tensor


def multiply_fast(
    x: Tensor,
    weight: PackedWeight,
    arrivals: Tensor,
    limits: DeviceLimits,
    exact: bool,
    activation: Activation | None,
) -> Multiplied:
    """x @ weight.T, or what comes instead of x.

    Where activations have 8 bits, any number of rows is rounded alike: codes are multiplied, or
    floats of the same values. So a product does not depend on how many rows there are, but for the
    order of its sums, which `exact` leaves to ways that keep it.
    """
    if weight.activations is not None:
        found = None if exact else multiply_coded(x, weight, limits, arrivals, activation)
        if found is not None:
            return Multiplied(found, x)
        x = round_rows(x, weight)
    for way in () if exact else (multiply_few, multiply_many):
        if (found := way(x, weight, limits, arrivals, activation)) is not None:
            return Multiplied(found, x)
    return Multiplied(None, x)
