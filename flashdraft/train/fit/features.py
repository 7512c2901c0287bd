"""The target's features of a packed batch: what the drafter sees of its tapped layers.

The target runs over all documents in one pass, as in a prefill, with a scratch cache: every layer
writes its keys and values over the last layer's, for nobody reads them later. It knows batches and
targets, no drafter.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from flashdraft.errors import TrainingError
from flashdraft.kernels.interface import PageView
from flashdraft.models.config.layers import LayerConfig
from flashdraft.models.layers import ForwardBatch, LayerCache, Target
from flashdraft.train.fit.batches import PackedBatch

PAGE_SIZE = 64


class TargetFeatures:
    """Runs a target over packed batches of up to `max_rows` rows."""

    def __init__(self, target: Target, max_rows: int) -> None:
        if not target.tap_layers:
            raise TrainingError("The target was loaded without taps; load it with the drafter's.")
        self._target = target
        self._max_rows = max_rows
        # by key heads, head size and window: of each kind the last one may be read again
        self._scratch: dict[tuple[int, int, int | None], Tensor] = {}
        self._num_pages = 0

    @torch.no_grad()
    def run(self, batch: PackedBatch) -> Tensor:
        """Taps [num_rows, num_taps * hidden_size], each row seeing its own document up to itself.

        They are zeros where the batch is padded.
        """
        num_rows = sum(batch.lengths)
        assert num_rows <= self._max_rows, "the batch has more rows than were announced"
        view = self._view(batch, num_rows)
        caches = [self._layer_cache(layer, view) for layer in self._target.config.cached_layers]
        positions = batch.positions[:num_rows]
        forward = ForwardBatch(positions, max(batch.lengths), caches)
        output = self._target.forward(batch.token_ids[:num_rows], forward)
        assert output.taps is not None
        missing = len(batch.token_ids) - num_rows
        return F.pad(output.taps, (0, 0, 0, missing)) if missing else output.taps

    def _view(self, batch: PackedBatch, num_rows: int) -> PageView:
        """Every document owns consecutive pages from the first free one on."""
        device = self._target.kernels.device
        lengths = np.asarray(batch.lengths, dtype=np.int64)
        num_pages = -(-lengths // PAGE_SIZE)
        first_page = np.cumsum(num_pages) - num_pages
        self._reserve(int(num_pages.sum()))
        # pages past a document's own are never looked up
        table = first_page[:, None] + np.arange(num_pages.max())
        starts = np.concatenate([[0], np.cumsum(lengths)])
        first_slots = _to_device(first_page * PAGE_SIZE, device)
        slots = first_slots[batch.documents[:num_rows]] + batch.positions[:num_rows]
        return PageView(
            query_start=_to_device(starts.astype(np.int32), device),
            context_lens=torch.zeros(len(lengths), dtype=torch.int32, device=device),
            block_table=_to_device(table.astype(np.int32), device),
            slots=slots,
            page_size=PAGE_SIZE,
            max_query_len=int(lengths.max()),
            max_key_len=int(lengths.max()),
        )

    def _reserve(self, num_pages: int) -> None:
        if num_pages > self._num_pages:  # seldom: twice what full documents would need
            self._num_pages = max(num_pages, -(-2 * self._max_rows // PAGE_SIZE))
            self._scratch.clear()

    def _layer_cache(self, layer: LayerConfig, view: PageView) -> LayerCache:
        kernels, sizes = self._target.kernels, (layer.num_kv_heads, layer.head_dim)
        key = (*sizes, layer.window)
        if key not in self._scratch:
            # zeros, not empty: a masked key must never be NaN
            shape = (2, self._num_pages, PAGE_SIZE, *sizes)
            self._scratch[key] = torch.zeros(shape, device=kernels.device, dtype=kernels.dtype)
        keys, values = self._scratch[key]
        return LayerCache(keys, values, view)


def _to_device(values: np.ndarray, device: torch.device) -> Tensor:
    """A host array on the device, without waiting for what runs there."""
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
