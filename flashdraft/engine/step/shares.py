"""How likely the target agrees with a draft token, as a device that decides by itself knows it."""

from __future__ import annotations

import torch
from torch import Tensor

from flashdraft.engine.drafts import DEVICE_SOURCES
from flashdraft.engine.policy.verify import BUCKET_EDGES
from flashdraft.kernels.layout import survival
from flashdraft.kernels.tree import Offered


class Shares:
    """By source and confidence: how likely the target agrees with a draft token at its turn."""

    def __init__(self, device: torch.device) -> None:
        shape = (len(DEVICE_SOURCES) + 1, len(BUCKET_EDGES) + 1)  # the last is for branches
        self._chances = torch.full(shape, 0.5, device=device)
        self._edges = torch.tensor(BUCKET_EDGES, device=device)

    def set_chances(self, chances: Tensor) -> None:
        """For each of DEVICE_SOURCES, and for branches, by bucket of confidence."""
        self._chances.copy_(chances)

    def expected(self, confidence: Tensor, sources: Tensor) -> Tensor:
        """Draft tokens of every slot that the target is expected to agree with."""
        return survival(confidence, sources, self._chances, self._edges).sum(1)

    def offered(
        self,
        drafts: Tensor,
        confidence: Tensor,
        sources: Tensor,
        other_tokens: Tensor,
        other_confidence: Tensor,
        branches: Tensor,
    ) -> Offered:
        """What trees may be grown of."""
        others = other_tokens, other_confidence, branches
        return Offered(drafts, confidence, sources, *others, self._chances, self._edges)
