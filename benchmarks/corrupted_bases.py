"""Whole tiny checkpoints, one of every kind that is read, to be corrupted by corrupted_cases.py."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import tokenizers
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests import few_bits, tiny
from tests.unit.models.gguf.factory import write_gguf

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
TARGET = "llama"  # that the drafter folder is tried with
DRAFTER = "drafter"
_GROUP = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 16, "symmetric": True}
_GGUF_SIZES = {
    "block_count": 2,
    "context_length": 1024,
    "embedding_length": 32,
    "feed_forward_length": 64,
    "attention.head_count": 4,
}
_PACKED = {
    "gptq": "GPTQ",
    "gptq-ordered": "GPTQ, desc_act",
    "awq": "AWQ",
    "nvfp4": "NVFP4, ModelOpt",
}
_ROPE_DIVISORS = torch.tensor([1.0] * 4 + [1e30] * 12)  # of a quarter of 32 dimensions


@dataclass(frozen=True)
class Base:
    """A whole checkpoint: its folder, and its one file where it is a GGUF."""

    name: str
    folder: Path

    @property
    def model(self) -> Path:
        return next(self.folder.glob("*.gguf"), self.folder)


def build_bases(folder: Path) -> dict[str, Base]:
    """Write every kind below `folder`."""
    for name in ("llama", "qwen3", "gemma4", "gemma4-moe"):
        tiny.make_tiny_checkpoint(folder / name, name)
    _shard(folder / "qwen3")
    _split_experts(folder / "gemma4-moe")
    tiny.make_tiny_checkpoint(folder / "int4", "llama")
    _quantize(folder / "int4")
    for name, kind in _PACKED.items():  # with the tokenizer of a whole model
        tiny.make_tiny_checkpoint(folder / name, "llama")
        few_bits.pack_model(folder / name, kind)
    tiny.make_tiny_drafter(folder / DRAFTER)
    _write_llama_gguf(folder / "gguf", load_file(folder / "llama" / WEIGHTS))
    _write_gemma4_gguf(folder / "gguf-gemma4", load_file(folder / "gemma4" / WEIGHTS))
    return {path.name: Base(path.name, path) for path in sorted(folder.iterdir())}


def _shard(folder: Path) -> None:
    """Two shards and their index, sampling settings, and the template in a file of its own."""
    tensors = load_file(folder / WEIGHTS)
    names = sorted(tensors)
    shards = {f"model-0000{i + 1}-of-00002.safetensors": names[i::2] for i in range(2)}
    for file, members in shards.items():
        save_file({name: tensors[name] for name in members}, folder / file)
    weight_map = {name: file for file, members in shards.items() for name in members}
    _write_json(folder / INDEX, {"metadata": {"total_size": 1}, "weight_map": weight_map})
    (folder / WEIGHTS).unlink()
    settings = {"eos_token_id": [2, 0], "temperature": 0.7, "top_p": 0.9, "top_k": 20}
    _write_json(folder / "generation_config.json", {**settings, "do_sample": True})
    known = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "chat_template.jinja").write_text(known.pop("chat_template"))
    _write_json(folder / "tokenizer_config.json", known)
    _write_json(folder / "special_tokens_map.json", {"eos_token": {"content": "<|im_end|>"}})


def _split_experts(folder: Path) -> None:
    """Experts one by one, and a multimodal config around the text model's."""
    stored: dict[str, Tensor] = {}
    for name, tensor in load_file(folder / WEIGHTS).items():
        name = name.replace("model.", "model.language_model.", 1)
        prefix, found, kind = name.partition(".experts.")
        if not found:
            stored[name] = tensor
            continue
        kinds = ("gate", "up") if kind == "gate_up_proj" else ("down",)
        for expert, matrix in enumerate(tensor):
            for part, values in zip(kinds, matrix.chunk(len(kinds)), strict=True):
                stored[f"{prefix}.experts.{expert}.{part}_proj.weight"] = values.contiguous()
    save_file(stored, folder / WEIGHTS)
    text = json.loads((folder / "config.json").read_text())
    outer = {"model_type": "gemma4", "architectures": ["Gemma4ForConditionalGeneration"]}
    _write_json(folder / "config.json", {**outer, "eos_token_id": [2], "text_config": text})


def _quantize(folder: Path) -> None:
    """compressed-tensors: 4 bits in groups of 16, packed into words."""
    stored: dict[str, Tensor] = {}
    for name, tensor in load_file(folder / WEIGHTS).items():
        if not name.endswith("_proj.weight"):
            stored[name] = tensor
            continue
        rows, depth = tensor.shape
        groups = tensor.view(rows, -1, 16)
        scale = groups.abs().amax(-1) / 7
        codes = ((groups / scale.unsqueeze(-1)).round() + 8).clamp(0, 15).long()
        words = codes.view(rows, -1, 8) << torch.arange(0, 32, 4)
        module = name.removesuffix(".weight")
        total = words.sum(-1)
        stored[f"{module}.weight_packed"] = torch.where(total >= 2**31, total - 2**32, total).int()
        stored[f"{module}.weight_scale"] = scale.bfloat16()
        stored[f"{module}.weight_shape"] = torch.tensor([rows, depth])
    save_file(stored, folder / WEIGHTS)
    group = {"targets": ["Linear"], "weights": _GROUP, "input_activations": None}
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }
    _write_json(folder / "config.json", config)


def _write_llama_gguf(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    kinds = gguf.GGMLQuantizationType
    names = _gguf_names(tensors, gguf.MODEL_ARCH.LLAMA)
    formats = {
        name: kinds.Q8_0 if "ffn" in name else kinds.Q4_0
        for name in names
        if name.startswith("blk.") and "norm" not in name
    }
    folder.mkdir()
    settings = {
        **_GGUF_SIZES,
        "attention.head_count_kv": 2,
        "attention.key_length": 16,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 10000.0,
    }
    general = _tokenizer_keys("gpt2") | {"general.sampling.temp": 0.7}
    path = folder / "model.gguf"
    write_gguf(path, "llama", settings, names, formats, general)


def _write_gemma4_gguf(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    names = _gguf_names(tensors, gguf.MODEL_ARCH.GEMMA4)
    names["rope_freqs.weight"] = _ROPE_DIVISORS.numpy()
    folder.mkdir()
    settings = {
        **_GGUF_SIZES,
        "attention.head_count_kv": [2, 1],
        "attention.layer_norm_rms_epsilon": 1e-6,
        "attention.sliding_window_pattern": [True, False],
        "attention.sliding_window": 24,
        "attention.key_length": 32,
        "attention.key_length_swa": 16,
        "rope.freq_base": 1e6,
        "rope.freq_base_swa": 1e4,
        "final_logit_softcapping": 30.0,
    }
    write_gguf(folder / "model.gguf", "gemma4", settings, names, None, _tokenizer_keys("gemma4"))


def _gguf_names(tensors: Mapping[str, Tensor], kind: Any) -> dict[str, Any]:
    """Hugging Face names to llama.cpp's; the order of a head's rows is of no matter here."""
    table = gguf.get_tensor_name_map(kind, 2)
    renamed = {}
    for name, tensor in tensors.items():
        stored = name if name.endswith(".weight") else name + ".weight"
        renamed[str(table.get_name(stored, try_suffixes=(".weight",)))] = tensor.numpy()
    return renamed


def _tokenizer_keys(kind: str) -> dict[str, Any]:
    backend: tokenizers.Tokenizer = tiny.make_tiny_tokenizer()
    content = json.loads(backend.to_str())["model"]
    tokens = [backend.id_to_token(index) for index in range(tiny.VOCAB_SIZE)]
    if kind == "gemma4":
        tokens[3] = "<unk>"  # which this kind cannot do without
    return {
        "tokenizer.ggml.model": kind,
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": [" ".join(pair) for pair in content["merges"]],
        "tokenizer.ggml.token_type": [3] * 3 + [1] * (len(tokens) - 3),
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": tiny.END_OF_TURN,
        "tokenizer.chat_template": tiny.CHAT_TEMPLATE,
    }


def copy_base(base: Base, folder: Path) -> Base:
    """A copy to be corrupted."""
    shutil.copytree(base.folder, folder)
    return Base(base.name, folder)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2), encoding="utf-8")
