"""exp and log of float32 numbers, made of IEEE additions, products and quotients in a fixed order.

Libraries' own differ from each other in the last place. What is here gives the same bits in numpy,
in torch on any device and in Triton (cuda/draw/arithmetic.py repeats it, operation by operation,
with multiply-add fusion off), within two units in the last place. It knows nothing of logits.
"""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Floats = TypeVar("Floats", Tensor, NDArray[Any])


def _single(value: float) -> float:
    """The nearest float32."""
    return float(np.float32(value))


LOG2_E = _single(1.4426950408889634)
LN2_HIGH = 0.693145751953125  # 16 bits: its products with small integers are exact
LN2_LOW = _single(0.6931471805599453 - LN2_HIGH)
# Of the series of exp, from the seventh power down to the first: |x| <= ln(2) / 2.
EXP_SERIES = tuple(_single(1 / n) for n in (5040, 720, 120, 24, 6, 2, 1))
# log((1 + s) / (1 - s)) = 2 s + s (s^2 (2/3 + s^2 (2/5 + ...))), |s| < 0.172
LOG_SERIES = tuple(_single(2 / n) for n in (9, 7, 5, 3))
SQRT_HALF_BITS = 0x3F3504F3  # where numbers are cut into 2**e and a factor around 1
MANTISSA_BITS = 23
EXPONENT_BIAS = 127

WEIGHT_BITS = 40  # the likeliest token's weight is 2**40; a whole vocabulary sums to below 2**63
LOWEST_WEIGHED = -64.0  # exp of it, and of much larger numbers, weighs nothing
WEIGHTLESS = -27.75  # whatever is below weighs 0: log(2**-40) is -27.726

NUM_BITS = 31  # random bits behind each token's noise
LARGEST_BELOW_ONE = 1.0 - 2.0**-24
LOWEST_NOISE = -2.82  # -log(-log(2 ** -24)) = -2.811..., rounded away from zero


def weigh(scaled: Floats) -> Floats:
    """floor(exp(x) * 2**40) of x <= 0 as int64: weights whose sums are exact in any order."""
    x = _at_least(scaled, LOWEST_WEIGHED)
    power = _floor(x * LOG2_E + 0.5)
    rest = (x - power * LN2_HIGH) - power * LN2_LOW
    series = rest * EXP_SERIES[0] + EXP_SERIES[1]
    for coefficient in EXP_SERIES[2:]:
        series = series * rest + coefficient
    series = series * rest + 1.0
    exponent = _to_int(power) + (EXPONENT_BIAS + WEIGHT_BITS)
    return _to_long(series * _as_floats(exponent << MANTISSA_BITS))


def gumbel(bits: Floats) -> Floats:
    """Standard Gumbel noise, float32 and always finite, from uniform int32 in 0 .. 2**31 - 1."""
    # -log(-log(u)) with u = 1 - v: float32 is fine-grained near v = 0, where the large noise that
    # decides comes from; near u = 1 it would not be.
    v = (_to_float(bits) + 0.5) * 2.0**-NUM_BITS
    v = _at_most(v, LARGEST_BELOW_ONE)
    power, factor = _split(1.0 - v)
    over_one = _where(power == 0, -v, factor - 1.0)
    return -log(-_log_of_parts(power, over_one))


def log(x: Floats) -> Floats:
    """The logarithm of positive, normal numbers."""
    power, factor = _split(x)
    return _log_of_parts(power, factor - 1.0)


def _split(x: Floats) -> tuple[Floats, Floats]:
    """x = 2**power * factor, with the factor between sqrt(1/2) and sqrt(2)."""
    bits = _as_ints(x)
    power = (bits - SQRT_HALF_BITS) >> MANTISSA_BITS
    return power, _as_floats(bits - (power << MANTISSA_BITS))


def _log_of_parts(power: Floats, over_one: Floats) -> Floats:
    """log(2**power * (1 + over_one))."""
    s = over_one / (over_one + 2.0)
    square = s * s
    series = square * LOG_SERIES[0] + LOG_SERIES[1]
    for coefficient in LOG_SERIES[2:]:
        series = series * square + coefficient
    power = _to_float(power)
    return power * LN2_HIGH + ((s * 2.0 + s * (square * series)) + power * LN2_LOW)


# -- what numpy and torch call differently -------------------------------------------------------


def _as_ints(x: Floats) -> Floats:
    return x.view(torch.int32) if isinstance(x, Tensor) else x.view(np.int32)


def _as_floats(bits: Floats) -> Floats:
    return bits.view(torch.float32) if isinstance(bits, Tensor) else bits.view(np.float32)


def _to_float(x: Floats) -> Floats:
    return x.to(torch.float32) if isinstance(x, Tensor) else x.astype(np.float32)


def _to_int(x: Floats) -> Floats:
    return x.to(torch.int32) if isinstance(x, Tensor) else x.astype(np.int32)


def _to_long(x: Floats) -> Floats:
    return x.to(torch.int64) if isinstance(x, Tensor) else x.astype(np.int64)


def _floor(x: Floats) -> Floats:
    return x.floor() if isinstance(x, Tensor) else np.floor(x)


def _at_least(x: Floats, least: float) -> Floats:
    return x.clamp(min=least) if isinstance(x, Tensor) else np.maximum(x, np.float32(least))


def _at_most(x: Floats, most: float) -> Floats:
    return x.clamp(max=most) if isinstance(x, Tensor) else np.minimum(x, np.float32(most))


def _where(condition: Floats, left: Floats, right: Floats) -> Floats:
    if isinstance(condition, Tensor):
        return torch.where(condition, left, right)
    return np.where(condition, left, right)
