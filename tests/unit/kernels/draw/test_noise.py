"""The bits of the noise: the same however they are asked for. test_draw.py has their quality."""

from __future__ import annotations

import numpy as np
import torch

from flashdraft.kernels.draw.noise import (
    host_keys_from,
    host_random_bits,
    host_random_bits_at,
    keys_from,
    noise_key,
    noise_start,
    random_bits,
)

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
    rows = random_bits(torch.from_numpy(keys).unsqueeze(1), 101, torch.device("cpu"))
    assert rows[torch.arange(50), torch.from_numpy(ids)].tolist() == expected
