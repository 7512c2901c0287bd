"""How a checkpoint says that its weights are stored in few bits: `quantization_config`.

It knows compressed-tensors' configs and the plain fp8 method, and refuses all others by name. The
tensors themselves are compressed_tensors.py's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flashdraft.errors import UnsupportedModelError, quoted, shortened
from flashdraft.kernels.kinds import Scheme
from flashdraft.models.config.values import require

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

QUANTIZERS = {  # quant_method, in words
    "gptq": "by GPTQ",
    "awq": "by AWQ",
    "bitsandbytes": "by bitsandbytes",
    "modelopt": "by ModelOpt",
    "modelopt_fp4": "by ModelOpt (NVFP4)",
    "mxfp4": "in MXFP4",
    "auto-round": "by AutoRound",
    "torchao": "by torchao",
    "exl2": "for ExLlamaV2",
    "exl3": "for ExLlamaV3",
}


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


def read_quantization(config: Mapping[str, Any]) -> tuple[WeightFormat, ...]:
    """The weight formats of a config.json; none for a checkpoint in floats."""
    text = config.get("text_config") or {}
    require(isinstance(text, Mapping), "text_config", text, "a JSON object")
    found = config.get("quantization_config") or text.get("quantization_config")
    found = found or config.get("quantization")  # MLX's own key
    if not found:
        return ()
    require(isinstance(found, Mapping), "quantization_config", found, "a JSON object")
    method = found.get("quant_method")
    if method == "compressed-tensors":
        return _compressed_tensors(found)
    if method == "fp8":
        return (_plain_fp8(found),)
    if method is None and "bits" in found and "group_size" in found:
        size = quoted(found["group_size"])
        raise unsupported_weights(f"by MLX ({quoted(found['bits'])} bits in groups of {size})")
    name = method or found.get("quant_algo") or "unnamed"
    how = f"in the quantisation method {quoted(name)}"
    raise unsupported_weights(QUANTIZERS.get(str(name), how))


def _compressed_tensors(config: Mapping[str, Any]) -> tuple[WeightFormat, ...]:
    groups = config.get("config_groups")
    is_groups = isinstance(groups, Mapping) and all(isinstance(g, Mapping) for g in groups.values())
    require(is_groups, "config_groups", groups, "an object of objects")
    assert groups is not None
    for name in (config.get("format"), *(group.get("format") for group in groups.values())):
        if name is not None and name not in FORMATS:
            raise unsupported_weights(f"as compressed-tensors in the format {quoted(name)}")
    sparsity = (config.get("sparsity_config") or {}).get("format", "dense")
    if sparsity != "dense":
        raise unsupported_weights(f"with sparsity ({quoted(sparsity)})")
    if config.get("transform_config"):
        raise unsupported_weights("as compressed-tensors with transforms of the activations")
    status = config.get("quantization_status", "compressed")
    if status != "compressed":
        raise unsupported_weights(
            f"as compressed-tensors with the status {quoted(status)}, not 'compressed'"
        )
    formats = [_weight_format(group) for group in groups.values() if group.get("weights")]
    return tuple(dict.fromkeys(formats))


def _weight_format(group: Mapping[str, Any]) -> WeightFormat:
    weights, inputs = group["weights"], group.get("input_activations")
    bits, kind = _whole("num_bits", weights.get("num_bits", 8)), weights.get("type", "int")
    size = weights.get("group_size")
    by_size = "tensor" if size is None else "channel" if size == -1 else "group"
    strategy = weights.get("strategy") or by_size
    label = f"{shortened(kind)}{bits} weights by {shortened(strategy)}"
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
    symmetric = weights.get("symmetric", True)
    if not isinstance(symmetric, bool):
        raise ValueError(f"symmetric is {quoted(symmetric)}; it must be true or false")
    group_size = _whole("group_size", size) if strategy == "group" else None
    return WeightFormat(schemes[kind, bits], strategy, group_size, block, symmetric)


def _plain_fp8(config: Mapping[str, Any]) -> WeightFormat:
    if config.get("fmt", "e4m3") != "e4m3":
        raise unsupported_weights(f"as fp8 in the format {quoted(config['fmt'])}")
    if config.get("weight_block_size") is None:
        return WeightFormat(Scheme.FP8, "tensor")
    return WeightFormat(Scheme.FP8, "block", block=_block(config["weight_block_size"]))


def _block(sizes: Any) -> tuple[int, int]:
    written = [int(size) for size in sizes.split("x")] if isinstance(sizes, str) else sizes
    height, width = (_whole("the size of a block", size) for size in written)
    return height, width


def _whole(name: str, value: Any) -> int:
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
