"""What GPTQ, AWQ and ModelOpt write of their weights, in a config.json or in a file beside it.

They share one object of plain keys. Which weights are quantised is told by their tensors alone, so
lists of modules are not asked for. Any other key is read, changes nothing (keys.py) or is refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from flashdraft.errors import quoted
from flashdraft.kernels.kinds import Scheme
from flashdraft.models.config.keys import AWQ, GPTQ, MODELOPT, Reasons, listed
from flashdraft.models.config.values import ConfigObject, is_whole
from flashdraft.models.config.weight_format import Layout, WeightFormat, unsupported_weights, whole

Config = Mapping[str, Any]
# files that older versions write instead of a key of config.json, and the methods they stand for
FILES = {
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "hf_quant_config.json": "modelopt",
}
_GPTQ_LAYOUTS = {"gptq": Layout.GPTQ, "gptq_v2": Layout.GPTQ_V2}
_NVFP4_GROUP = 16


def from_file(method: str, content: Config) -> Config | None:
    """What such a file says, as config.json would; None where it says nothing of weights."""
    said = content.get("quantization") if method == "modelopt" else content
    if not isinstance(said, Mapping):
        return None
    tells = {"gptq": "bits", "awq": "w_bit", "modelopt": "quant_algo"}[method]
    return {**said, "quant_method": method} if said.get(tells) is not None else None


def finish(maker: str, said: ConfigObject, irrelevant: Reasons) -> None:
    """Refuse what was not asked for and may change a weight: a rotation, an adapter."""
    for key, value in said.left_over(listed(irrelevant)).items():
        raise unsupported_weights(f"{maker} with {quoted(key)} = {quoted(value)}")


def read_gptq(config: Config) -> WeightFormat:
    """GPTQ's, by AutoGPTQ or GPTQModel: codes and zero points packed along their columns."""
    said = ConfigObject(config)
    bits = _bits("by GPTQ", said, "bits", (4, 8))
    forms = [said.raw(key) for key in ("checkpoint_format", "format")]
    form = "marlin" if said.raw("is_marlin_format") else forms[0] or forms[1] or "gptq"
    if not isinstance(form, str) or form not in _GPTQ_LAYOUTS:
        raise unsupported_weights(f"by GPTQ in the format {quoted(form)}")
    _expect("by GPTQ in words of", said, "pack_dtype", "int32")
    _expect("by GPTQ as", said, "data_type", "int")
    others = said.raw("dynamic") or {}
    if not isinstance(others, Mapping) or any(not str(one).startswith("-") for one in others):
        raise unsupported_weights("by GPTQ with settings of their own for some modules (dynamic)")
    scheme = Scheme.INT4 if bits == 4 else Scheme.INT8
    symmetric, is_ordered = said.flag("sym", True), said.flag("desc_act")
    found = _by_group(scheme, said.raw("group_size"), symmetric, _GPTQ_LAYOUTS[form])
    finish("by GPTQ", said, GPTQ)
    return dataclasses.replace(found, is_ordered=is_ordered and found.group is not None)


def read_awq(config: Config) -> WeightFormat:
    """AWQ's, in the order of its "gemm" kernels: every eight rows of codes are interleaved."""
    said = ConfigObject(config)
    _bits("by AWQ", said, "bits" if "bits" in said else "w_bit", (4,))
    for key in ("version", "checkpoint_format", "format"):
        form = said.raw(key)
        if form is not None and str(form).lower() != "gemm":
            raise unsupported_weights(f"by AWQ in the {key} {quoted(form)}, not 'gemm'")
    _expect("by AWQ for the backend", said, "backend", "autoawq")
    _expect("by AWQ in words of", said, "pack_dtype", "int32")
    if said.flag("desc_act"):
        raise unsupported_weights("by AWQ in an activation order (desc_act)")
    symmetric = not said.flag("zero_point", True)
    size = said.raw("group_size" if "group_size" in said else "q_group_size")
    finish("by AWQ", said, AWQ)
    return _by_group(Scheme.INT4, size, symmetric, Layout.AWQ)


def read_modelopt(config: Config) -> WeightFormat:
    """ModelOpt's NVFP4, and its fp8 with one scale a tensor."""
    said = ConfigObject(config)
    algorithm, size = said.raw("quant_algo"), said.raw("group_size")
    if algorithm not in ("NVFP4", "FP8"):
        raise unsupported_weights(f"by ModelOpt as {quoted(algorithm)}")
    if algorithm == "NVFP4" and size not in (None, _NVFP4_GROUP):
        raise unsupported_weights(f"by ModelOpt as NVFP4 in groups of {quoted(size)}, not 16")
    finish("by ModelOpt", said, MODELOPT)
    return nvfp4() if algorithm == "NVFP4" else WeightFormat(Scheme.FP8, "tensor")


def nvfp4() -> WeightFormat:
    """NVFP4: values of 4 bits that, doubled, are whole numbers from -12 to 12, so kept in 8."""
    return WeightFormat(Scheme.INT8, "group", _NVFP4_GROUP, layout=Layout.NVFP4)


READERS: dict[str, Callable[[Config], WeightFormat]] = {
    "gptq": read_gptq,
    "awq": read_awq,
    "modelopt": read_modelopt,
    "modelopt_fp4": read_modelopt,
}


def _bits(maker: str, said: ConfigObject, key: str, allowed: tuple[int, ...]) -> int:
    bits = said.raw(key)
    if not isinstance(bits, int) or isinstance(bits, bool) or bits not in allowed:
        numbers = " or ".join(map(str, allowed))
        raise unsupported_weights(f"{maker} with {key} {quoted(bits)}, not {numbers}")
    return bits


def _expect(how: str, said: ConfigObject, key: str, only: str) -> None:
    if said.raw(key) not in (None, only):
        raise unsupported_weights(f"{how} {quoted(said.raw(key))}")


def _by_group(scheme: Scheme, size: Any, symmetric: bool, layout: Layout) -> WeightFormat:
    if size is None or (size == -1 and is_whole(size)):
        return WeightFormat(scheme, "channel", symmetric=symmetric, layout=layout)
    group = whole("group_size", size)
    return WeightFormat(scheme, "group", group, symmetric=symmetric, layout=layout)
