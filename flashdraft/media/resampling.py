"""Pixels made larger or smaller: bicubic with antialiasing, on bytes, as torch does it on a CPU.

Each pass weighs with integers of 16 bits and rounds to bytes. All sums are exact, in the compiled
passes (native/resample.c) and, where there was no compiler, in numpy's floats of 64 bits, so every
machine finds the same. It imports no torch.
"""

from __future__ import annotations

import functools
import importlib
import math
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

_native: Any
try:
    _native = importlib.import_module("flashdraft.media._resampling")
except ImportError:  # it is optional, as all that is compiled
    _native = None

Bytes = NDArray[np.uint8]

_SHARPNESS = -0.5  # of the cubic
_REACH = 2.0  # the cubic's, to either side, in pixels of the smaller line
_MAX_PRECISION = 22  # bits of a weight behind the point
_BLOCK = 16  # new pixels that one product makes
_LINES = 192  # of which one product makes them


class _Rule(NamedTuple):
    """What each new pixel is made of, in the order of the compiled passes."""

    first: NDArray[np.int32]  # old pixel
    counts: NDArray[np.int32]  # of old ones from there on
    weights: NDArray[np.int16]  # [new pixels, taps], whole numbers of 2^-precision
    precision: int


class _Product(NamedTuple):
    """Neighbouring new pixels, and the old ones that they are made of."""

    made: slice
    read: slice
    weights: NDArray[np.float64]  # [old pixels, new pixels]


class Resampler:
    """`size` pixels of a row, or rows of pixels, become `new_size` of them."""

    def __init__(self, size: int, new_size: int) -> None:
        self.size, self.new_size = size, new_size
        self._rule = _find_rule(size, new_size)

    def across(self, pixels: Bytes) -> Bytes:
        """Longer or shorter rows, [rows, new_size, 3], of [rows, size, 3]."""
        rows = len(pixels)
        if _native is None:
            lines = pixels.transpose(0, 2, 1).reshape(3 * rows, self.size)
            return self._weighed(lines).reshape(rows, 3, self.new_size).transpose(0, 2, 1)
        made = np.empty((rows, self.new_size, 3), np.uint8)
        _native.across(made, np.ascontiguousarray(pixels), rows, self.size, *self._rule)
        return made

    def down(self, pixels: Bytes) -> Bytes:
        """More or fewer rows, [new_size, width, 3], of [size, width, 3]."""
        columns, shape = 3 * pixels.shape[1], (self.new_size, *pixels.shape[1:])
        if _native is None:
            return self._weighed(pixels.reshape(self.size, columns).T).T.reshape(shape)
        made = np.empty(shape, np.uint8)
        _native.down(made, np.ascontiguousarray(pixels), columns, self.size, *self._rule)
        return made

    def _weighed(self, lines: Bytes) -> Bytes:
        """New lines, [lines, new_size], of old ones, [lines, size]."""
        made = np.empty((len(lines), self.new_size), np.uint8)
        exact = np.empty((min(len(lines), _LINES), self.size))  # one, for memory's sake
        for top in range(0, len(lines), _LINES):
            some = lines[top : top + _LINES]
            np.copyto(exact[: len(some)], some)
            for product in self._products:
                sums = exact[: len(some), product.read] @ product.weights
                sums += 0.5
                np.clip(sums, 0, 255, out=sums)
                made[top : top + len(some), product.made] = sums  # what is cut off rounds
        return made

    @functools.cached_property
    def _products(self) -> list[_Product]:
        edges = [*range(0, self.new_size, _BLOCK), self.new_size]
        return [_product(slice(*pair), self.size, self._rule) for pair in pairwise(edges)]


def _find_rule(size: int, new_size: int) -> _Rule:
    scale = size / new_size
    reach = _REACH * max(scale, 1.0)
    centers = scale * (np.arange(new_size) + 0.5)
    first = np.maximum((centers - reach + 0.5).astype(np.int64), 0)
    count = np.minimum((centers + reach + 0.5).astype(np.int64), size) - first
    taps = np.arange(2 * math.ceil(reach) + 1)
    distances = (taps + first[:, None] - centers[:, None] + 0.5) * min(1 / scale, 1.0)
    weights = np.where(taps < count[:, None], _cubic(np.abs(distances)), 0.0)
    weights /= np.cumsum(weights, axis=1)[:, -1:]  # added up from the left, for the last bit
    most, precision = float(weights.max()), 0
    while precision < _MAX_PRECISION and int(0.5 + most * 2 ** (precision + 1)) < 2**15:
        precision += 1
    scaled = weights * 2**precision
    whole = np.trunc(scaled + np.copysign(0.5, scaled)).astype(np.int16)
    return _Rule(first.astype(np.int32), count.astype(np.int32), whole, precision)


def _cubic(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Of distances, which are not negative."""
    a = _SHARPNESS
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    return np.where(x < 1, near, np.where(x < 2, far, 0.0))


def _product(made: slice, size: int, rule: _Rule) -> _Product:
    begins, counts = rule.first[made], rule.counts[made]
    begin, end = int(begins[0]), int((begins + counts).max())
    matrix = np.zeros((end - begin, len(begins)))
    for column, (start, count) in enumerate(zip(begins - begin, counts, strict=True)):
        matrix[start : start + count, column] = rule.weights[made][column, :count]
    return _Product(made, slice(begin, end), matrix * 2.0**-rule.precision)
