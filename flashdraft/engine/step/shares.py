"""Who verifies how many draft tokens, where the device decides: the likeliest to survive.

Nothing here waits for the device, and shapes depend on nothing but the arguments' own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashdraft.engine.drafts import DEVICE_SOURCES
from flashdraft.engine.policy.verify import BUCKET_EDGES
from flashdraft.engine.step.layout import count_up


class Shares:
    """By source and confidence: how likely the target agrees with a draft token at its turn."""

    def __init__(self, device: torch.device) -> None:
        shape = (len(DEVICE_SOURCES), len(BUCKET_EDGES) + 1)
        self._chances = torch.full(shape, 0.5, device=device)
        self._edges = torch.tensor(BUCKET_EDGES, device=device)

    def set_chances(self, chances: Tensor) -> None:
        """For each of DEVICE_SOURCES and bucket of confidence."""
        self._chances.copy_(chances)

    def survival(self, confidence: Tensor, sources: Tensor) -> Tensor:
        """The chance that every draft token [num_seqs, width] up to each one is accepted."""
        buckets = torch.bucketize(confidence.contiguous(), self._edges, right=True)
        return self._chances[sources.unsqueeze(1), buckets].cumprod(1)


def share_slots(survival: Tensor, num_slots: int, limits: Tensor | None = None) -> Tensor:
    """How many draft tokens each sequence may verify, of `num_slots` for all together.

    survival [num_seqs, width] never rises along a row; the likeliest slots of all win, and so every
    sequence gets a prefix of its own. limits [num_seqs] fix how many a sequence gets, before all
    others, where they are not negative; it gets more only if nobody else can. Returns [num_seqs]
    int64.
    """
    num_seqs, width = survival.shape
    counts = torch.zeros(num_seqs, dtype=torch.int64, device=survival.device)
    if num_slots == 0:
        return counts
    if num_slots >= num_seqs * width:
        return counts + width
    if limits is not None:
        place, limits = count_up(width, survival.device), limits.unsqueeze(1)
        survival = torch.where(limits < 0, survival, torch.where(place < limits, 2.0, -1.0))
    winners = survival.flatten().topk(num_slots, sorted=False).indices // width
    return counts.index_add_(0, winners, torch.ones_like(winners))
