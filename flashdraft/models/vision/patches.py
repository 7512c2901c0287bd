"""Pictures as a tower's rows: patches, cell after cell, and where in the picture each of them is.

The patches of a cell follow one another, row by row, and so do the cells: what is pooled lies
together, and what is pooled lies as its tokens do. No patch sees an order, so none is lost.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flashdraft.core import Picture
from flashdraft.errors import RequestError
from flashdraft.kernels.interface import WholeSequences
from flashdraft.models.config.vision import VisionConfig


@dataclass(frozen=True)
class Patches:
    """The patches of some pictures, one picture after another."""

    pixels: Tensor  # [num_patches, patch * patch * 3] uint8, row, column, colour
    columns: Tensor  # [num_patches] int64, of the picture that a patch is in
    rows: Tensor
    pictures: WholeSequences

    @classmethod
    def of(cls, pictures: Sequence[Picture], config: VisionConfig, device: torch.device) -> Patches:
        """The patches of pictures whose sides are whole numbers of cells."""
        for picture in pictures:
            _check(picture, config)
        whole = [np.frombuffer(picture.pixels, np.uint8) for picture in pictures]
        shown = torch.split(_sent(whole, torch.uint8, device), list(map(len, whole)))
        pixels = [
            _by_cells(one.view(picture.height, picture.width, 3), config.patch_size, config.pooling)
            for picture, one in zip(pictures, shown, strict=True)
        ]
        places = [_places(picture, config) for picture in pictures]
        rows, columns = (
            _sent([one[:, axis] for one in places], torch.int64, device) for axis in (0, 1)
        )
        known = [0, *accumulate(map(len, places))]
        starts = _sent([np.array(known)], torch.int32, device)
        sequences = WholeSequences(starts, max(map(len, places)), known)
        return cls(torch.cat(pixels), columns, rows, sequences)


def passes(
    pictures: Sequence[Picture], max_tokens: int, max_pictures: int | None = None
) -> Iterator[list[Picture]]:
    """The pictures in order, as many in a pass as it has room for; a larger one has its own."""
    found: list[Picture] = []
    left = max_tokens
    for picture in pictures:
        if found and (picture.num_tokens > left or len(found) == max_pictures):
            yield found
            found, left = [], max_tokens
        found.append(picture)
        left -= picture.num_tokens
    if found:
        yield found


def _check(picture: Picture, config: VisionConfig) -> None:
    """Refuse what is no picture for this tower: callers resize by the same cell."""
    width, height, cell = picture.width, picture.height, config.cell
    num_tokens = (width // cell) * (height // cell)
    if width % cell or height % cell or num_tokens != picture.num_tokens or not num_tokens:
        raise RequestError(
            f"The picture has {width} × {height} pixels and {picture.num_tokens} tokens; its sides "
            f"must be multiples of {cell}, and every {cell} × {cell} pixels are one token."
        )
    if len(picture.pixels) != 3 * width * height:
        raise RequestError(
            f"A picture of {width} × {height} pixels has {3 * width * height} bytes, not "
            f"{len(picture.pixels)}."
        )
    longest = max(width, height) // config.patch_size
    if longest > config.num_positions:
        raise RequestError(
            f"The picture is {longest} patches long; the model knows {config.num_positions} "
            "positions along a side. Use a smaller budget of tokens, or cut the picture."
        )


def _sent(parts: Sequence[NDArray[Any]], dtype: torch.dtype, device: torch.device) -> Tensor:
    """One behind the other on the device.

    A GPU fetches them by itself, so that nobody waits for its work before.
    """
    count, is_cuda = sum(map(len, parts)), device.type == "cuda"
    whole = torch.empty(count, dtype=dtype, pin_memory=is_cuda)
    np.concatenate(parts, out=whole.numpy(), casting="same_kind")
    return whole.to(device, non_blocking=True)


def _places(picture: Picture, config: VisionConfig) -> NDArray[np.int64]:
    """[num_patches, 2]: the row and the column of each."""
    grid = np.indices((picture.height // config.patch_size, picture.width // config.patch_size))
    by_cells = _by_cells(torch.from_numpy(np.moveaxis(grid, 0, 2).copy()), 1, config.pooling)
    return by_cells.numpy()


def _by_cells(grid: Tensor, patch: int, pooling: int) -> Tensor:
    """[height, width, values] -> [num_patches, patch * patch * values], cell after cell.

    A patch has its values by row and column.
    """
    height, width, values = grid.shape
    cell = patch * pooling
    split = grid.view(height // cell, pooling, patch, width // cell, pooling, patch * values)
    return split.permute(0, 3, 1, 4, 2, 5).reshape(-1, patch * patch * values)
