"""Gumbel noise keyed by (seed, absolute position, token id) and nothing else.

A counter-based hash in wrapping 64-bit integer arithmetic: the integer part is the same on every
device, in torch and in numpy, and no state is kept, so the noise of some tokens can be had without
that of the others. It knows nothing of logits or requests.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# The increment and the multipliers of splitmix64, as signed 64-bit numbers.
_INCREMENT = 0x9E3779B97F4A7C15 - 2**64
_MULTIPLIER_1 = 0xBF58476D1CE4E5B9 - 2**64
_MULTIPLIER_2 = 0x94D049BB133111EB - 2**64

NUM_BITS = 31  # random bits behind each token's noise
_LOW_BITS = 2**NUM_BITS - 1
_LARGEST_BELOW_ONE = 1.0 - 2.0**-24  # in float32

LOWEST_NOISE = -2.82  # -log(-log(2 ** -24)) = -2.811..., rounded away from zero

Words = TypeVar("Words", Tensor, NDArray[np.int64])


def noise_key(seed: int, position: int) -> int:
    """Everything the noise of one position depends on, as a signed 64-bit number."""
    return _mix(noise_start(seed) + position * _INCREMENT)


def noise_start(seed: int) -> int:
    """What a seed contributes to its keys, for `keys_from`."""
    return _mix(seed - _INCREMENT)


def keys_from(starts: Tensor, positions: Tensor) -> Tensor:
    """`noise_key` on a device, of a start and a position each, int64."""
    x = starts + positions * _INCREMENT
    for shift, multiplier in ((30, _MULTIPLIER_1), (27, _MULTIPLIER_2)):
        x = (x ^ _shift_right(x, shift)) * multiplier
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, count: int) -> Tensor:
    """The shift of an unsigned number, which torch does not have."""
    return (x >> count) & (2 ** (64 - count) - 1)


def noise_keys(
    seeds: NDArray[np.int64], first_positions: NDArray[np.int64], count: int
) -> NDArray[np.int64]:
    """`noise_key` of `count` positions in a row for every seed: [num_seeds, count]."""
    start = _mix_words(seeds - np.int64(_INCREMENT))
    positions = first_positions[:, None] + np.arange(count)
    return _mix_words(start[:, None] + positions * np.int64(_INCREMENT))


def noise(seed: int, position: int, vocab_size: int, device: torch.device) -> Tensor:
    """The Gumbel noise of every token at one position: [vocab_size] float32."""
    return gumbel(random_bits(noise_key(seed, position), vocab_size, device))


def random_bits(key: int | Tensor, vocab_size: int, device: torch.device) -> Tensor:
    """[vocab_size] int32, uniform in 0 .. 2**31 - 1; of keys [n, 1] a row for each."""
    # One hash makes the bits of two neighbouring tokens: half the arithmetic.
    hashed = _hash(_counters((vocab_size + 1) // 2, device) + key)
    return hashed.view(torch.int32)[..., :vocab_size] & _LOW_BITS


def gumbel(bits: Tensor) -> Tensor:
    """Standard Gumbel noise from uniform bits, float32 and always finite."""
    # -log(-log(u)) with u = 1 - v: float32 is fine-grained near v = 0, where the large noise that
    # decides comes from; near u = 1 it would not be.
    v = bits.to(torch.float32).add_(0.5).mul_(2.0**-NUM_BITS).clamp_(max=_LARGEST_BELOW_ONE)
    return v.neg_().log1p_().neg_().log_().neg_()


def host_random_bits(key: int, vocab_size: int) -> NDArray[np.int32]:
    """`random_bits` in numpy."""
    hashed = _hash(_host_counters((vocab_size + 1) // 2) + key)
    return hashed.view(np.int32)[:vocab_size] & np.int32(_LOW_BITS)


def host_random_bits_at(key: int, token_ids: NDArray[np.int64]) -> NDArray[np.int32]:
    """The same bits for some tokens only."""
    hashed = _hash((token_ids >> 1) * _INCREMENT + key)
    return ((hashed >> (token_ids & 1) * 32) & _LOW_BITS).astype(np.int32)


def host_gumbel(bits: NDArray[np.int32]) -> NDArray[np.float32]:
    """`gumbel` in numpy; the logarithms may differ from torch's in the last place."""
    v = (bits.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-NUM_BITS)
    return -np.log(-np.log1p(-np.minimum(v, np.float32(_LARGEST_BELOW_ONE))))


def _mix(x: int) -> int:
    """splitmix64's finaliser on one number, as a signed one."""
    x &= 2**64 - 1
    x = (x ^ (x >> 30)) * _MULTIPLIER_1 & 2**64 - 1
    x = (x ^ (x >> 27)) * _MULTIPLIER_2 & 2**64 - 1
    x ^= x >> 31
    return x - 2**64 if x >= 2**63 else x


def _mix_words(x: NDArray[np.int64]) -> NDArray[np.int64]:
    """`_mix` of many numbers; its shifts are those of unsigned ones."""
    words = x.view(np.uint64)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(_MULTIPLIER_1 % 2**64)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(_MULTIPLIER_2 % 2**64)
    return (words ^ (words >> np.uint64(31))).view(np.int64)


def _hash(x: Words) -> Words:
    """Two multiply rounds in place; both halves of the result are usable."""
    # The shifts are arithmetic (torch has no other): x and ~x then hash alike, which costs one bit
    # of 64 and saves three passes.
    x ^= x >> 30
    x *= _MULTIPLIER_1
    x ^= x >> 27
    x *= _MULTIPLIER_2
    x ^= x >> 32
    return x


@lru_cache(maxsize=8)
def _counters(count: int, device: torch.device) -> Tensor:
    return torch.arange(count, dtype=torch.int64, device=device) * _INCREMENT


@lru_cache(maxsize=8)
def _host_counters(count: int) -> NDArray[np.int64]:
    return np.arange(count, dtype=np.int64) * _INCREMENT
