"""What a vision tower says of pictures, kept by their keys for those who bring them again.

Preemption, the next turn of a conversation and the same picture in another request need no tower.
Who has which picture, and where in a pass its rows are, it does not know.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor

from flashdraft.core import Picture
from flashdraft.engine.streams import Graphs
from flashdraft.models.layers import VisionTower
from flashdraft.models.vision.fixed import FixedPasses, Key
from flashdraft.models.vision.tower import Gemma4VisionTower

log = logging.getLogger(__name__)

MAX_FEATURE_BYTES = 256 << 20  # of pictures of usual size some ninety for the largest Gemma 4


class PictureFeatures:
    """A tower, and the features that it made lately."""

    def __init__(self, tower: VisionTower, max_bytes: int = MAX_FEATURE_BYTES) -> None:
        self._tower, self._max_bytes = tower, max_bytes
        self._kept: OrderedDict[bytes, Tensor] = OrderedDict()  # those of longest ago first
        self._num_bytes = 0
        self._captured: _CapturedTower | None = None  # None: the tower runs as it is
        if isinstance(tower, Gemma4VisionTower) and tower.is_capturable:
            self._captured = _CapturedTower(tower)
        self.num_encoded = 0  # pictures
        self.num_found = 0  # of those that were wanted, without the tower

    def prepare(self) -> None:
        """Have the tower's passes captured now, not while requests wait for it."""
        if self._captured is None:
            return
        try:
            self._captured.prepare()
        except Exception as error:  # a picture that comes will say so itself
            log.warning("the vision tower cannot be prepared, it is slower: %s", error)
            self._captured = None
        self._drop_failed()

    def of(self, pictures: Sequence[Picture]) -> list[Tensor]:
        """The features of each, [num_tokens, hidden_size]; the tower runs once for all new ones."""
        new = {one.key: one for one in pictures if one.key not in self._kept}
        features = {one.key: self._kept[one.key] for one in pictures if one.key not in new}
        if new:
            encoded = self._encoded(list(new.values()))
            for picture, rows in zip(new.values(), encoded, strict=True):
                assert len(rows) == picture.num_tokens, "the tower made another number of rows"
                # a part of what was made for several would keep all of that
                is_part = rows.untyped_storage().nbytes() > rows.nbytes
                features[picture.key] = rows.clone() if is_part else rows
        self.num_encoded += len(new)
        self.num_found += len(pictures) - len(new)
        self._keep(features)
        return [features[one.key] for one in pictures]

    def _encoded(self, pictures: Sequence[Picture]) -> list[Tensor]:
        try:
            return (self._captured or self._tower).encode(pictures)
        except torch.OutOfMemoryError:  # whoever tries again has the room of what was kept
            self._kept.clear()
            self._num_bytes = 0
            raise
        finally:
            self._drop_failed()

    def _drop_failed(self) -> None:
        """What cannot be captured need not be padded."""
        if self._captured is not None and self._captured.is_failed:
            self._captured = None

    def _keep(self, features: dict[bytes, Tensor]) -> None:
        """Keep these before all others, as many as there is room for."""
        for key, rows in features.items():
            if key not in self._kept:
                self._num_bytes += rows.nbytes
            self._kept[key] = rows
            self._kept.move_to_end(key)
        while self._num_bytes > self._max_bytes:
            _, rows = self._kept.popitem(last=False)
            self._num_bytes -= rows.nbytes


class _CapturedTower:
    """A tower whose passes are captured, those that pictures of usual size take."""

    def __init__(self, tower: Gemma4VisionTower) -> None:
        self._graphs: Graphs[Key] = Graphs(tower.device)
        self._passes = FixedPasses(tower, self._graphs.call)

    @property
    def is_failed(self) -> bool:
        """Whether a pass cannot be captured."""
        return bool(self._graphs.failed)

    def prepare(self) -> None:
        for key in self._passes.keys:
            while not self.is_failed and not self._graphs.is_ready(key):
                self._passes.rehearse(key)

    def encode(self, pictures: Sequence[Picture]) -> list[Tensor]:
        return self._passes.encode(pictures)
