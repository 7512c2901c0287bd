"""Gumbel noise by the libraries' own logarithms, until the engine draws by kernels/draw alone.

The bits behind it are those of kernels/draw/noise.py.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flashdraft.kernels.draw import arithmetic
from flashdraft.kernels.draw import noise as keyed

NUM_BITS = arithmetic.NUM_BITS
LOWEST_NOISE = arithmetic.LOWEST_NOISE

noise_key = keyed.noise_key
noise_start = keyed.noise_start
keys_from = keyed.keys_from
random_bits = keyed.random_bits
host_random_bits = keyed.host_random_bits
host_random_bits_at = keyed.host_random_bits_at


def noise(seed: int, position: int, vocab_size: int, device: torch.device) -> Tensor:
    """The Gumbel noise of every token at one position: [vocab_size] float32."""
    return gumbel(random_bits(noise_key(seed, position), vocab_size, device))


def gumbel(bits: Tensor) -> Tensor:
    """Standard Gumbel noise from uniform bits, float32 and always finite."""
    # -log(-log(u)) with u = 1 - v: float32 is fine-grained near v = 0, where the large noise that
    # decides comes from; near u = 1 it would not be.
    v = bits.to(torch.float32).add_(0.5).mul_(2.0**-NUM_BITS)
    return v.clamp_(max=arithmetic.LARGEST_BELOW_ONE).neg_().log1p_().neg_().log_().neg_()


def host_gumbel(bits: NDArray[np.int32]) -> NDArray[np.float32]:
    """`gumbel` in numpy; the logarithms may differ from torch's in the last place."""
    v = (bits.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-NUM_BITS)
    return -np.log(-np.log1p(-np.minimum(v, np.float32(arithmetic.LARGEST_BELOW_ONE))))
