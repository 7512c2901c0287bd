"""The bits behind the noise, keyed by (seed, absolute position, token id) and nothing else.

A counter-based hash in wrapping 64-bit integer arithmetic: the same on every device, in torch, in
numpy and in Triton, and no state is kept, so the noise of some tokens can be had without that of
the others. It knows nothing of logits or requests.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flashdraft.kernels.draw.arithmetic import NUM_BITS

# The increment and the multipliers of splitmix64, as signed 64-bit numbers.
INCREMENT = 0x9E3779B97F4A7C15 - 2**64
MULTIPLIER_1 = 0xBF58476D1CE4E5B9 - 2**64
MULTIPLIER_2 = 0x94D049BB133111EB - 2**64
LOW_BITS = 2**NUM_BITS - 1

Words = TypeVar("Words", Tensor, NDArray[np.int64])


def noise_key(seed: int, position: int) -> int:
    """Everything the noise of one position depends on, as a signed 64-bit number."""
    return _mix(noise_start(seed) + position * INCREMENT)


def noise_start(seed: int) -> int:
    """What a seed contributes to its keys, for `keys_from`."""
    return _mix(seed - INCREMENT)


def keys_from(starts: Tensor, positions: Tensor) -> Tensor:
    """`noise_key` on a device, of a start and a position each, int64."""
    x = starts + positions * INCREMENT
    for shift, multiplier in ((30, MULTIPLIER_1), (27, MULTIPLIER_2)):
        x = (x ^ _shift_right(x, shift)) * multiplier
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, count: int) -> Tensor:
    """The shift of an unsigned number, which torch does not have."""
    return (x >> count) & (2 ** (64 - count) - 1)


def host_keys_from(starts: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """`keys_from` in numpy."""
    return _mix_words(starts + positions * np.int64(INCREMENT))


def random_bits(key: int | Tensor, vocab_size: int, device: torch.device) -> Tensor:
    """[vocab_size] int32, uniform in 0 .. 2**31 - 1; of keys [n, 1] a row for each."""
    # One hash makes the bits of two neighbouring tokens: half the arithmetic.
    hashed = _hash(_counters((vocab_size + 1) // 2, device) + key)
    return hashed.view(torch.int32)[..., :vocab_size] & LOW_BITS


def random_bits_at(keys: Tensor, token_ids: Tensor) -> Tensor:
    """The same bits for some tokens only: [rows, n], of keys [rows, 1]."""
    hashed = _hash((token_ids >> 1) * INCREMENT + keys)
    return ((hashed >> (token_ids & 1) * 32) & LOW_BITS).to(torch.int32)


def host_random_bits(key: int, vocab_size: int) -> NDArray[np.int32]:
    """`random_bits` in numpy."""
    hashed = _hash(_host_counters((vocab_size + 1) // 2) + key)
    return hashed.view(np.int32)[:vocab_size] & np.int32(LOW_BITS)


def host_random_bits_at(
    key: int | NDArray[np.int64], token_ids: NDArray[np.int64]
) -> NDArray[np.int32]:
    """`random_bits_at` in numpy, of one key or of a key each."""
    hashed = _hash((token_ids >> 1) * INCREMENT + key)
    return ((hashed >> (token_ids & 1) * 32) & LOW_BITS).astype(np.int32)


def _mix(x: int) -> int:
    """splitmix64's finaliser on one number, as a signed one."""
    x &= 2**64 - 1
    x = (x ^ (x >> 30)) * MULTIPLIER_1 & 2**64 - 1
    x = (x ^ (x >> 27)) * MULTIPLIER_2 & 2**64 - 1
    x ^= x >> 31
    return x - 2**64 if x >= 2**63 else x


def _mix_words(x: NDArray[np.int64]) -> NDArray[np.int64]:
    """`_mix` of many numbers; its shifts are those of unsigned ones."""
    words = x.view(np.uint64)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(MULTIPLIER_1 % 2**64)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(MULTIPLIER_2 % 2**64)
    return (words ^ (words >> np.uint64(31))).view(np.int64)


def _hash(x: Words) -> Words:
    """Two multiply rounds in place; both halves of the result are usable."""
    # The shifts are arithmetic (torch has no other): x and ~x then hash alike, which costs one bit
    # of 64 and saves three passes.
    x ^= x >> 30
    x *= MULTIPLIER_1
    x ^= x >> 27
    x *= MULTIPLIER_2
    x ^= x >> 32
    return x


def _counters(count: int, device: torch.device) -> Tensor:
    # Not kept: what is made while a graph is captured has no values before its first replay.
    return torch.arange(count, dtype=torch.int64, device=device) * INCREMENT


@lru_cache(maxsize=8)
def _host_counters(count: int) -> NDArray[np.int64]:
    return np.arange(count, dtype=np.int64) * INCREMENT
