"""How a checkpoint says that its weights are stored in few bits: `quantization_config`.

It knows compressed-tensors' configs and the plain fp8 method, and refuses all others by name. The
tensors themselves are compressed_tensors.py's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from flashdraft.errors import UnsupportedModelError
from flashdraft.kernels.quantized import Scheme

SUPPORTED = (
    "weights of 4 or 8 bits in compressed-tensors (int4 and int8 by group or channel, fp8 also by "
    "tensor or block), the plain fp8 method, and GGUF files"
)
FORMATS = (
    "pack-quantized",
    "float-quantized",
    "naive-quantized",
    "int-quantized",
    "mixed-precision",  # every group names its own
    "dense",
)


@dataclass(frozen=True)
class WeightFormat:
    """How one group of a config stores its weights."""

    scheme: Scheme
    strategy: str  # tensor, channel, group or block
    group: int | None = None
    block: tuple[int, int] | None = None  # rows and columns under one scale
    symmetric: bool = True  # without zero points; a weight of an asymmetric format has them

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

    def spread(self, scale: Tensor, rows: int, depth: int) -> tuple[Tensor, int]:
        """Scales for every row, and how many values of it share one."""
        if self.block is None:
            scale = scale.expand(rows, -1).contiguous()
            return scale, depth // scale.shape[1]
        # the last block may stick out: its columns are cut where a smaller group divides the row
        height, width = self.block
        group = math.gcd(width, depth)
        scale = scale.repeat_interleave(height, 0)[:rows].repeat_interleave(width // group, 1)
        return scale[:, : depth // group].contiguous(), group


def read_quantization(config: Mapping[str, Any]) -> tuple[WeightFormat, ...]:
    """The weight formats of a config.json; none for a checkpoint in floats."""
    text = config.get("text_config") or {}
    found = config.get("quantization_config") or text.get("quantization_config")
    if not found:
        return ()
    method = found.get("quant_method")
    if method == "compressed-tensors":
        return _compressed_tensors(found)
    if method == "fp8":
        return (_plain_fp8(found),)
    name = method or found.get("quant_algo") or "unnamed"
    raise unsupported_weights(f"in the quantisation method {name!r}")


def _compressed_tensors(config: Mapping[str, Any]) -> tuple[WeightFormat, ...]:
    groups = dict(config["config_groups"])
    for name in (config.get("format"), *(group.get("format") for group in groups.values())):
        if name is not None and name not in FORMATS:
            raise unsupported_weights(f"as compressed-tensors in the format {name!r}")
    sparsity = (config.get("sparsity_config") or {}).get("format", "dense")
    if sparsity != "dense":
        raise unsupported_weights(f"with sparsity ({sparsity!r})")
    if config.get("transform_config"):
        raise unsupported_weights("as compressed-tensors with transforms of the activations")
    status = config.get("quantization_status", "compressed")
    if status != "compressed":
        raise unsupported_weights(
            f"as compressed-tensors with the status {status!r}, not 'compressed'"
        )
    formats = [_weight_format(group) for group in groups.values() if group.get("weights")]
    return tuple(dict.fromkeys(formats))


def _weight_format(group: Mapping[str, Any]) -> WeightFormat:
    weights, inputs = group["weights"], group.get("input_activations")
    bits, kind = int(weights.get("num_bits", 8)), weights.get("type", "int")
    size = weights.get("group_size")
    by_size = "tensor" if size is None else "channel" if size == -1 else "group"
    strategy = weights.get("strategy") or by_size
    label = f"{kind}{bits} weights by {strategy}"
    if weights.get("actorder") in (True, "group", "dynamic"):
        raise unsupported_weights(f"with an activation order ({label})")
    if group.get("output_activations") or (inputs and kind == "int" and bits < 8):
        rounded = (inputs or group.get("output_activations") or {}).get("num_bits")
        raise unsupported_weights(f"for activations of {rounded} bits ({label})")
    schemes = {("int", 4): Scheme.INT4, ("int", 8): Scheme.INT8, ("float", 8): Scheme.FP8}
    is_known = strategy in ("tensor", "channel", "group") or (strategy, kind) == ("block", "float")
    if (kind, bits) not in schemes or not is_known:
        raise unsupported_weights(f"as {label}")
    block = _block(weights.get("block_structure")) if strategy == "block" else None
    if strategy == "group" and int(size) < 1:
        raise ValueError(f"group_size is {size}; it must be at least 1")
    symmetric = weights.get("symmetric", True)
    if not isinstance(symmetric, bool):
        raise ValueError(f"symmetric is {symmetric!r}; it must be true or false")
    group_size = int(size) if strategy == "group" else None
    return WeightFormat(schemes[kind, bits], strategy, group_size, block, symmetric)


def _plain_fp8(config: Mapping[str, Any]) -> WeightFormat:
    if config.get("fmt", "e4m3") != "e4m3":
        raise unsupported_weights(f"as fp8 in the format {config['fmt']!r}")
    if config.get("weight_block_size") is None:
        return WeightFormat(Scheme.FP8, "tensor")
    return WeightFormat(Scheme.FP8, "block", block=_block(config["weight_block_size"]))


def _block(sizes: Any) -> tuple[int, int]:
    height, width = (int(size) for size in (sizes.split("x") if isinstance(sizes, str) else sizes))
    if height < 1 or width < 1:
        raise ValueError(f"the blocks of a weight are {height}x{width}")
    return height, width


def unsupported_weights(how: str) -> UnsupportedModelError:
    """An error that says how weights are stored, and what could be read instead."""
    return UnsupportedModelError(
        f"The weights are stored {how}, which flashdraft does not read; it reads {SUPPORTED}."
    )
