"""The noise: the same bits however they are asked for, and as random as one could wish."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from flashdraft.kernels.draw.arithmetic import LOWEST_NOISE, gumbel
from flashdraft.kernels.draw.noise import (
    host_keys_from,
    host_random_bits,
    host_random_bits_at,
    keys_from,
    noise_key,
    noise_start,
    random_bits,
    random_bits_at,
)

CPU = torch.device("cpu")
SEEDS = [0, 1, -1, 2**63 - 1, -(2**63)]


def test_keys_are_the_same_by_every_way() -> None:
    starts = np.array([noise_start(seed) for seed in SEEDS])
    for position in (0, 1, 262143):
        positions = np.full(len(SEEDS), position)
        expected = [noise_key(seed, position) for seed in SEEDS]
        assert host_keys_from(starts, positions).tolist() == expected
        assert keys_from(torch.from_numpy(starts), torch.from_numpy(positions)).tolist() == expected


def test_bits_of_some_tokens_are_those_of_all() -> None:
    keys, ids = np.array([noise_key(3, n) for n in range(50)]), np.arange(50) * 7 % 101
    expected = [
        host_random_bits(int(key), 101)[token] for key, token in zip(keys, ids, strict=True)
    ]
    assert host_random_bits_at(keys, ids).tolist() == expected
    there = torch.from_numpy(keys).unsqueeze(1)
    rows = random_bits(there, 101, CPU)
    assert rows[torch.arange(50), torch.from_numpy(ids)].tolist() == expected
    some = torch.from_numpy(ids).repeat(50, 1)
    assert torch.equal(random_bits_at(there, some), rows.gather(1, some))


def signed(x: int) -> int:
    x &= 2**64 - 1
    return x - 2**64 if x >= 2**63 else x


def reference_bits(key: int, token: int) -> int:
    """The hash in Python's unbounded integers, cut back to 64 bits by hand."""
    x = signed(key + (token // 2) * 0x9E3779B97F4A7C15)
    x = signed((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9)
    x = signed((x ^ (x >> 27)) * 0x94D049BB133111EB)
    x ^= x >> 32
    return (x >> (32 * (token % 2))) & (2**31 - 1)


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63)])
@pytest.mark.parametrize("position", [0, 1, 262143])
def test_bits_wrap_like_64_bit_integers_everywhere(seed: int, position: int) -> None:
    key = noise_key(seed, position)
    assert -(2**63) <= key < 2**63
    expected = [reference_bits(key, token) for token in range(101)]
    assert random_bits(key, 101, CPU).tolist() == expected
    assert host_random_bits(key, 101).tolist() == expected
    some = np.array([100, 3, 3, 0, 57])
    assert host_random_bits_at(key, some).tolist() == [expected[i] for i in some]


def test_noise_is_finite_at_the_extremes() -> None:
    bits = torch.tensor([0, 1, 2**24, 2**31 - 2, 2**31 - 1], dtype=torch.int32)
    values = gumbel(bits)
    assert torch.isfinite(values).all()
    assert values.tolist() == sorted(values.tolist(), reverse=True)
    assert values[-1] >= LOWEST_NOISE and values[0] > 22
    assert gumbel(bits.numpy()).tolist() == values.tolist()


def test_keys_differ_between_seeds_and_positions() -> None:
    keys = {noise_key(seed, position) for seed in range(-100, 100) for position in range(200)}
    assert len(keys) == 200 * 200


def uniform_streams() -> dict[str, np.ndarray[Any, Any]]:
    """Uniforms along token ids, along positions and along seeds."""
    count = 20_000
    along_ids = host_random_bits(noise_key(3, 11), 3 * count)
    token = np.array([17])
    along_positions = [host_random_bits_at(noise_key(5, p), token)[0] for p in range(count)]
    along_seeds = [host_random_bits_at(noise_key(s, 9), token)[0] for s in range(count)]
    streams = {"ids": along_ids, "positions": along_positions, "seeds": along_seeds}
    return {name: np.asarray(bits) / 2.0**31 for name, bits in streams.items()}


def chi_square(counts: np.ndarray[Any, Any]) -> float:
    """Standard deviations by which the statistic exceeds its mean under uniformity."""
    expected = counts.sum() / counts.size
    statistic = ((counts - expected) ** 2 / expected).sum()
    degrees = counts.size - 1
    return float((statistic - degrees) / math.sqrt(2 * degrees))


def test_noise_is_uniform_and_uncorrelated() -> None:
    streams = uniform_streams()
    for name, u in streams.items():
        assert abs(chi_square(np.histogram(u, 256, (0, 1))[0])) < 4.5, name
        for lag in (1, 2, 3, 64):  # lag 1 pairs the two halves of one hash
            square = np.histogram2d(u[:-lag], u[lag:], 16, ((0, 1), (0, 1)))[0]
            assert abs(chi_square(square)) < 4.5, (name, lag)
            correlation = np.corrcoef(u[:-lag], u[lag:])[0, 1]
            assert abs(correlation) < 4.5 / math.sqrt(len(u)), (name, lag)
    # Rows of neighbouring positions and seeds have nothing to do with each other.
    base = host_random_bits(noise_key(0, 0), 60_000)
    for key in (noise_key(0, 1), noise_key(1, 0), noise_key(-1, 0), noise_key(0, 2)):
        other = host_random_bits(key, 60_000)
        assert abs(np.corrcoef(base, other)[0, 1]) < 4.5 / math.sqrt(60_000)


def test_noise_has_the_moments_of_a_gumbel() -> None:
    values = gumbel(random_bits(noise_key(1, 2), 200_000, CPU)).double()
    deviation = math.pi / math.sqrt(6)
    assert abs(values.mean() - 0.5772157) < 4.5 * deviation / math.sqrt(200_000)
    assert abs(values.var() - deviation**2) < 0.05
