"""A tower over fixed places, in passes of a few sizes: any pictures of a size are the same work.

So a pass can be captured once and replayed for others. Where a size has more rows than there are
pictures, the rest are nobody's: they see each other, and nobody reads what comes of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from flashdraft.core import Picture
from flashdraft.kernels.interface import WholeSequences
from flashdraft.models.vision.patches import Patches, passes
from flashdraft.models.vision.tower import Gemma4VisionTower

# Tokens of a pass. One picture of the usual budget, 280, takes 250 to 272 in nearly every format; a
# frame of a film up to 70. Larger passes keep a GPU busy for longer than the host needs for them.
SIZES = (70, 140, 210, 272, 280, 350, 420, 490, 544, 560)
MAX_PICTURES = 8  # in a pass; frames of films fill the largest with as many

Key = tuple[str, int]
Call = Callable[[Key, Callable[[], Tensor]], Tensor]


class FixedPasses:
    """A tower's passes, each padded to the next size."""

    def __init__(self, tower: Gemma4VisionTower, call: Call, sizes: Sequence[int] = SIZES) -> None:
        """`call` runs a function by its key, or what was captured of it.

        `sizes` are tokens, the largest last. What `call` returns may be overwritten by the next.
        """
        self._tower, self._call, self._sizes = tower, call, sizes
        config, device = tower.config, tower.device
        most = self._rows(sizes[-1])
        self._pixels = torch.zeros(most, 3 * config.patch_size**2, dtype=torch.uint8, device=device)
        self._columns = torch.zeros(most, dtype=torch.int64, device=device)
        self._lines = torch.zeros_like(self._columns)
        # of as many pictures as there may be, and of nobody's rows
        self._starts = torch.zeros(MAX_PICTURES + 2, dtype=torch.int32, device=device)

    @property
    def keys(self) -> list[Key]:
        """Of all passes, the largest first."""
        return [("tower", size) for size in reversed(self._sizes)]

    def rehearse(self, key: Key) -> None:
        """Run a pass over a blank picture."""
        config = self._tower.config
        columns = min(key[1], config.num_positions // config.pooling)
        size = config.cell * columns, config.cell
        self._run([Picture(bytes(3 * size[0] * size[1]), *size, columns, bytes(32))], key)

    def encode(self, pictures: Sequence[Picture]) -> list[Tensor]:
        """The tower's, in memory of their own; what fits in no pass runs as it is."""
        features: list[Tensor] = []
        for some in passes(pictures, self._sizes[-1], MAX_PICTURES):
            num_tokens = sum(picture.num_tokens for picture in some)
            key = next((key for key in reversed(self.keys) if key[1] >= num_tokens), None)
            features += self._tower.encode(some) if key is None else self._run(some, key)
        return features

    def _run(self, pictures: Sequence[Picture], key: Key) -> list[Tensor]:
        num_rows = self._rows(key[1])
        self._lay_out(pictures, num_rows)
        found = self._call(key, lambda: self._tower.features(self._patches(num_rows)))
        counts = [picture.num_tokens for picture in pictures]
        return [rows.clone() for rows in torch.split(found[: sum(counts)], counts)]

    def _lay_out(self, pictures: Sequence[Picture], num_rows: int) -> None:
        patches = Patches.of(pictures, self._tower.config, self._tower.device)
        end = len(patches.pixels)
        self._pixels[:end] = patches.pixels
        self._columns[:end], self._lines[:end] = patches.columns, patches.rows
        starts = patches.pictures.starts
        self._starts[: len(starts)] = starts
        self._starts[len(starts) : -1].fill_(end)  # pictures that are not there
        self._starts[-1:].fill_(num_rows)

    def _patches(self, num_rows: int) -> Patches:
        """The places of a pass, whatever they hold when they are read."""
        return Patches(
            self._pixels[:num_rows],
            self._columns[:num_rows],
            self._lines[:num_rows],
            WholeSequences(self._starts, longest=num_rows),
        )

    def _rows(self, num_tokens: int) -> int:
        return num_tokens * self._tower.config.pooling**2
