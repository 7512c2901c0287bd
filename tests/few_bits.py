"""Tiny Llamas in every format of few bits, written without the tools that people make them with."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from flashdraft.models.config.target import ModelConfig
from tests import zoo
from tests.unit.models.gguf.factory import Array, Types, write_gguf

GROUP = 16
_WIDE = zoo.CONFIGS["llama"] | {"hidden_size": 256, "intermediate_size": 256}
# where a block keeps its float16 numbers: a scale, and a minimum where it has one
_HALVES = {"Q2_K": (80, 82), "Q3_K": (108,), "IQ4_NL": (0,), "IQ4_XS": (0,)}
_LARGEST = {"Q2_K": 24, "Q3_K": 90, "IQ4_NL": 110, "IQ4_XS": 3000}  # of a value, in its scale
Pack = Callable[[Tensor], dict[str, Tensor]]


def write_gguf_model(folder: Path, kind: str) -> Path:
    """A Llama whose matrices are random blocks."""
    config = ModelConfig.from_hf(_WIDE)
    generator = np.random.default_rng(3)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, len(config.layers))
    tensors: dict[str, Array] = {}
    formats = {}
    for name, values in zoo.random_tensors(config).items():
        stored = names.get_name(name, try_suffixes=(".weight",))
        assert stored is not None
        tensors[stored] = values.numpy()
        if name.endswith("_proj.weight"):
            tensors[stored] = _blocks(generator, kind, *values.shape)
            formats[stored] = Types[kind]
    sizes = {
        "block_count": len(config.layers),
        "context_length": _WIDE["max_position_embeddings"],
        "embedding_length": 256,
        "feed_forward_length": 256,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10000.0,
    }
    general = {"tokenizer.ggml.eos_token_id": 2}
    return write_gguf(folder / "m.gguf", "llama", sizes, tensors, formats, general)


def _blocks(generator: np.random.Generator, kind: str, rows: int, depth: int) -> Array:
    size, num_bytes = gguf.GGML_QUANT_SIZES[Types[kind]]
    blocks = generator.integers(0, 256, (rows, depth // size, num_bytes), dtype=np.uint8)
    scale = np.array(2.0 / depth**0.5 / _LARGEST[kind], dtype=np.float16).reshape(1).view(np.uint8)
    for place in _HALVES[kind]:
        blocks[..., place : place + 2] = scale
    return blocks.reshape(rows, -1)


def write_packed_model(folder: Path, kind: str) -> Path:
    """A Llama whose linears one of PACKERS packed."""
    raw = zoo.CONFIGS["llama"]
    (folder / "config.json").write_text(json.dumps(raw))
    save_file(zoo.random_tensors(ModelConfig.from_hf(raw)), folder / "model.safetensors")
    return pack_model(folder, kind)


def pack_model(folder: Path, kind: str) -> Path:
    """Have one of PACKERS pack the linears of a folder's model, in place."""
    said, pack = PACKERS[kind]
    raw = json.loads((folder / "config.json").read_text())
    stored: dict[str, Tensor] = {}
    for name, values in load_file(folder / "model.safetensors").items():
        module = name.removesuffix(".weight")
        packed = pack(values) if name.endswith("_proj.weight") else {"weight": values}
        stored |= {f"{module}.{part}": one.contiguous() for part, one in packed.items()}
    stored = {
        name.replace("norm.weight.weight", "norm.weight"): one for name, one in stored.items()
    }
    save_file(stored, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(raw | {"quantization_config": said}))
    return folder


def _words(codes: Tensor) -> Tensor:
    """[rows, columns] of 0 .. 15 to int32 [rows, columns / 8], the first code lowest."""
    shifts = torch.arange(0, 32, 4)
    words = (codes.long().unflatten(-1, (-1, 8)) << shifts).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).int()


def _code(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [out, in], scales and zero points [out, groups]."""
    groups = values.unflatten(-1, (-1, GROUP))
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    scale = ((high - low) / 15).half().float()
    zero = (-low / scale).round().clamp(1, 15)
    codes = (groups / scale[..., None] + zero[..., None]).round().clamp(0, 15)
    return codes.flatten(-2), scale.half(), zero


def _gptq(values: Tensor) -> dict[str, Tensor]:
    codes, scale, zero = _code(values)
    columns = torch.arange(values.shape[1], dtype=torch.int32)
    parts = {"qweight": _words(codes).T, "qzeros": _words(zero.T - 1), "scales": scale.T}
    return {**parts, "g_idx": columns // GROUP}


def _gptq_ordered(values: Tensor) -> dict[str, Tensor]:
    found = _gptq(values)
    return {**found, "g_idx": found["g_idx"].flip(0)}


def _awq(values: Tensor) -> dict[str, Tensor]:
    codes, scale, zero = _code(values)
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def interleaved(one: Tensor) -> Tensor:
        return _words(one.unflatten(-1, (-1, 8))[..., order].flatten(-2))

    return {"qweight": interleaved(codes.T), "qzeros": interleaved(zero.T), "scales": scale.T}


def _nvfp4(values: Tensor) -> dict[str, Tensor]:
    groups = values.unflatten(-1, (-1, GROUP))
    over = values.abs().max() / 6 / 448
    scale = (groups.abs().amax(-1) / 6 / over).to(torch.float8_e4m3fn)
    levels = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    wanted = groups / (scale.float() * over)[..., None]
    codes = (wanted.abs()[..., None] - levels).abs().argmin(-1) + 8 * (wanted < 0)
    pairs = codes.flatten(-2).unflatten(-1, (-1, 2)).byte()
    return {
        "weight": pairs[..., 0] | pairs[..., 1] << 4,
        "weight_scale": scale,
        "weight_scale_2": over,
    }


def _nvfp4_packed(values: Tensor) -> dict[str, Tensor]:
    found = _nvfp4(values)
    over = 1 / found["weight_scale_2"].reshape(1)
    parts = {"weight_packed": found["weight"], "weight_global_scale": over}
    return {**parts, "weight_scale": found["weight_scale"]}


_E2M1 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
_BY_GROUP = {"bits": 4, "group_size": GROUP}
PACKERS: dict[str, tuple[dict[str, Any], Pack]] = {
    "GPTQ": ({"quant_method": "gptq", **_BY_GROUP, "sym": False}, _gptq),
    "GPTQ, desc_act": (
        {"quant_method": "gptq", **_BY_GROUP, "sym": False, "desc_act": True},
        _gptq_ordered,
    ),
    "AWQ": ({"quant_method": "awq", **_BY_GROUP, "zero_point": True}, _awq),
    "NVFP4, ModelOpt": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, _nvfp4),
    "NVFP4, compressed-tensors": (
        {
            "quant_method": "compressed-tensors",
            "format": "nvfp4-pack-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": _E2M1}},
        },
        _nvfp4_packed,
    ),
}
GGUF_KINDS = tuple(_HALVES)


def write_model(folder: Path, kind: str) -> Path:
    """A tiny Llama in one of the formats of GGUF_KINDS or PACKERS."""
    write = write_gguf_model if kind in GGUF_KINDS else write_packed_model
    return write(folder, kind)
