"""GGUF files as Hugging Face checkpoints: block formats, names, row order, config."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from flashdraft.errors import CheckpointError, UnsupportedModelError
from flashdraft.kernels.quantized import Quantized
from flashdraft.kernels.torch_backend import TorchKernels
from flashdraft.models.config.rope import RopeConfig, read_plain_rope
from flashdraft.models.config.values import ConfigObject
from flashdraft.models.gguf.file import GGUFFile
from flashdraft.models.gguf.values import read_tensor
from flashdraft.models.loading import open_checkpoint
from flashdraft.models.registry import build_target
from tests.unit.models.gguf.factory import (
    EXPERTS,
    GEMMA4,
    LLAMA,
    Array,
    Types,
    gemma3_tensors,
    gemma4_tensors,
    llama_tensors,
    random_values,
    small_gemma4_tensors,
    write_gguf,
)

ROPE_FREQS = "rope_freqs.weight"


def gguf_names(tensors: dict[str, Array], architecture: str) -> dict[str, Array]:
    """Hugging Face names to llama.cpp's, by the gguf package's own table."""
    kind = gguf.MODEL_ARCH[architecture.upper()]
    table = gguf.get_tensor_name_map(kind, 4)
    renamed = {}
    for name, values in tensors.items():
        layer = re.sub(r"\D", "", name.split(".")[2]) if ".layers." in name else ""
        if name.endswith("experts.gate_up_proj") and architecture == "qwen3moe":
            gate, up = np.split(values, 2, axis=1)
            renamed[f"blk.{layer}.ffn_gate_exps.weight"] = gate
            renamed[f"blk.{layer}.ffn_up_exps.weight"] = up
        elif name.endswith("router.scale"):
            renamed[f"blk.{layer}.ffn_gate_inp.scale"] = values
        elif name.endswith("per_expert_scale"):
            renamed[f"blk.{layer}.ffn_down_exps.scale"] = values
        else:
            if architecture == "qwen3moe":  # as the Hub has it
                name = name.replace("router.proj", "mlp.gate").replace("experts.d", "mlp.experts.d")
            stored = name if name.endswith((".weight", ".bias")) else name + ".weight"
            found = table.get_name(stored, try_suffixes=(".weight", ".bias"))
            assert found is not None, name
            renamed[found] = values
    return renamed


def interleave(values: Array, num_heads: int) -> Array:
    """The row order llama.cpp's converter gives the query and key weights of a Llama."""
    halves = values.reshape(num_heads, 2, values.shape[0] // num_heads // 2, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)


def write_llama(path: Path, **options: Any) -> dict[str, Array]:
    tensors = llama_tensors()
    stored = {
        name: interleave(values, 4 if "q_proj" in name else 2)
        if "q_proj" in name or "k_proj" in name
        else values
        for name, values in tensors.items()
    }
    extra = options.pop("extra_tensors", {})
    metadata = options.pop("metadata", LLAMA)
    write_gguf(path, "llama", metadata, {**gguf_names(stored, "llama"), **extra}, **options)
    return tensors


def write_gemma4(path: Path, experts: bool, **options: Any) -> dict[str, Array]:
    tensors = gemma4_tensors(experts)
    factors = np.array([1.0] * 4 + [1e30] * 12, dtype=np.float32)
    stored = {**gguf_names(tensors, "gemma4"), ROPE_FREQS: factors}
    metadata = options.pop("metadata", {**GEMMA4, **(EXPERTS if experts else {})})
    write_gguf(path, "gemma4", metadata, stored, **options)
    return tensors


def assert_same_tensors(path: Path, tensors: dict[str, Array]) -> None:
    source = open_checkpoint(path).source
    assert set(source.names()) == set(tensors)
    for name, values in tensors.items():
        assert source.shape(name) == values.shape
        assert np.array_equal(source.read(name).numpy(), values), name


def test_llama_rows_come_back_in_hub_order(tmp_path: Path) -> None:
    assert_same_tensors(tmp_path / "m.gguf", write_llama(tmp_path / "m.gguf"))


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "qwen3moe"])
def test_rows_of_qwen_stay(tmp_path: Path, architecture: str) -> None:
    tensors = llama_tensors(architecture)
    metadata = {**LLAMA, **(EXPERTS if architecture == "qwen3moe" else {})}
    path = write_gguf(
        tmp_path / "m.gguf", architecture, metadata, gguf_names(tensors, architecture)
    )
    assert_same_tensors(path, tensors)
    config = open_checkpoint(path).config
    assert config.qk_norm is (architecture != "qwen2")
    assert config.qkv_bias is (architecture == "qwen2") and not config.output_bias
    assert (config.experts is not None) is (architecture == "qwen3moe")


def test_gates_and_ups_of_experts_are_joined_in_few_bits(tmp_path: Path) -> None:
    tensors = gguf_names(llama_tensors("qwen3moe"), "qwen3moe")
    gates, ups = "blk.0.ffn_gate_exps.weight", "blk.0.ffn_up_exps.weight"
    formats = {gates: Types.Q8_0, ups: Types.Q8_0}
    path = tmp_path / "m.gguf"
    write_gguf(path, "qwen3moe", {**LLAMA, **EXPERTS}, tensors, formats)
    source, name = open_checkpoint(path).source, "model.layers.0.experts.gate_up_proj"
    matrix = source.read_matrix(name)
    assert isinstance(matrix, Quantized) and matrix.shape == source.shape(name) == (4, 48, 64)
    assert source.quantized_bytes(name) == 4 * 48 * 64 // 32 * 34
    assert torch.equal(matrix.dequantize(), source.read(name))
    formats[ups] = Types.Q4_0
    write_gguf(path, "qwen3moe", {**LLAMA, **EXPERTS}, tensors, formats)
    with pytest.raises(CheckpointError, match="different formats"):
        open_checkpoint(path).source.read_matrix(name)


def test_yarn_is_read(tmp_path: Path) -> None:
    changes = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 32,
    }
    write_llama(tmp_path / "m.gguf", metadata={**LLAMA, **changes})
    raw = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    expected = read_plain_rope(ConfigObject({"rope_parameters": raw}), 16, "X")
    assert open_checkpoint(tmp_path / "m.gguf").config.layers[0].rope == expected


def write_gemma3(path: Path, **changes: Any) -> dict[str, Array]:
    tensors = gemma3_tensors()
    stored = {
        name: values + np.float32(1) if name.endswith("norm.weight") else values
        for name, values in gguf_names(tensors, "gemma3").items()
    }
    tokens = {"tokenizer.ggml.tokens": ["<pad>", "<eos>", "<bos>", "<end_of_turn>"]}
    metadata = {**LLAMA, "attention.sliding_window": 8, "attention.key_length": 16, **changes}
    write_gguf(path, "gemma3", metadata, stored, general=tokens)
    return tensors


def test_norms_of_gemma3_count_from_one(tmp_path: Path) -> None:
    tensors = write_gemma3(tmp_path / "m.gguf")
    checkpoint = open_checkpoint(tmp_path / "m.gguf")
    assert set(checkpoint.source.names()) == set(tensors)
    for name, values in tensors.items():
        read = checkpoint.source.read(name).numpy()
        np.testing.assert_allclose(read, values, atol=3e-7 if "norm" in name else 0)
    assert checkpoint.config.norm_offset == 1.0


def test_gemma3_config(tmp_path: Path) -> None:
    scaled = {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0, "rope.freq_base": 1e6}
    write_gemma3(tmp_path / "m.gguf", **scaled)
    config = open_checkpoint(tmp_path / "m.gguf").config
    assert [layer.window for layer in config.layers] == [8, 8]  # every sixth is full
    assert config.layers[0].rope == RopeConfig(1e4, 16, 16)
    assert config.attention_scale == 0.25 and config.logit_softcap is None
    assert sorted(config.eos_token_ids) == [1, 3]
    write_gemma3(tmp_path / "m.gguf", final_logit_softcapping=30.0)
    with pytest.raises(UnsupportedModelError, match="final_logit_softcapping"):
        open_checkpoint(tmp_path / "m.gguf")


@pytest.mark.parametrize("experts", [False, True])
def test_gemma4_tensors(tmp_path: Path, experts: bool) -> None:
    assert_same_tensors(tmp_path / "m.gguf", write_gemma4(tmp_path / "m.gguf", experts))


SMALL_GEMMA4 = {
    **GEMMA4,
    "block_count": 4,
    "attention.head_count_kv": 2,
    "attention.sliding_window_pattern": [True, False, True, False],
    "attention.shared_kv_layers": 2,
    "embedding_length_per_layer_input": 8,
    "feed_forward_length": [96, 96, 192, 192],
}


def test_small_gemma4_with_inputs_of_every_layers_own(tmp_path: Path) -> None:
    tensors, path = small_gemma4_tensors(), tmp_path / "m.gguf"
    factors = np.array([1.0] * 4 + [1e30] * 12, dtype=np.float32)
    stored = {**gguf_names(tensors, "gemma4"), ROPE_FREQS: factors}
    write_gguf(path, "gemma4", SMALL_GEMMA4, stored)
    assert_same_tensors(path, tensors)
    checkpoint = open_checkpoint(path)
    config = checkpoint.config
    assert [layer.kv_source for layer in config.layers] == [None, None, 0, 1]
    assert [layer.intermediate_size for layer in config.layers] == [96, 96, 192, 192]
    assert config.per_layer is not None and config.per_layer.width == 8
    assert not any(layer.share_kv for layer in config.layers)
    # what transformers leaves out, some files have: the keys of layers that read another's
    spare = {"blk.2.attn_k.weight": random_values(32, 64)}
    write_gguf(path, "gemma4", SMALL_GEMMA4, {**stored, **spare})
    checkpoint = open_checkpoint(path)
    kernels = TorchKernels(torch.device("cpu"), torch.float32)
    assert build_target(checkpoint.config, checkpoint.source, kernels).config == config
    sizes = {**SMALL_GEMMA4, "feed_forward_length": [96, 192, 192, 192]}
    write_gguf(path, "gemma4", sizes, stored)
    with pytest.raises(UnsupportedModelError, match="feed_forward_length.*for the last 2"):
        open_checkpoint(path)


def test_llama_config(tmp_path: Path) -> None:
    write_llama(
        tmp_path / "m.gguf",
        general={
            "tokenizer.ggml.eos_token_id": 2,
            "tokenizer.ggml.eot_token_id": 3,
            "tokenizer.ggml.bos_token_id": 1,
            "general.sampling.temp": 0.5,
            "general.sampling.top_k": 64,
        },
    )
    checkpoint = open_checkpoint(tmp_path / "m.gguf")
    config = checkpoint.config
    assert (config.family, config.vocab_size, config.hidden_size) == ("llama", 32, 64)
    assert len(config.layers) == 2 and config.layers[0].head_dim == 16
    assert config.layers[0].num_kv_heads == 2 and not config.qk_norm
    assert config.norm_eps == pytest.approx(1e-5)
    assert config.tie_embeddings and config.max_position == 128
    assert config.eos_token_ids == (2, 3) and config.bos_token_id == 1
    assert checkpoint.generation_config == {"do_sample": True, "temperature": 0.5, "top_k": 64}


def test_untied_head(tmp_path: Path) -> None:
    head = random_values(32, 64, seed=99)
    write_llama(tmp_path / "m.gguf", extra_tensors={"output.weight": head})
    checkpoint = open_checkpoint(tmp_path / "m.gguf")
    assert not checkpoint.config.tie_embeddings
    assert np.array_equal(checkpoint.source.read("lm_head.weight").numpy(), head)


def test_biases_are_permuted_too(tmp_path: Path) -> None:
    bias = random_values(64, seed=7)
    write_llama(tmp_path / "m.gguf", extra_tensors={"blk.0.attn_q.bias": interleave(bias, 4)})
    checkpoint = open_checkpoint(tmp_path / "m.gguf")
    assert checkpoint.config.qkv_bias
    read = checkpoint.source.read("model.layers.0.self_attn.q_proj.bias")
    assert np.array_equal(read.numpy(), bias)


def llama3_divisors(factor: float) -> Array:
    """Llama 3.1's rule (low 1, high 4, 8192 original positions) for 8 frequencies of base 1e4."""
    wavelengths = 2 * np.pi * 10000.0 ** (np.arange(8) / 8)
    smooth = (8192 / wavelengths - 1) / 3
    middle = 1 / ((1 - smooth) / factor + smooth)
    values = np.where(wavelengths < 2048, 1.0, np.where(wavelengths > 8192, factor, middle))
    return values.astype(np.float32)


def test_llama3_rope_scaling_is_recognised(tmp_path: Path) -> None:
    divisors = llama3_divisors(32.0)
    write_llama(tmp_path / "m.gguf", extra_tensors={ROPE_FREQS: divisors})
    scaling = dict(open_checkpoint(tmp_path / "m.gguf").config.layers[0].rope.scaling)
    assert scaling["factor"] == 32.0 and scaling["original_max_position_embeddings"] == 8192
    divisors[2] *= 1.5
    write_llama(tmp_path / "m.gguf", extra_tensors={ROPE_FREQS: divisors})
    with pytest.raises(UnsupportedModelError, match="rope_freqs"):
        open_checkpoint(tmp_path / "m.gguf")


def test_gemma4_config(tmp_path: Path) -> None:
    tokens = ["<pad>", "<eos>", "<bos>", "<turn|>", "<|tool_response>", "a"]
    write_gemma4(
        tmp_path / "m.gguf",
        experts=True,
        general={"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.eos_token_id": 3},
    )
    config = open_checkpoint(tmp_path / "m.gguf").config
    sliding, full = config.layers
    assert (sliding.window, sliding.head_dim, sliding.num_kv_heads) == (8, 16, 2)
    assert (full.window, full.head_dim, full.num_kv_heads, full.share_kv) == (None, 32, 1, True)
    assert sliding.rope.theta == 1e4 and full.rope.theta == 1e6
    assert full.rope.rotary_dims == 8 and sliding.rope.rotary_dims == 16
    assert config.logit_softcap == 30.0 and config.embed_scale == 8.0
    assert config.experts is not None
    assert (config.experts.num_experts, config.experts.num_chosen) == (4, 2)
    assert config.experts.intermediate_size == 24
    assert sorted(config.eos_token_ids) == [1, 3, 4]  # all three, though the file names one


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_formats_the_package_can_write(tmp_path: Path, kind: str) -> None:
    values = random_values(6, 64)
    write_gguf(tmp_path / "m.gguf", "llama", {}, {"x": values}, {"x": Types[kind]})
    read = read_tensor(GGUFFile(tmp_path / "m.gguf"), "x")
    blocks = gguf.quants.quantize(values, Types[kind])
    assert np.array_equal(read.float().numpy(), gguf.quants.dequantize(blocks, Types[kind]))
    plain = {"F16": torch.float16, "BF16": torch.bfloat16}
    assert read.shape == (6, 64) and read.dtype == plain.get(kind, torch.float32)


def test_unsupported_format_is_named(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", "llama", {}, {"some.weight": np.zeros((2, 4), dtype=np.int32)})
    with pytest.raises(CheckpointError, match=r"some\.weight.*GGML type 26.*Q4_K"):
        GGUFFile(tmp_path / "m.gguf")


@pytest.mark.parametrize("kind", ["IQ3_S", "TQ1_0", "MXFP4"])
def test_unread_formats_have_their_names(tmp_path: Path, kind: str) -> None:
    stored = {"IQ3_S": 110, "TQ1_0": 54, "MXFP4": 17}
    blocks = np.zeros((2, stored[kind]), dtype=np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("some.weight", blocks, raw_dtype=Types[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=f"is stored as {kind}, which is not supported"):
        GGUFFile(tmp_path / "m.gguf")


def test_unknown_tensor_and_architecture(tmp_path: Path) -> None:
    write_llama(tmp_path / "m.gguf", extra_tensors={"blk.0.odd.weight": random_values(4)})
    with pytest.raises(CheckpointError, match=r"blk\.0\.odd\.weight"):
        open_checkpoint(tmp_path / "m.gguf")
    write_gguf(tmp_path / "m.gguf", "mamba", {}, {"x": random_values(4)})
    with pytest.raises(UnsupportedModelError, match="mamba.*llama, qwen2, qwen3, qwen3moe, gemma"):
        open_checkpoint(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("metadata", "error", "message"),
    [
        ({k: v for k, v in LLAMA.items() if k != "block_count"}, CheckpointError, "block_count"),
        ({**LLAMA, "attention.head_count": 0}, CheckpointError, "not valid"),
        ({**LLAMA, "embedding_length": "wide"}, CheckpointError, "not valid"),
        ({**LLAMA, "expert_count": 8}, UnsupportedModelError, "llama with 8 experts"),
        ({**LLAMA, "feed_forward_length": [96, 192]}, UnsupportedModelError, "differs"),
        (
            {**LLAMA, "rope.scaling.type": "longrope", "rope.scaling.factor": 4.0},
            UnsupportedModelError,
            "longrope",
        ),
    ],
)
def test_bad_metadata(
    tmp_path: Path, metadata: dict[str, Any], error: type[Exception], message: str
) -> None:
    write_llama(tmp_path / "m.gguf", metadata=metadata)
    with pytest.raises(error, match=message):
        open_checkpoint(tmp_path / "m.gguf")


def test_not_a_gguf_file(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"PK\x03\x04" + bytes(64))
    with pytest.raises(CheckpointError, match="not a GGUF file"):
        open_checkpoint(tmp_path / "m.gguf")
    with pytest.raises(CheckpointError, match="cannot be read"):
        open_checkpoint(tmp_path / "absent.gguf")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"attention.scale": 0.5}, "attention.scale"),
        ({"attention.sliding_window": 8}, "attention.sliding_window"),
        ({"attention.causal": False}, "attention.causal"),
        ({"attention.value_length": 8}, "value_length"),
        ({"rope.dimension_count": 8}, "rope.dimension_count"),
        ({"rope.scale_linear": 2.0}, "rope.scale_linear"),
        ({"rope.scaling.type": "yarn", "rope.scaling.yarn_ext_factor": 0.5}, "yarn_ext_factor"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"logit_scale": 0.1}, "logit_scale"),
        ({"residual_scale": 0.2}, "residual_scale"),
        ({"pooling_type": 3}, "pooling_type"),
        ({"use_parallel_residual": True}, "use_parallel_residual"),
    ],
)
def test_keys_that_change_something_are_refused(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    write_llama(tmp_path / "m.gguf", metadata={**LLAMA, **changes})
    with pytest.raises(UnsupportedModelError, match=words):
        open_checkpoint(tmp_path / "m.gguf")


def test_keys_that_change_nothing_pass(tmp_path: Path) -> None:
    write_llama(tmp_path / "m.gguf")
    spare = {
        "vocab_size": 32,
        "rope.dimension_count": 16,
        "attention.key_length": 16,
        "attention.value_length": 16,
        "attention.sliding_window": 128,
        "attention.causal": True,
        "expert_count": 0,
        "expert_used_count": 0,
        "logit_scale": 1.0,
        "rope.scaling.finetuned": False,
        "rope.scaling.original_context_length": 64,
        "pooling_type": 0,
    }
    write_llama(tmp_path / "n.gguf", metadata={**LLAMA, **spare})
    first, second = (open_checkpoint(tmp_path / name).config for name in ("m.gguf", "n.gguf"))
    assert first == second


def test_a_rope_factor_without_a_type_is_linear(tmp_path: Path) -> None:
    write_llama(tmp_path / "m.gguf", metadata={**LLAMA, "rope.scaling.factor": 4.0})
    rope = open_checkpoint(tmp_path / "m.gguf").config.layers[0].rope
    assert rope.scaling == (("factor", 4.0),)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}, "RoPE scaling"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({"rope.dimension_count_swa": 8}, "rope.dimension_count_swa"),
        ({"expert_gating_func": 2}, "expert_gating_func"),
    ],
)
def test_gemma4_keys_that_change_something_are_refused(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    write_gemma4(tmp_path / "m.gguf", False, metadata={**GEMMA4, **changes})
    with pytest.raises(UnsupportedModelError, match=words):
        open_checkpoint(tmp_path / "m.gguf")


def test_gemma4_placeholders_of_media_are_known_by_name(tmp_path: Path) -> None:
    names = ["<pad>", "<eos>", "<bos>", "<|image>", "<|image|>", "a", "<image|>", "<|audio|>"]
    tokens = [*names, *(f"t{i}" for i in range(24))]
    write_gemma4(tmp_path / "m.gguf", False, general={"tokenizer.ggml.tokens": tokens})
    assert open_checkpoint(tmp_path / "m.gguf").config.forbidden_token_ids == (3, 4, 6, 7)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_small_floats_are_read_without_torch(tmp_path: Path, kind: str) -> None:
    values = random_values(5, 32)
    path = write_gguf(tmp_path / "m.gguf", "llama", {}, {"x": values}, {"x": Types[kind]})
    file = GGUFFile(path)
    assert file.floats("x") == read_tensor(file, "x").flatten().tolist()


def test_other_tensors_are_no_small_floats(tmp_path: Path) -> None:
    tensors = {"x": random_values(2, 64), "y": random_values(2**11, 64)}
    path = write_gguf(tmp_path / "m.gguf", "llama", {}, tensors, {"x": Types.Q8_0})
    for name, message in (("x", "as Q8_0.*F32 or F16 or BF16"), ("y", r"\[2048, 64\].*at most")):
        with pytest.raises(CheckpointError, match=message):
            GGUFFile(path).floats(name)
