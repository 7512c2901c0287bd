"""How a checkpoint says that its weights are stored in few bits: `quantization_config`.

It knows compressed-tensors' configs and the plain fp8 method, GPTQ's, AWQ's and ModelOpt's are
quantizers.py's, and all others are refused by name: a key is read, changes nothing (keys.py) or is
refused likewise. The tensors themselves are models/packed's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flashdraft.errors import quoted, shortened
from flashdraft.kernels.kinds import Scheme
from flashdraft.models.config.keys import COMPRESSED, COMPRESSED_GROUP, COMPRESSED_WEIGHTS, FP8
from flashdraft.models.config.quantizers import READERS, finish, nvfp4
from flashdraft.models.config.values import ConfigObject, require
from flashdraft.models.config.weight_format import WeightFormat, unsupported_weights, whole

Formats = tuple[WeightFormat, ...]
FORMATS = (
    "pack-quantized",
    "float-quantized",
    "naive-quantized",
    "int-quantized",
    "mixed-precision",  # every group names its own
    "nvfp4-pack-quantized",
    "dense",
)

QUANTIZERS = {  # quant_method, in words
    "bitsandbytes": "by bitsandbytes",
    "mxfp4": "in MXFP4",
    "auto-round": "by AutoRound",
    "torchao": "by torchao",
    "exl2": "for ExLlamaV2",
    "exl3": "for ExLlamaV3",
}


def read_quantization(config: Mapping[str, Any]) -> Formats:
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
    if isinstance(method, str) and method in READERS:
        return (READERS[method](found),)
    if method is None and "bits" in found and "group_size" in found:
        size = quoted(found["group_size"])
        raise unsupported_weights(f"by MLX ({quoted(found['bits'])} bits in groups of {size})")
    name = method or found.get("quant_algo") or "unnamed"
    how = f"in the quantisation method {quoted(name)}"
    raise unsupported_weights(QUANTIZERS.get(str(name), how))


def _compressed_tensors(config: Mapping[str, Any]) -> Formats:
    said = ConfigObject(config)
    groups = said.raw("config_groups")
    is_groups = isinstance(groups, Mapping) and all(isinstance(g, Mapping) for g in groups.values())
    require(is_groups, "config_groups", groups, "an object of objects")
    assert groups is not None
    for name in (said.raw("format"), *(group.get("format") for group in groups.values())):
        if name is not None and name not in FORMATS:
            raise unsupported_weights(f"as compressed-tensors in the format {quoted(name)}")
    sparsity = (said.raw("sparsity_config") or {}).get("format", "dense")
    if sparsity != "dense":
        raise unsupported_weights(f"with sparsity ({quoted(sparsity)})")
    if said.raw("transform_config"):
        raise unsupported_weights("as compressed-tensors with transforms of the activations")
    status = said.raw("quantization_status") or "compressed"
    if status != "compressed":
        raise unsupported_weights(
            f"as compressed-tensors with the status {quoted(status)}, not 'compressed'"
        )
    finish("as compressed-tensors", said, COMPRESSED)
    formats = [_weight_format(group) for group in groups.values() if group.get("weights")]
    if len({form.layout for form in formats}) > 1:
        raise unsupported_weights("as compressed-tensors with NVFP4 beside other formats")
    return tuple(dict.fromkeys(formats))


def _weight_format(config: Mapping[str, Any]) -> WeightFormat:
    group, weights = ConfigObject(config), ConfigObject(config["weights"])
    inputs, outputs = group.raw("input_activations"), group.raw("output_activations")
    found, kind, size = (weights.raw(key) for key in ("num_bits", "type", "group_size"))
    bits, kind = whole("num_bits", 8 if found is None else found), kind or "int"
    by_size = "tensor" if size is None else "channel" if size == -1 else "group"
    strategy, order = weights.raw("strategy") or by_size, weights.raw("actorder")
    symmetric, sizes = weights.flag("symmetric", True), weights.raw("block_structure")
    label = f"{shortened(kind)}{bits} weights by {shortened(strategy)}"
    is_nvfp4 = (kind, bits, strategy, size) == ("float", 4, "tensor_group", 16)
    finish("as compressed-tensors", group, COMPRESSED_GROUP)
    finish(f"as {label}", weights, COMPRESSED_WEIGHTS)
    if is_nvfp4 and symmetric:
        return nvfp4()  # whatever its activations become elsewhere
    if order in (True, "group", "dynamic"):
        raise unsupported_weights(f"with an activation order ({label})")
    if outputs or (inputs and kind == "int" and bits < 8):
        rounded = (inputs or outputs).get("num_bits")
        raise unsupported_weights(f"for activations of {rounded} bits ({label})")
    schemes = {("int", 4): Scheme.INT4, ("int", 8): Scheme.INT8, ("float", 8): Scheme.FP8}
    is_known = strategy in ("tensor", "channel", "group") or (strategy, kind) == ("block", "float")
    if (kind, bits) not in schemes or not is_known:
        raise unsupported_weights(f"as {label}")
    block = _block(sizes) if strategy == "block" else None
    group_size = whole("group_size", size) if strategy == "group" else None
    return WeightFormat(schemes[kind, bits], strategy, group_size, block, symmetric)


def _plain_fp8(config: Mapping[str, Any]) -> WeightFormat:
    said = ConfigObject(config)
    form, sizes = said.raw("fmt") or "e4m3", said.raw("weight_block_size")
    if form != "e4m3":
        raise unsupported_weights(f"as fp8 in the format {quoted(form)}")
    finish("as fp8", said, FP8)
    if sizes is None:
        return WeightFormat(Scheme.FP8, "tensor")
    return WeightFormat(Scheme.FP8, "block", block=_block(sizes))


def _block(sizes: Any) -> tuple[int, int]:
    written = [int(size) for size in sizes.split("x")] if isinstance(sizes, str) else sizes
    height, width = (whole("the size of a block", size) for size in written)
    return height, width
