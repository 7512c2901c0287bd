"""Activations, and how weights are coded in few bits: names and sizes. No tensors, no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

from flashdraft.errors import RequestError

GROUPS = (128, 64, 32, 16)  # values that may share a scale, if not a whole row
FEW_BITS_STEP = 128  # values of a row of 4-bit codes that a GPU reads together
MAX_SPARE = 0.1  # of a row, filled up for that: 704 values become 768
FILLED_BITS = 6  # a value of such rows takes fewer, with its part of scales and minimums
_INTEGER_GROUP = 32  # unless another is asked for


class Activation(StrEnum):
    """The gate's activation function in a gated MLP."""

    SILU = "silu"
    GELU_TANH = "gelu_tanh"


class Scheme(StrEnum):
    """How a single value is coded."""

    INT4 = "int4"
    INT6 = "int6"
    INT8 = "int8"
    FP8 = "fp8"

    @property
    def bits(self) -> int:
        """What a code takes, packed."""
        return {"int4": 4, "int6": 6}.get(self.value, 8)


DTYPES = ("auto", "float32", "bfloat16", "float16", "int8")
QUANTIZE = (Scheme.INT4, Scheme.INT8, Scheme.FP8)  # what float weights can become on a GPU
ACTIVATIONS = (Scheme.FP8, Scheme.INT8)  # what rows can become before weights in the same bits


class WeightOptions(NamedTuple):
    """What a target's float weights become as they are loaded; None = what its files have."""

    quantize: str | None = None
    quantize_head: str | None = None  # the head, and a table tied to it
    activations: str | None = None  # what its rows become before linears; None: they stay floats

    def schemes(self) -> tuple[Scheme | None, Scheme | None]:
        """The same as schemes, or a RequestError."""
        whole = _read_scheme("quantize", self.quantize)
        return whole, _read_scheme("quantize_head", self.quantize_head)

    def rounded(self) -> Scheme | None:
        """What rows become, or a RequestError."""
        if self.activations is None:
            return None
        if self.activations not in ACTIVATIONS:
            known = ", ".join(ACTIVATIONS)
            raise RequestError(f"activations is {self.activations!r}; it must be one of {known}.")
        if self.quantize != self.activations:
            beside = "left out" if self.quantize is None else repr(self.quantize)
            raise RequestError(
                f"activations is {self.activations!r}, which goes with quantize="
                f"{self.activations!r}, but quantize is {beside}: tensor cores multiply rows and "
                "weights of the same 8 bits. Make them the same, or leave activations out."
            )
        return Scheme(self.activations)

    def describe(self) -> str:
        beside = "" if self.quantize_head in (None, self.quantize) else self.quantize_head
        rounded = f", activations {self.activations}" if self.activations else ""
        return (self.quantize or "as stored") + (f" (head {beside})" if beside else "") + rounded

    def flags(self) -> str:
        """What asks for them on the command line."""
        given = {
            "--quantize": self.quantize,
            "--quantize-head": self.quantize_head,
            "--activations": self.activations,
        }
        return " ".join(f"{flag} {value}" for flag, value in given.items() if value)


AS_STORED = WeightOptions()


def _read_scheme(name: str, value: str | None) -> Scheme | None:
    if value is None:
        return None
    if value not in QUANTIZE:
        raise RequestError(f"{name} is {value!r}; it must be one of {', '.join(QUANTIZE)}.")
    return Scheme(value)


def filled_depth(depth: int) -> int:
    """Of a row of 4-bit codes on a GPU: filled up to whole steps where that adds little."""
    spare = -depth % FEW_BITS_STEP
    return depth + spare if spare <= MAX_SPARE * depth else depth


def filled_bytes(shape: Sequence[int], num_bytes: int) -> int:
    """What so many bytes of codes and scales of this shape take on a GPU."""
    is_filled = len(shape) > 1 and 8 * num_bytes < FILLED_BITS * math.prod(shape)
    return num_bytes * filled_depth(shape[-1]) // shape[-1] if is_filled else num_bytes


def quantized_bytes(shape: Sequence[int], scheme: Scheme) -> int:
    """What `quantize` makes of a float weight of this shape, packed."""
    values, depth = math.prod(shape), shape[-1]
    scale_bytes = 4 if scheme is Scheme.FP8 else 2
    return values * scheme.bits // 8 + values // fitting_group(depth, scheme, None) * scale_bytes


def fitting_group(depth: int, scheme: Scheme, group: int | None) -> int:
    """How many values of a row share a scale: `group`, or the largest below it that divides."""
    if group is None and scheme is Scheme.FP8:
        return depth
    wanted = _INTEGER_GROUP if group is None else group
    if wanted not in GROUPS:
        allowed = ", ".join(str(size) for size in reversed(GROUPS))
        raise RequestError(f"The group is {wanted}; it must be one of {allowed}.")
    for size in GROUPS:
        if size <= wanted and depth % size == 0:
            return size
    raise RequestError(
        f"A weight has rows of {depth} values, which groups of {GROUPS[-1]} or more do not divide; "
        f"{scheme} cannot hold it. Leave it as it is, or use fp8."
    )
