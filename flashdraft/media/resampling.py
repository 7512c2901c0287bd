"""Pixels made larger or smaller: bicubic with antialiasing, on bytes, as torch does it on a CPU.

Each pass weighs with integers of 16 bits and rounds to bytes. Floats of 64 bits hold all sums
exactly, so every machine finds the same. It imports no torch.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

_SHARPNESS = -0.5  # of the cubic
_REACH = 2.0  # the cubic's, to either side, in pixels of the smaller line
_MAX_PRECISION = 22  # bits of a weight behind the point
_BLOCK = 16  # new pixels that one product makes
_LINES = 192  # of which one product makes them


class _Product(NamedTuple):
    """Neighbouring new pixels, and the old ones that they are made of."""

    made: slice
    read: slice
    weights: NDArray[np.float64]  # [old pixels, new pixels]


class LineResampler:
    """Lines of `size` pixels become lines of `new_size`."""

    def __init__(self, size: int, new_size: int) -> None:
        self.new_size = new_size
        first, weights = _weights(size, new_size)
        edges = [*range(0, new_size, _BLOCK), new_size]
        self._products = [_product(slice(*pair), size, first, weights) for pair in pairwise(edges)]

    def apply(self, lines: Bytes) -> Bytes:
        """New lines, [lines, new_size], of old ones, [lines, size]."""
        made = np.empty((len(lines), self.new_size), np.uint8)
        exact = np.empty((min(len(lines), _LINES), lines.shape[1]))  # one, for memory's sake
        for top in range(0, len(lines), _LINES):
            some = lines[top : top + _LINES]
            np.copyto(exact[: len(some)], some)
            for product in self._products:
                sums = exact[: len(some), product.read] @ product.weights
                sums += 0.5
                np.clip(sums, 0, 255, out=sums)
                made[top : top + len(some), product.made] = sums  # what is cut off rounds
        return made


def _weights(size: int, new_size: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """For each new pixel the first old one and the weights from there on, [new_size, taps]."""
    scale = size / new_size
    reach = _REACH * max(scale, 1.0)
    centers = scale * (np.arange(new_size) + 0.5)
    first = np.maximum((centers - reach + 0.5).astype(np.int64), 0)
    last = np.minimum((centers + reach + 0.5).astype(np.int64), size)
    taps = np.arange(2 * math.ceil(reach) + 1)
    distances = (taps + first[:, None] - centers[:, None] + 0.5) * min(1 / scale, 1.0)
    weights = np.where(taps < (last - first)[:, None], _cubic(np.abs(distances)), 0.0)
    weights /= np.cumsum(weights, axis=1)[:, -1:]  # added up from the left, for the last bit
    most, precision = float(weights.max()), 0
    while precision < _MAX_PRECISION and int(0.5 + most * 2 ** (precision + 1)) < 2**15:
        precision += 1
    scaled = weights * 2**precision
    return first, np.trunc(scaled + np.copysign(0.5, scaled)) * 2.0**-precision


def _cubic(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Of distances, which are not negative."""
    a = _SHARPNESS
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    return np.where(x < 1, near, np.where(x < 2, far, 0.0))


def _product(
    made: slice, size: int, first: NDArray[np.int64], weights: NDArray[np.float64]
) -> _Product:
    rows, begins = weights[made], first[made]
    begin, end = int(begins[0]), min(int(begins[-1]) + weights.shape[1], size)
    matrix = np.zeros((end - begin, len(rows)))
    for column, (start, row) in enumerate(zip(begins - begin, rows, strict=True)):
        kept = row[: end - begin - start]
        matrix[start : start + len(kept), column] = kept
    return _Product(made, slice(begin, end), matrix)
