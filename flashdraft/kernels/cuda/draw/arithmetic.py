# Triton's decorators carry no types that mypy can see.
# mypy: disallow-untyped-decorators=False
"""kernels/draw/arithmetic.py and noise.py in Triton, operation by operation.

The bits are the same only where nothing is fused: every kernel that calls these is launched with
`UNFUSED`. Functions take tensors of any shape, scalars too.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from flashdraft.kernels.draw import arithmetic, noise

UNFUSED: dict[str, Any] = {"enable_fp_fusion": False}

LOG2_E = tl.constexpr(arithmetic.LOG2_E)
LN2_HIGH = tl.constexpr(arithmetic.LN2_HIGH)
LN2_LOW = tl.constexpr(arithmetic.LN2_LOW)
EXP_7, EXP_6, EXP_5, EXP_4, EXP_3, EXP_2, EXP_1 = map(tl.constexpr, arithmetic.EXP_SERIES)
LOG_9, LOG_7, LOG_5, LOG_3 = map(tl.constexpr, arithmetic.LOG_SERIES)
SQRT_HALF_BITS = tl.constexpr(arithmetic.SQRT_HALF_BITS)
MANTISSA_BITS = tl.constexpr(arithmetic.MANTISSA_BITS)
WEIGHT_EXPONENT = tl.constexpr(arithmetic.EXPONENT_BIAS + arithmetic.WEIGHT_BITS)
LOWEST_WEIGHED = tl.constexpr(arithmetic.LOWEST_WEIGHED)
UNIT = tl.constexpr(2.0**-arithmetic.NUM_BITS)
LARGEST_BELOW_ONE = tl.constexpr(arithmetic.LARGEST_BELOW_ONE)

INCREMENT = tl.constexpr(noise.INCREMENT)
MULTIPLIER_1 = tl.constexpr(noise.MULTIPLIER_1)
MULTIPLIER_2 = tl.constexpr(noise.MULTIPLIER_2)
LOW_BITS = tl.constexpr(noise.LOW_BITS)
LOW_34 = tl.constexpr(2**34 - 1)
LOW_37 = tl.constexpr(2**37 - 1)
LOW_33 = tl.constexpr(2**33 - 1)

LARGEST_ID = tl.constexpr(2**31 - 1)
NOTHING = tl.constexpr(-(2**63))  # below every packed token


@triton.jit
def weigh(scaled: tl.tensor) -> tl.tensor:
    """floor(exp(x) * 2**40) of x <= 0, int64."""
    x = tl.maximum(scaled, LOWEST_WEIGHED)
    power = tl.floor(x * LOG2_E + 0.5)
    rest = (x - power * LN2_HIGH) - power * LN2_LOW
    series = rest * EXP_7 + EXP_6
    series = series * rest + EXP_5
    series = series * rest + EXP_4
    series = series * rest + EXP_3
    series = series * rest + EXP_2
    series = series * rest + EXP_1
    series = series * rest + 1.0
    exponent = power.to(tl.int32) + WEIGHT_EXPONENT
    return (series * (exponent << MANTISSA_BITS).to(tl.float32, bitcast=True)).to(tl.int64)


@triton.jit
def _log_of_parts(power: tl.tensor, over_one: tl.tensor) -> tl.tensor:
    s = tl.div_rn(over_one, over_one + 2.0)
    square = s * s
    series = square * LOG_9 + LOG_7
    series = series * square + LOG_5
    series = series * square + LOG_3
    power = power.to(tl.float32)
    return power * LN2_HIGH + ((s * 2.0 + s * (square * series)) + power * LN2_LOW)


@triton.jit
def _power_of(x: tl.tensor) -> tl.tensor:
    return (x.to(tl.int32, bitcast=True) - SQRT_HALF_BITS) >> MANTISSA_BITS


@triton.jit
def _factor_of(x: tl.tensor, power: tl.tensor) -> tl.tensor:
    bits = x.to(tl.int32, bitcast=True) - (power << MANTISSA_BITS)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def gumbel(bits: tl.tensor) -> tl.tensor:
    """Standard Gumbel noise from uniform int32 in 0 .. 2**31 - 1."""
    v = (bits.to(tl.float32) + 0.5) * UNIT
    v = tl.minimum(v, LARGEST_BELOW_ONE)
    u = 1.0 - v
    power = _power_of(u)
    over_one = tl.where(power == 0, -v, _factor_of(u, power) - 1.0)
    x = -_log_of_parts(power, over_one)
    power = _power_of(x)
    return -_log_of_parts(power, _factor_of(x, power) - 1.0)


@triton.jit
def noise_key(start: tl.tensor, position: tl.tensor) -> tl.tensor:
    """The key of one position, from what its seed contributes; int64."""
    x = start + position * INCREMENT
    x = (x ^ ((x >> 30) & LOW_34)) * MULTIPLIER_1
    x = (x ^ ((x >> 27) & LOW_37)) * MULTIPLIER_2
    return x ^ ((x >> 31) & LOW_33)


@triton.jit
def random_bits(key: tl.tensor, ids: tl.tensor) -> tl.tensor:
    """The random bits of tokens (int32) under a key."""
    x = (ids >> 1).to(tl.int64) * INCREMENT + key
    x = (x ^ (x >> 30)) * MULTIPLIER_1
    x = (x ^ (x >> 27)) * MULTIPLIER_2
    x = x ^ (x >> 32)
    return (tl.where((ids & 1) != 0, x >> 32, x) & LOW_BITS).to(tl.int32)


@triton.jit
def order(x: tl.tensor) -> tl.tensor:
    """An int32 that is ordered as the float32 is; there is one zero, and NaN has no place."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def value_of(key: tl.tensor) -> tl.tensor:
    """The float32 that `order` made a key of."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def pack(key: tl.tensor, ids: tl.tensor) -> tl.tensor:
    """A token with its key as one int64: of two the larger comes first, the lower id of equals."""
    return (key.to(tl.int64) << 32) | (ids ^ LARGEST_ID).to(tl.int64)


@triton.jit
def key_of(packed: tl.tensor) -> tl.tensor:
    return (packed >> 32).to(tl.int32)


@triton.jit
def id_of(packed: tl.tensor) -> tl.tensor:
    return (packed & LARGEST_ID).to(tl.int32) ^ LARGEST_ID
