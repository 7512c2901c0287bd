"""GGUF's quantised blocks: bit for bit what the `gguf` package makes of them, and kept small."""

from __future__ import annotations

import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from flashdraft.errors import CheckpointError
from flashdraft.kernels.kinds import Scheme
from flashdraft.kernels.quantized import Quantized
from flashdraft.kernels.select import select_kernels
from flashdraft.models.gguf.blocks import unpack_blocks
from flashdraft.models.gguf.file import GGUFFile
from flashdraft.models.gguf.values import read_blocks, read_matrix, read_tensor
from flashdraft.models.loading import open_checkpoint
from flashdraft.models.registry import build_target
from tests.unit.models.gguf.factory import (
    EXPERTS,
    GEMMA4,
    LLAMA,
    Array,
    Types,
    gemma4_tensors,
    llama_tensors,
    random_values,
    write_gguf,
)
from tests.unit.models.gguf.test_file import ROPE_FREQS, gguf_names

# where a block keeps its float16 numbers
SCALES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
}
SCHEMES = {
    "Q2": Scheme.INT4,
    "Q3": Scheme.INT4,
    "IQ": Scheme.INT8,
    "Q4": Scheme.INT4,
    "Q5": Scheme.INT8,
    "Q6": Scheme.INT6,
    "Q8": Scheme.INT8,
}
EXTREMES = np.array(
    [0.0, -0.0, 65504, -65504, 6.1e-5, -6.1e-5, 6e-8, -6e-8, 5.5e-6, 1.0, -1.5, 0.0131],
    dtype=np.float16,
)


def random_blocks(kind: str, scales: Array, num_rows: int = 24, num_blocks: int = 3) -> Array:
    """Rows of blocks of random bytes, their float16 numbers drawn from `scales`."""
    generator = np.random.default_rng(7)
    block_bytes = gguf.GGML_QUANT_SIZES[Types[kind]][1]
    blocks = generator.integers(0, 256, (num_rows, num_blocks, block_bytes), dtype=np.uint8)
    for place in SCALES[kind]:
        drawn = generator.choice(scales, (num_rows, num_blocks, 1))
        blocks[..., place : place + 2] = drawn.view(np.uint8)
    return blocks.reshape(num_rows, -1)


def reference(blocks: Array, kind: str) -> Array:
    with np.errstate(all="ignore"):
        return gguf.quants.dequantize(blocks, Types[kind])


def count_differing(found: torch.Tensor, expected: Array) -> int:
    """How many values differ in a bit; what is no number is one kind."""
    values = found.numpy()
    assert values.shape == expected.shape and values.dtype == expected.dtype
    same = values.view(np.int32) == expected.view(np.int32)
    return int((~(same | (np.isnan(values) & np.isnan(expected)))).sum())


def assert_same_bits(found: torch.Tensor, expected: Array) -> None:
    assert count_differing(found, expected) == 0


def compare_blocks(kind: str) -> tuple[int, int]:
    """How many values of random blocks were compared with the package's, and how many differ."""
    usual = np.random.default_rng(1).standard_normal(64).astype(np.float16)
    compared = differing = 0
    for scales in (usual, EXTREMES, np.array([np.inf, -np.inf, np.nan, 0.0], dtype=np.float16)):
        blocks = random_blocks(kind, scales)
        coded = unpack_blocks(torch.from_numpy(blocks), kind)
        expected = reference(blocks, kind)
        compared += expected.size
        differing += count_differing(coded.dequantize(), expected)
        assert coded.scheme is SCHEMES[kind[:2]]
    return compared, differing


@pytest.mark.parametrize("kind", SCALES)
def test_every_bit_is_the_package_s(kind: str) -> None:
    compared, differing = compare_blocks(kind)
    assert compared > 0 == differing


@pytest.mark.parametrize("kind", SCALES)
def test_bytes_are_the_file_s_where_codes_stay_in_their_width(kind: str) -> None:
    blocks = random_blocks(kind, EXTREMES)
    coded = unpack_blocks(torch.from_numpy(blocks), kind)
    if kind in ("Q4_0", "Q4_1", "Q6_K", "Q8_0"):
        assert coded.num_bytes == blocks.nbytes
    else:  # two and three bits take four, five and levels eight, and small scales a byte
        assert blocks.nbytes < coded.num_bytes <= blocks.nbytes * 2


@pytest.mark.parametrize("kind", ["Q4_0", "Q6_K"])
def test_experts_are_unpacked_with_their_leading_dimension(kind: str) -> None:
    blocks = random_blocks(kind, EXTREMES)
    stacked = unpack_blocks(torch.from_numpy(blocks).view(4, 6, -1), kind)
    expected = reference(blocks, kind)
    assert_same_bits(stacked.dequantize(), expected.reshape(4, 6, -1))
    assert_same_bits(stacked.expert(1).dequantize(), expected[6:12])


@pytest.mark.parametrize("kind", SCALES)
def test_files_are_read_without_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    blocks = random_blocks(kind, EXTREMES)
    tensors = {"x": blocks, "row": blocks[:1].reshape(-1), "stack": blocks.reshape(2, 12, -1)}
    write_gguf(tmp_path / "m.gguf", "llama", {}, tensors, dict.fromkeys(tensors, Types[kind]))
    monkeypatch.setitem(sys.modules, "gguf", None)
    file = GGUFFile(tmp_path / "m.gguf")
    expected = reference(blocks, kind)
    assert_same_bits(read_tensor(file, "x"), expected)
    assert_same_bits(read_tensor(file, "row"), expected[0])
    assert torch.equal(read_blocks(file, "x"), torch.from_numpy(blocks))
    matrix, stack = read_matrix(file, "x"), read_matrix(file, "stack")
    assert isinstance(matrix, Quantized) and isinstance(stack, Quantized)
    assert_same_bits(matrix.dequantize(), expected)
    assert file.quantized_bytes("x") == file.quantized_bytes("stack") == matrix.num_bytes
    assert file.quantized_bytes("row") is None
    assert_same_bits(stack.dequantize(), expected.reshape(2, 12, -1))
    assert isinstance(read_matrix(file, "row"), torch.Tensor)  # what is no matrix becomes floats


def write_quantised_llama(path: Path, formats: dict[str, Types]) -> Path:
    named = gguf_names(llama_tensors(), "llama")
    kinds = {
        name: kind
        for name in named
        for part, kind in formats.items()
        if name.endswith(f"{part}.weight") and named[name].ndim > 1
    }
    return write_gguf(path, "llama", LLAMA, named, kinds)


MIXED = {
    "attn_q": Types.Q4_0,
    "attn_k": Types.Q4_0,
    "attn_v": Types.Q8_0,
    "ffn_up": Types.Q5_1,
    "ffn_down": Types.Q4_1,
    "token_embd": Types.Q8_0,
}


def test_matrices_stay_quantised_in_hub_order(tmp_path: Path) -> None:
    source = open_checkpoint(write_quantised_llama(tmp_path / "m.gguf", MIXED)).source
    quantised = set()
    for name in source.names():
        matrix, values = source.read_matrix(name, torch.device("cpu")), source.read(name)
        if isinstance(matrix, Quantized):
            quantised.add(name.split(".")[-2])
            matrix = matrix.dequantize()
        assert torch.equal(matrix, values), name
    assert quantised == {"q_proj", "k_proj", "v_proj", "up_proj", "down_proj", "embed_tokens"}


def test_gemma4_experts_stay_quantised(tmp_path: Path) -> None:
    factors = np.array([1.0] * 4 + [1e30] * 12, dtype=np.float32)
    named = {**gguf_names(gemma4_tensors(experts=True), "gemma4"), ROPE_FREQS: factors}
    kinds = {name: Types.Q4_0 for name in named if "ffn_gate_up_exps" in name}
    path = write_gguf(tmp_path / "m.gguf", "gemma4", {**GEMMA4, **EXPERTS}, named, kinds)
    source = open_checkpoint(path).source
    name = "model.layers.1.experts.gate_up_proj"
    matrix = source.read_matrix(name)
    assert isinstance(matrix, Quantized) and matrix.shape == source.shape(name) == (4, 48, 64)
    assert torch.equal(matrix.dequantize(), source.read(name))
    down = source.read_matrix("model.layers.1.experts.down_proj")
    assert isinstance(down, torch.Tensor)


@pytest.mark.parametrize("dtype", ["float32", "int8", "bfloat16"])
def test_a_backend_packs_quantised_parts_as_it_packs_their_values(
    tmp_path: Path, dtype: str
) -> None:
    source = open_checkpoint(write_quantised_llama(tmp_path / "m.gguf", MIXED)).source
    kernels = select_kernels("cpu", dtype)
    names = [f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkv"]
    x = torch.randn(3, 64).to(kernels.dtype)
    packed = kernels.pack(*(source.read_matrix(name) for name in names))
    whole = kernels.pack(torch.cat([source.read(name) for name in names]))
    assert torch.equal(kernels.linear(x, packed), kernels.linear(x, whole))
    matrix, ids = source.read_matrix("model.embed_tokens.weight"), torch.tensor([3, 31, 0])
    head = kernels.pack_head(matrix)
    values = source.read("model.embed_tokens.weight").to(kernels.dtype)
    for tied in (head, None):
        assert torch.equal(kernels.embed(ids, kernels.pack_embedding(matrix, tied)), values[ids])


def test_a_quantised_model_is_the_model_of_its_values(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_quantised_llama(tmp_path / "m.gguf", MIXED))

    class Floats:
        """The same file, every tensor as floats."""

        names, shape, read = (
            checkpoint.source.names,
            checkpoint.source.shape,
            checkpoint.source.read,
        )

        def read_matrix(self, name: str, device: torch.device | None = None) -> torch.Tensor:
            return checkpoint.source.read(name)

        def quantized_bytes(self, name: str) -> None:
            return None

    kernels = select_kernels("cpu", "float32")
    hidden, ids = torch.randn(2, 64), torch.tensor([5, 6])
    both = [
        build_target(checkpoint.config, source, kernels) for source in (checkpoint.source, Floats())
    ]
    first, second = ((target.logits(hidden), target.embed(ids)) for target in both)
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])


def test_a_quantised_tensor_cut_short_is_a_checkpoint_error(tmp_path: Path) -> None:
    path = write_gguf(
        tmp_path / "m.gguf", "llama", {}, {"x": random_values(4, 64)}, {"x": Types.Q4_0}
    )
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(CheckpointError, match="truncated: tensor 'x'"):
        GGUFFile(path)
