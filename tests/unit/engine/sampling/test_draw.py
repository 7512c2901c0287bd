"""The noise and the draw: hash quality, exact distributions, and two implementations that agree."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from flashdraft.core import SamplingParams
from flashdraft.engine.sampling.draw import RowSettings, draw_on_device, draw_on_host, draw_rows
from flashdraft.engine.sampling.noise import (
    LOWEST_NOISE,
    gumbel,
    host_gumbel,
    host_random_bits,
    host_random_bits_at,
    keys_from,
    noise,
    noise_key,
    noise_start,
    random_bits,
)

CPU = torch.device("cpu")

SETTINGS: list[dict[str, Any]] = [
    {},
    {"top_p": 0.8},
    {"top_k": 3},
    {"min_p": 0.15},
    {"top_p": 0.7, "top_k": 5, "min_p": 0.02},
]


def random_rows(num_rows: int, vocab_size: int, seed: int, spread: float = 3.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, vocab_size, generator=generator) * spread


# -- the noise -----------------------------------------------------------------------------------


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
    assert np.allclose(host_gumbel(bits.numpy()), values.numpy(), rtol=1e-5)


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
    values = noise(1, 2, 200_000, CPU).double()
    deviation = math.pi / math.sqrt(6)
    assert abs(values.mean() - 0.5772157) < 4.5 * deviation / math.sqrt(200_000)
    assert abs(values.var() - deviation**2) < 0.05


# -- the draw ------------------------------------------------------------------------------------


def naive_distribution(row: list[float], params: SamplingParams) -> list[float]:
    """What the draw should follow, by the book: temperature, min-p, top-k, top-p."""
    peak = max(row)
    p = [math.exp((x - peak) / params.temperature) for x in row]
    p = [x if x >= params.min_p * max(p) else 0.0 for x in p]
    order = sorted(range(len(p)), key=lambda i: (-p[i], i))
    if params.top_k:
        for i in order[params.top_k :]:
            p[i] = 0.0
    total, reached = sum(p), 0.0
    for i in order:
        if reached >= params.top_p * total:
            p[i] = 0.0
        reached += p[i]
    return [x / sum(p) for x in p]


@pytest.mark.parametrize(
    ("temperature", "setting"),
    [(t, setting) for t in (0.5, 1.0, 1.5) for setting in SETTINGS[:4]] + [(1.0, SETTINGS[4])],
)
def test_draws_follow_the_exact_distribution(temperature: float, setting: dict[str, Any]) -> None:
    """Total variation ≤ 0.01 + sampling error, E|TV| ≤ ½ √((vocab - 1) / draws)."""
    params = SamplingParams(temperature=temperature, **setting)
    row, num_draws = [1.1, -0.4, 2.0, 0.3, 1.9, -2.0, 0.9, 1.0], 5000
    exact = naive_distribution(row, params)
    logits = np.array(row, dtype=np.float32)
    counts = [0] * len(row)
    for n in range(num_draws):
        counts[draw_on_host(logits, params, noise_key(n % 100, n // 100))] += 1
    distance = sum(abs(c / num_draws - p) for c, p in zip(counts, exact, strict=True)) / 2
    assert distance <= 0.01 + 0.5 * math.sqrt((len(row) - 1) / num_draws)
    assert all(c == 0 for c, p in zip(counts, exact, strict=True) if p == 0.0)


@pytest.mark.parametrize("setting", [*SETTINGS, {"top_p": 0.99}, {"top_k": 400, "top_p": 0.5}])
def test_host_and_device_draw_the_same_token(setting: dict[str, Any]) -> None:
    for n, row in enumerate(random_rows(60, 3001, seed=1)):
        row[::7] = -math.inf
        params = SamplingParams(temperature=(0.5, 1.0, 3.0)[n % 3], **setting)
        key = noise_key(n, 40 + n)
        assert draw_on_host(row.numpy(), params, key) == int(draw_on_device(row, params, key))


def test_a_draw_is_gumbel_max_over_the_whole_vocabulary() -> None:
    """The host leaves out only tokens that cannot win, also in flat and in steep rows."""
    for spread in (0.0, 0.3, 3.0, 30.0):
        for n, row in enumerate(random_rows(100, 2000, seed=2, spread=spread)):
            plain = (row - row.max()) / 0.8 + noise(n, 5, 2000, CPU)
            params = SamplingParams(temperature=0.8)
            assert draw_on_host(row.numpy(), params, noise_key(n, 5)) == int(plain.argmax())


@pytest.mark.parametrize(
    ("setting", "kept"),
    [
        ({"top_k": 2}, {0, 2}),  # of the three equal second bests the first
        ({"top_k": 100}, {0, 1, 2, 3, 4}),
        ({"top_p": 1e-9}, {2}),
        ({"top_p": 0.5}, {0, 2}),
        ({"min_p": 1.0}, {2}),
        ({"min_p": 0.5}, {0, 2, 3, 4}),
        ({"top_k": 3, "top_p": 0.74}, {0, 2}),
    ],
)
def test_filters_break_ties_by_the_lower_id(setting: dict[str, Any], kept: set[int]) -> None:
    row = torch.log(torch.tensor([2.0, 1.0, 4.0, 2.0, 2.0]))
    params = SamplingParams(temperature=1.0, **setting)
    keys = [noise_key(0, position) for position in range(400)]
    assert {draw_on_host(row.numpy(), params, key) for key in keys} == kept
    assert {int(draw_on_device(row, params, key)) for key in keys} == kept


def test_top_p_on_a_flat_row_keeps_the_first_ids() -> None:
    params = SamplingParams(temperature=1.0, top_p=0.25)
    row = np.zeros(1000, dtype=np.float32)
    drawn = {draw_on_host(row, params, noise_key(0, n)) for n in range(300)}
    assert max(drawn) < 250 and len(drawn) > 100


@pytest.mark.parametrize("seed", range(4))
def test_many_rows_are_drawn_as_each_alone(seed):
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(200, 90, generator=generator) * 3).round(decimals=1)  # with ties
    settings = [
        SamplingParams(temperature=1.0, top_k=7),
        SamplingParams(temperature=0.4, top_k=30, top_p=0.8),
        SamplingParams(temperature=1.5, top_k=90, top_p=0.95, min_p=0.02),
        SamplingParams(temperature=0.0),
    ]
    params = [settings[row % 4] for row in range(200)]
    columns = list(zip(*(RowSettings.columns(one, 90) for one in params), strict=True))
    keys = [noise_key(seed, row) for row in range(200)]
    rows = RowSettings(
        torch.tensor(columns[0]),
        torch.tensor(columns[1]),
        torch.tensor(columns[2], dtype=torch.float64),
        torch.tensor(columns[3]),
        torch.tensor(keys),
    )
    expected = [
        int(draw_on_device(logits[row], params[row], keys[row]))
        if params[row].temperature
        else int(logits[row].argmax())
        for row in range(200)
    ]
    assert draw_rows(logits, rows, 90).tolist() == expected
    # where fewer are kept, rows that filter nothing are drawn from all
    free = rows._replace(top_k=torch.full((200,), 90), top_p=torch.ones(200).double())
    free = free._replace(least=torch.full((200,), -torch.inf))
    assert draw_rows(logits, free, 30).tolist() == draw_rows(logits, free, None).tolist()
    starts, positions = torch.full((200,), noise_start(seed)), torch.arange(200)
    assert keys_from(starts, positions).tolist() == keys


def test_a_row_without_a_finite_maximum_draws_nothing():
    logits = torch.zeros(3, 5)
    logits[0, 2], logits[1] = float("nan"), float("-inf")
    ones = torch.ones(3)
    rows = RowSettings(ones, torch.full((3,), 5), ones.double(), -torch.inf * ones, ones.long())
    drawn = draw_rows(logits, rows, 5).tolist()
    assert drawn[:2] == [-1, -1] and 0 <= drawn[2] < 5
    assert draw_rows(logits, rows, None).tolist()[:2] == [-1, -1]
