"""Pictures as a tower's rows: patches, cell after cell, and where in the picture each of them is.

The patches of a cell follow one another, row by row, and so do the cells: what is pooled lies
together, and what is pooled lies as its tokens do. No patch sees an order, so none is lost.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flashdraft.core import Picture
from flashdraft.errors import RequestError
from flashdraft.models.config.vision import VisionConfig

MAX_PATCHES = 16_384  # of several pictures in a pass


@dataclass(frozen=True)
class Patches:
    """The patches of some pictures, one picture after another."""

    pixels: Tensor  # [num_patches, patch * patch * 3] uint8, row, column, colour
    columns: Tensor  # [num_patches] int64, of the picture that a patch is in
    rows: Tensor
    starts: list[int]  # where each picture begins, and where the last one ends

    @classmethod
    def of(cls, pictures: Sequence[Picture], config: VisionConfig, device: torch.device) -> Patches:
        """The patches of pictures whose sides are whole numbers of cells."""
        pixels, columns, rows, starts = [], [], [], [0]
        for picture in pictures:
            _check(picture, config)
            grid = picture.height // config.patch_size, picture.width // config.patch_size
            pixels.append(_by_cells(_patches(picture, config.patch_size), config.pooling))
            places = torch.cartesian_prod(*map(torch.arange, grid)).view(*grid, 2)
            row, column = _by_cells(places, config.pooling).unbind(1)
            rows.append(row)
            columns.append(column)
            starts.append(starts[-1] + len(row))
        every, column, row = (_sent(torch.cat(part), device) for part in (pixels, columns, rows))
        return cls(every, column, row, starts)


def passes(pictures: Sequence[Picture], config: VisionConfig) -> Iterator[list[Picture]]:
    """The pictures in order, as many in a pass as its memory admits."""
    found: list[Picture] = []
    left = MAX_PATCHES
    for picture in pictures:
        size = picture.num_tokens * config.pooling**2
        if found and size > left:
            yield found
            found, left = [], MAX_PATCHES
        found.append(picture)
        left -= size
    if found:
        yield found


def _sent(values: Tensor, device: torch.device) -> Tensor:
    """On the device; steps that are in flight there are not waited for."""
    if device.type != "cuda":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


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


def _patches(picture: Picture, size: int) -> Tensor:
    """[rows, columns, size * size * 3]: each patch by row, column and colour."""
    rows, columns = picture.height // size, picture.width // size
    pixels = torch.frombuffer(bytearray(picture.pixels), dtype=torch.uint8)
    return pixels.view(rows, size, columns, size * 3).transpose(1, 2).reshape(rows, columns, -1)


def _by_cells(grid: Tensor, pooling: int) -> Tensor:
    """[rows, columns, values] -> [rows * columns, values], cell after cell."""
    rows, columns, values = grid.shape
    cells = grid.view(rows // pooling, pooling, columns // pooling, pooling, values)
    return cells.transpose(1, 2).reshape(-1, values)
