"""The target's pass over few rows as CUDA graphs, for steps that the host has a hand in.

Prompts, sampling, grammars: the host decides between two passes, but the pass itself is some
hundreds of launches that take longer to make than to run. Rows and sequences are filled up to the
next size that is captured. The rows too many are a sequence of their own, the last one, that reads
and writes the page of nobody.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from flashdraft.engine.cache.storage import HostRows, KVCache
from flashdraft.engine.config import MAX_VERIFY
from flashdraft.engine.streams import Graphs, Staging
from flashdraft.models.layers import ForwardBatch, Target, TargetOutput

ROWS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)
BATCHES = (1, 2, 4, 8, 16, 32)
UPLOADS_IN_FLIGHT = 4


class _Shape(NamedTuple):
    batch: int
    num_rows: int
    max_query_len: int


class ForwardGraphs:
    """Runs the target over rows laid out on the host."""

    def __init__(self, target: Target, cache: KVCache, max_length: int) -> None:
        self._target, self._cache, self._max_length = target, cache, max_length
        self._num_layers = len(target.config.layers)
        device, num_pools = target.kernels.device, len(cache.windows)
        most = ROWS[-1] * (2 + num_pools) + 2 * BATCHES[-1] + 3
        self._numbers = torch.zeros(most, dtype=torch.int64, device=device)
        num_pages = -(-max(max_length, ROWS[-1]) // cache.page_size)
        shape = (num_pools, BATCHES[-1] + 1, num_pages)
        self._tables = torch.zeros(shape, dtype=torch.int32, device=device)
        self._uploads = Staging(device, UPLOADS_IN_FLIGHT)
        self.graphs: Graphs[_Shape] = Graphs(device)
        target.prepare_positions(max_length)

    def takes(self, rows: HostRows) -> bool:
        """Whether so many rows and sequences are captured."""
        return len(rows.positions) <= ROWS[-1] and len(rows.context_lens) <= BATCHES[-1]

    def forward(self, tokens: Sequence[int], rows: HostRows) -> TargetOutput:
        """What the target says of every row."""
        num_rows = len(tokens)
        filled = _at_least(num_rows, ROWS)
        longest = max(rows.max_query_len, filled - num_rows)
        shape = _Shape(
            _at_least(len(rows.context_lens), BATCHES),
            filled,
            _at_least(longest, (1, 1 + MAX_VERIFY, *ROWS[5:])),
        )
        self._upload(tokens, rows, shape)
        output = self.graphs.call(shape, lambda: self._forward(shape))
        # copies: the next graph may write where this one's results are
        taps = None if output.taps is None else output.taps[:num_rows].clone()
        return TargetOutput(output.hidden[:num_rows].clone(), taps)

    def _upload(self, tokens: Sequence[int], rows: HostRows, shape: _Shape) -> None:
        num_rows, batch = len(tokens), len(rows.context_lens)
        spare, idle = shape.num_rows - num_rows, shape.batch - batch
        page_size, scratch = self._cache.page_size, self._cache.scratch_pages
        parts = [np.asarray(tokens), np.zeros(spare), rows.positions, np.arange(spare)]
        for slots, page in zip(rows.slots, scratch, strict=True):
            parts += [slots, page * page_size + np.arange(spare) % page_size]
        parts += [rows.offsets, np.full(idle, num_rows), np.full(1, shape.num_rows)]
        parts += [rows.context_lens, np.zeros(idle + 1)]
        numbers = np.concatenate(parts).astype(np.int64)
        self._numbers[: len(numbers)].copy_(self._uploads.send(numbers))
        width = max(max(table.shape[1] for table in rows.tables), -(-spare // page_size))
        tables = np.zeros((len(scratch), shape.batch + 1, width), dtype=np.int64)
        for pool, table in enumerate(rows.tables):
            tables[pool, :batch, : table.shape[1]] = table
            tables[pool, -1] = scratch[pool]
        self._tables[:, : shape.batch + 1, :width].copy_(self._uploads.send(tables))

    def _forward(self, shape: _Shape) -> TargetOutput:
        num_pools, num_rows, batch = len(self._cache.windows), shape.num_rows, shape.batch + 1
        sizes = [num_rows] * (2 + num_pools) + [batch + 1, batch]
        parts = torch.split(self._numbers[: sum(sizes)], sizes)
        tokens, positions, *slots, starts, lens = parts
        views = self._cache.views(
            starts.to(torch.int32),
            lens.to(torch.int32),
            self._tables[:, :batch],
            slots,
            shape.max_query_len,
            self._max_length,
        )
        layers = self._cache.layers(views, 0, self._num_layers)
        return self._target.forward(tokens, ForwardBatch(positions, self._max_length, layers))


def _at_least(count: int, sizes: Sequence[int]) -> int:
    return next(size for size in sizes if size >= count)
