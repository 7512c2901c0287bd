"""Masks of allowed tokens on rows of logits: -inf wherever a row's mask has no bit.

Two implementations of one rule, as of the draw: numpy on the host, where torch would wake its
threads for very little work, and torch on a device, to which only the bits travel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from flashdraft.engine.sampling.grammar import Mask


def apply_masks(logits: Tensor, masks: Sequence[Mask]) -> Tensor:
    """Rows [num_rows, vocab], masked, in a copy; there is a mask for every row."""
    if not masks:
        return logits
    bits = np.stack(masks)
    return mask_on_host(logits, bits) if logits.is_cpu else mask_on_device(logits, bits)


def mask_on_host(logits: Tensor, bits: Mask) -> Tensor:
    """The masking in numpy."""
    allowed = np.unpackbits(bits, axis=1, count=logits.shape[1], bitorder="little").view(np.bool_)
    return torch.from_numpy(np.where(allowed, logits.float().numpy(), np.float32(-math.inf)))


def mask_on_device(logits: Tensor, bits: Mask) -> Tensor:
    """The masking in torch."""
    weights = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=logits.device)
    packed = torch.from_numpy(bits).to(logits.device)
    forbidden = (packed.unsqueeze(2) & weights).eq(0).flatten(1)
    return logits.float().masked_fill(forbidden[:, : logits.shape[1]], -math.inf)
