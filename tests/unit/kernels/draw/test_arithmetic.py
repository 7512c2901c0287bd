"""exp and log of our own: accurate, and the same bits in numpy and in torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from flashdraft.kernels.draw.arithmetic import (
    LOWEST_NOISE,
    WEIGHTLESS,
    gumbel,
    log,
    weigh,
)

Array = np.ndarray[Any, Any]


def ulps(found: Array, exact: Array) -> float:
    """The largest distance in units in the last place of float32."""
    return float(np.max(np.abs(found - exact) / np.spacing(np.abs(exact).astype(np.float32))))


def all_kinds_of_bits() -> Array:
    random = np.random.default_rng(0)
    edges = np.concatenate([np.arange(4000), 2**31 - 1 - np.arange(4000)])
    powers = [2**n + offset for n in range(2, 31) for offset in (-1, 0, 1)]
    some = random.integers(0, 2**31, 500_000)
    return np.concatenate([edges, powers, some]).astype(np.int32)


def test_gumbel_noise_is_within_two_units_in_the_last_place() -> None:
    bits = all_kinds_of_bits()
    v = ((bits.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-31)).astype(np.float64)
    exact = -np.log1p(-np.minimum(v, 1 - 2.0**-24))
    found = gumbel(bits)
    assert found.dtype == np.float32
    # Two logarithms: the outer one turns the inner one's relative error into an absolute one.
    errors = np.abs(found + np.log(exact))
    spacing = np.spacing(np.maximum(np.abs(found), np.float32(1.0)))
    assert np.max(errors / spacing) < 3.0
    assert found.min() >= LOWEST_NOISE and found.max() < 22.3
    in_order = np.sort(bits)
    assert np.all(np.diff(gumbel(in_order)) <= 1e-6)


def test_the_logarithm_is_within_two_units_in_the_last_place() -> None:
    random = np.random.default_rng(1)
    x = np.exp(random.uniform(-22, 3, 500_000)).astype(np.float32)
    x = np.concatenate([x, 1 + random.normal(size=100_000).astype(np.float32) * 1e-3])
    exact = np.log(x.astype(np.float64))
    assert ulps(log(x)[exact != 0], exact[exact != 0]) < 2.0
    assert log(np.ones(1, dtype=np.float32))[0] == 0.0


def test_weights_are_within_two_units_in_the_last_place() -> None:
    random = np.random.default_rng(2)
    x = np.concatenate([random.uniform(-30, 0, 500_000), -random.exponential(size=100_000)])
    x = x.astype(np.float32)
    exact = np.exp(x.astype(np.float64)) * 2.0**40
    weights = weigh(x)
    assert weights.dtype == np.int64
    far = exact >= 2.0**25  # below, the floor is what one sees
    assert ulps(weights[far].astype(np.float64), exact[far]) < 2.0
    assert np.all(np.abs(weights - exact) <= 1 + exact * 2.0**-22)


def test_the_ends_of_the_weights() -> None:
    x = np.array([0.0, -0.0, -np.inf, -1e38, -64.0, WEIGHTLESS, -27.8], dtype=np.float32)
    assert weigh(x).tolist() == [2**40, 2**40, 0, 0, 0, 0, 0]
    assert weigh(np.array([-27.7], dtype=np.float32))[0] == 1


@pytest.mark.parametrize("count", [1, 7, 100_003])
def test_torch_and_numpy_give_the_same_bits(count: int) -> None:
    random = np.random.default_rng(count)
    bits = random.integers(0, 2**31, count).astype(np.int32)
    assert np.array_equal(gumbel(torch.from_numpy(bits)).numpy(), gumbel(bits))
    x = -random.exponential(4.0, count).astype(np.float32)
    assert np.array_equal(weigh(torch.from_numpy(x)).numpy(), weigh(x))
