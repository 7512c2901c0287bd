"""Who verifies how many draft tokens, where the device decides: the likeliest to survive.

Nothing here waits for the device, and shapes depend on nothing but the arguments' own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashdraft.engine.drafts import DEVICE_SOURCES
from flashdraft.engine.policy.verify import BUCKET_EDGES
from flashdraft.engine.step.layout import count_up

# What a row is worth, where that is not the chance of its draft token.
ANCHOR, FIXED, NOBODY, UNWANTED = 3.0, 2.0, -1.0, -2.0


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
        """The chance that every draft token [num_seqs, width] up to each one is accepted.

        A confidence of 0 says that there is none.
        """
        buckets = torch.bucketize(confidence.contiguous(), self._edges, right=True)
        chances = self._chances[sources.unsqueeze(1), buckets]
        return torch.where(confidence > 0, chances, 0.0).cumprod(1)


def share_rows(survival: Tensor, num_rows: int, limits: Tensor, alive: Tensor) -> Tensor:
    """How many rows each sequence has, its anchor among them, of `num_rows` for all together.

    survival [num_seqs, width] never rises along a row, and is 0 where nothing was drafted. Who is
    alive has an anchor; then the likeliest draft tokens of all win, and so every sequence gets a
    prefix of its own. limits [num_seqs] fix how many of them a sequence gets, before all others,
    where they are not negative. What is left goes to nobody: to slots that are not alive, and then
    to what was not drafted. Returns [num_seqs] int64.
    """
    place, limits, is_alive = (
        count_up(survival.shape[1], survival.device),
        limits.unsqueeze(1),
        alive.unsqueeze(1) > 0,
    )
    worth = torch.where(limits < 0, survival, torch.where(place < limits, FIXED, UNWANTED))
    worth = torch.where((survival > 0) & is_alive, worth, UNWANTED)
    anchors = torch.where(is_alive, ANCHOR, NOBODY).to(worth.dtype)
    worth = torch.cat([anchors, worth], dim=1)
    winners = worth.flatten().topk(num_rows, sorted=False).indices // worth.shape[1]
    counts = torch.zeros(len(survival), dtype=torch.int64, device=survival.device)
    return counts.index_add_(0, winners, torch.ones_like(winners))
