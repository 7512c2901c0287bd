"""How a group of weights lies in a checkpoint's safetensors: what a config says, in one form."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from flashdraft.errors import UnsupportedModelError, quoted
from flashdraft.kernels.kinds import Scheme

SUPPORTED = (
    "weights of 4 or 8 bits in compressed-tensors (int4 and int8 by group or channel, fp8 also by "
    "tensor or block, NVFP4), GPTQ, AWQ and ModelOpt's NVFP4 and fp8, the plain fp8 method, and "
    "GGUF files"
)


class Layout(StrEnum):
    """Whose tensors they are."""

    COMPRESSED = "compressed-tensors"  # and plain fp8
    GPTQ = "GPTQ"  # whose zero points are stored less one
    GPTQ_V2 = "GPTQ v2"
    AWQ = "AWQ"
    NVFP4 = "NVFP4"


@dataclass(frozen=True)
class WeightFormat:
    """How one group of a config stores its weights."""

    scheme: Scheme  # that they are kept in
    strategy: str  # tensor, channel, group or block
    group: int | None = None
    block: tuple[int, int] | None = None  # rows and columns under one scale
    symmetric: bool = True  # without zero points; a weight of an asymmetric format has them
    layout: Layout = Layout.COMPRESSED
    is_ordered: bool = False  # every weight has to say which group each of its columns belongs to

    def scale_shape(self, rows: int, depth: int) -> tuple[int, int] | None:
        """The scales that a weight of this shape has; None where it cannot be stored so."""
        if self.strategy == "tensor":
            return 1, 1
        if self.strategy == "channel":
            return rows, 1
        if self.block is not None:
            return -(-rows // self.block[0]), -(-depth // self.block[1])
        assert self.group is not None
        return None if depth % self.group else (rows, depth // self.group)

    def groups(self, depth: int) -> int:
        """How many scales a row has once they are spread."""
        if self.block is not None:
            return depth // math.gcd(self.block[1], depth)
        return 1 if self.group is None else depth // self.group


def whole(name: str, value: Any) -> int:
    """A size that a config states."""
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 2**31:
        raise ValueError(f"{name} is {quoted(value)}; it must be a whole number of at least 1")
    return value


def unsupported_weights(how: str) -> UnsupportedModelError:
    """An error that says how weights are stored, and what could be read instead."""
    return UnsupportedModelError(
        f"The weights are stored {how}, which flashdraft does not read; it reads {SUPPORTED}. Name "
        "the model that they were made from, or one of these; `flashdraft serve --engine` lets "
        "vLLM or SGLang read others."
    )
