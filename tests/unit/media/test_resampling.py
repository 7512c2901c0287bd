"""Resampled pixels, beside those of torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from flashdraft.media import resampling
from flashdraft.media.resampling import Bytes, Resampler


@pytest.fixture(params=["compiled", "numpy"], autouse=True)
def how(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "numpy":
        monkeypatch.setattr(resampling, "_native", None)
    elif resampling._native is None:
        pytest.skip("nothing was compiled")


def ours(pixels: Bytes, width: int, height: int) -> Bytes:
    across, down = Resampler(pixels.shape[1], width), Resampler(pixels.shape[0], height)
    return down.down(across.across(pixels))


def of_torch(pixels: Bytes, width: int, height: int) -> Bytes:
    planes = torch.from_numpy(pixels.transpose(2, 0, 1).copy())[None]
    found = torch.nn.functional.interpolate(
        planes, size=(height, width), mode="bicubic", antialias=True
    )
    return found[0].permute(1, 2, 0).numpy()


def noise(width: int, height: int, only_extremes: bool = False) -> Bytes:
    found = np.random.default_rng(width * 7 + height).integers(0, 256, (height, width, 3), np.uint8)
    return (found > 127).astype(np.uint8) * 255 if only_extremes else found


@pytest.mark.parametrize("only_extremes", [False, True])
@pytest.mark.parametrize(
    ("size", "new_size"),
    [
        ((640, 480), (912, 672)),
        ((1920, 1080), (528, 288)),
        ((1, 1), (768, 768)),
        ((900, 3), (3360, 48)),
        ((2, 4001), (48, 3360)),
        ((97, 101), (96, 96)),
        ((200, 96), (96, 96)),  # one side has its size already
        ((1000, 999), (48, 48)),
    ],
)
def test_every_pixel_is_that_of_torch(
    size: tuple[int, int], new_size: tuple[int, int], only_extremes: bool
) -> None:
    pixels = noise(*size, only_extremes)
    np.testing.assert_array_equal(ours(pixels, *new_size), of_torch(pixels, *new_size))


def test_any_size_is_that_of_torch() -> None:
    """No level differs. A weight that lies between two integers could make one differ by one."""
    chance = np.random.default_rng(0)
    for _ in range(60):
        size = tuple(int(side) for side in np.exp(chance.uniform(0, 6, 2)))
        new_size = tuple(int(side) for side in 12 * chance.integers(1, 30, 2))
        pixels = noise(*size)
        np.testing.assert_array_equal(ours(pixels, *new_size), of_torch(pixels, *new_size))


def test_the_same_size_changes_nothing() -> None:
    pixels = noise(48, 96)
    np.testing.assert_array_equal(ours(pixels, 48, 96), pixels)
