"""Pictures in the target's pass: their features, and which rows they are.

They lie in fixed buffers, which the host fills between two launches, in the order of the device's
work. Only passes with chunks of prompts have any: those who decode never do. A captured pass reads
the buffers whatever it holds, others only where there is a picture.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flashdraft.engine.pictures import PictureFeatures
from flashdraft.engine.step.shape import PromptChunk
from flashdraft.models.layers import PictureRows


class PassPictures:
    """The pictures of the pass that is laid out."""

    def __init__(
        self,
        features: PictureFeatures,
        hidden: Tensor,
        captured: bool,
        send: Callable[[NDArray[np.int64]], Tensor],
    ) -> None:
        """`hidden` [max_rows, hidden_size] is what passes result in."""
        self._source, self._captured, self._send = features, captured, send
        self._features = torch.zeros_like(hidden)
        max_rows, device = len(hidden), hidden.device
        self._is_picture = torch.zeros(max_rows, dtype=torch.bool, device=device)
        self._ahead = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self._has_any = False

    def lay_out(self, first: int, chunks: Sequence[PromptChunk]) -> None:
        """The pictures of these chunks, whose rows begin behind the `first` ones."""
        if self._has_any:  # of the last pass
            self._is_picture.zero_()
            self._ahead.zero_()
            self._has_any = False
        placed = []
        for chunk in chunks:
            placed += [one._replace(start=first + one.start) for one in chunk.pictures]
            first += len(chunk.tokens)
        if not placed:
            return
        found = self._source.of([one.picture for one in placed])
        self._has_any = True
        begin, end = placed[0].start, placed[-1].end
        ahead = np.full(end - begin, -1)  # -1: it is no picture's
        for one, features in zip(placed, found, strict=True):
            last = one.end - 1
            ahead[one.start - begin : one.end - begin] = last - np.arange(one.start, one.end)
            self._features[one.start : one.end] = features
        sent = self._send(ahead)
        self._is_picture[begin:end] = sent >= 0
        self._ahead[begin:end] = sent.clamp(min=0)

    def rows(self, num_rows: int) -> PictureRows | None:
        """Those of the pass's rows; None where a pass that is not captured has none."""
        if not self._has_any and not self._captured:
            return None
        return PictureRows(
            self._is_picture[:num_rows], self._features[:num_rows], self._ahead[:num_rows]
        )
