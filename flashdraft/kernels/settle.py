"""Keys and values of an accepted path, moved to where they would be had nothing else been drafted.

One rule, told here in tensors; a device may have it as a kernel of its own (`Kernels.settler`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class PagedTensor(NamedTuple):
    """Keys or values of one layer."""

    cache: Tensor  # [pages, page_size, kv_heads, head_dim]
    pool: int  # its pages are those of this pool


class Settled(NamedTuple):
    """What moves: on every slot's path row path[k] becomes row k, where it lies further behind."""

    path: Tensor  # [slots, 1 + depth] int64; 0 behind its end
    starts: Tensor  # [slots] of the slots' first rows
    places: Tensor  # [pools, rows] int64: of the pass's rows in the caches
    nowhere: Tensor  # [pools] int64: a page that nobody reads


def settle(stored: Sequence[PagedTensor], moves: Settled) -> None:
    """Move all of it; everything is read before anything is written."""
    target = torch.arange(moves.path.shape[1], device=moves.path.device).expand_as(moves.path)
    is_moved = (moves.path > target).flatten()
    if is_moved.device.type == "cpu" and not bool(is_moved.any()):
        return
    starts = moves.starts.to(torch.int64).unsqueeze(1)
    last = moves.places.shape[1] - 1
    rows = [(starts + one).clamp(max=last).flatten() for one in (moves.path, target)]
    page_size = stored[0].cache.shape[1]
    unused = (moves.nowhere * page_size).unsqueeze(1)
    source, target = (torch.where(is_moved, moves.places[:, one], unused) for one in rows)
    for cache, pool in stored:
        tokens = cache.view(-1, *cache.shape[2:])
        tokens[target[pool]] = tokens[source[pool]]
