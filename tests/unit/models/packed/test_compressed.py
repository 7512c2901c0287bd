"""Checkpoints in compressed-tensors and plain fp8: values, whole models, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from flashdraft.errors import CheckpointError, UnsupportedModelError
from flashdraft.kernels.kinds import Scheme
from flashdraft.kernels.quantized import Quantized
from flashdraft.models.config.quantization import read_quantization
from flashdraft.models.config.target import ModelConfig
from flashdraft.models.files.safetensors import SafetensorsFiles
from flashdraft.models.loading import open_checkpoint
from flashdraft.models.packed.reading import CompressedTensors
from flashdraft.models.registry import build_target
from tests import zoo

GROUP_4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
CHANNEL_4 = {"num_bits": 4, "type": "int", "strategy": "channel", "symmetric": True}
CHANNEL_8 = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
CHANNEL_FP8 = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
TENSOR_FP8 = {**CHANNEL_FP8, "strategy": "tensor"}
BLOCK_FP8 = {**CHANNEL_FP8, "strategy": "block", "block_structure": [128, 128]}
DYNAMIC = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}


def config_of(*weights: dict[str, Any], **changes: Any) -> dict[str, Any]:
    groups = {
        f"group_{i}": {"targets": ["Linear"], "weights": one, "input_activations": None}
        for i, one in enumerate(weights)
    }
    said = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": ["lm_head"],
    }
    return {"quantization_config": {**said, **changes}}


def pack_words(codes: Tensor, bits: int) -> Tensor:
    """[rows, columns] of unsigned codes to int32 words, the lowest bits first, one by one."""
    per_word = 32 // bits
    rows = []
    for row in codes.tolist():
        row += [0] * (-len(row) % per_word)
        words = [
            sum(code << bits * place for place, code in enumerate(row[at : at + per_word]))
            for at in range(0, len(row), per_word)
        ]
        rows.append([word - 2**32 if word >= 2**31 else word for word in words])
    return torch.tensor(rows, dtype=torch.int32)


def random_codes(rows: int, depth: int, bits: int = 4, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2**bits, (rows, depth), generator=generator)


def random_scale(*shape: int) -> Tensor:
    return (torch.rand(shape, generator=torch.Generator().manual_seed(9)) + 0.5).bfloat16()


def packed(rows: int = 6, depth: int = 96, bits: int = 4) -> dict[str, Tensor]:
    return {
        "x.weight_packed": pack_words(random_codes(rows, depth, bits), bits),
        "x.weight_scale": random_scale(rows, depth // 32),
        "x.weight_shape": torch.tensor([rows, depth]),
    }


def opened(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> CompressedTensors:
    save_file(tensors, folder / "model.safetensors")
    files = SafetensorsFiles([folder / "model.safetensors"])
    return CompressedTensors(files, read_quantization(config))


def read(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> Quantized:
    source = opened(folder, tensors, config)
    assert list(source.names()) == ["x.weight"]
    matrix = source.read_matrix("x.weight", torch.device("cpu"))
    assert isinstance(matrix, Quantized) and matrix.shape == source.shape("x.weight")
    assert torch.equal(source.read("x.weight"), matrix.dequantize())
    assert source.quantized_bytes("x.weight") == matrix.num_bytes
    return matrix


@pytest.mark.parametrize("bits", [4, 8])
def test_packed_integers(tmp_path: Path, bits: int) -> None:
    tensors = packed(bits=bits)
    coded = read(tmp_path, tensors, config_of({**GROUP_4, "num_bits": bits}))
    assert coded.scheme is (Scheme.INT4 if bits == 4 else Scheme.INT8) and coded.group == 32
    codes = random_codes(6, 96, bits) - 2 ** (bits - 1)
    scale = tensors["x.weight_scale"].float().repeat_interleave(32, 1)
    assert torch.equal(coded.dequantize(), codes * scale)


def test_rows_that_do_not_fill_their_last_word(tmp_path: Path) -> None:
    tensors = packed() | {
        "x.weight_packed": pack_words(random_codes(3, 12), 4),
        "x.weight_scale": random_scale(3, 1),
        "x.weight_shape": torch.tensor([3, 12]),
    }
    coded = read(tmp_path, tensors, config_of(CHANNEL_4))
    assert coded.group == 12
    assert torch.equal(coded.dequantize(), (random_codes(3, 12) - 8) * random_scale(3, 1).float())


@pytest.mark.parametrize("bits", [4, 8])
def test_zero_points_are_packed_along_the_rows(tmp_path: Path, bits: int) -> None:
    rows, half = 19, 2 ** (bits - 1)  # 19 rows: the last word is not full
    points = random_codes(rows, 3, bits, seed=5)
    tensors = packed(rows, bits=bits)
    tensors["x.weight_zero_point"] = pack_words(points.T, bits).T.contiguous()
    weights = {**GROUP_4, "num_bits": bits, "symmetric": False}
    coded = read(tmp_path, tensors, config_of(weights))
    codes = random_codes(rows, 96, bits).float()
    spread = [tensors["x.weight_scale"].float(), (points - half).float()]
    scale, point = (one.repeat_interleave(32, 1) for one in spread)
    assert torch.equal(coded.dequantize(), (codes - half) * scale - scale * point)


@pytest.mark.parametrize("rows", [1, 4, 8])
@pytest.mark.parametrize("bits", [4, 8])
def test_zero_points_of_few_rows_fill_one_word(tmp_path: Path, bits: int, rows: int) -> None:
    points = random_codes(rows, 3, bits, seed=5)
    tensors = packed(rows, bits=bits)
    tensors["x.weight_zero_point"] = pack_words(points.T, bits).T.contiguous()
    coded = read(tmp_path, tensors, config_of({**GROUP_4, "num_bits": bits, "symmetric": False}))
    point = points.repeat_interleave(32, 1)
    scale = tensors["x.weight_scale"].float().repeat_interleave(32, 1)
    expected = (random_codes(rows, 96, bits) - point) * scale
    torch.testing.assert_close(coded.dequantize(), expected)


def test_groups_of_one_shape_are_told_apart_by_their_zero_points(tmp_path: Path) -> None:
    tensors = packed() | {name.replace("x.", "y."): one for name, one in packed().items()}
    tensors["y.weight_zero_point"] = pack_words(random_codes(6, 3, seed=5).T, 4).T.contiguous()
    source = opened(tmp_path, tensors, config_of({**GROUP_4, "symmetric": False}, GROUP_4))
    x, y = (source.read_matrix(name) for name in ("x.weight", "y.weight"))
    assert isinstance(x, Quantized) and x.minimum is None
    assert isinstance(y, Quantized) and y.minimum is not None


def fp8_weight(rows: int, depth: int) -> Tensor:
    generator = torch.Generator().manual_seed(4)
    return (torch.randn(rows, depth, generator=generator) * 50).to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("weights", "scale_shape"),
    [
        (TENSOR_FP8, ()),
        (TENSOR_FP8, (1,)),
        (CHANNEL_FP8, (40, 1)),
        (CHANNEL_FP8, (40,)),
    ],
)
def test_fp8_by_tensor_and_by_row(
    tmp_path: Path, weights: dict[str, Any], scale_shape: tuple[int, ...]
) -> None:
    tensors = {"x.weight": fp8_weight(40, 48), "x.weight_scale": random_scale(*scale_shape)}
    config = config_of(weights, format="float-quantized")
    group = config["quantization_config"]["config_groups"]["group_0"]
    group["input_activations"] = DYNAMIC  # activations are not rounded here
    coded = read(tmp_path, tensors | {"x.input_scale": torch.ones(1)}, config)
    scale = tensors["x.weight_scale"].float()
    expected = tensors["x.weight"].float() * (scale.reshape(-1, 1) if scale.ndim else scale)
    assert (coded.scheme, coded.group) == (Scheme.FP8, 48)
    assert torch.equal(coded.dequantize(), expected)


@pytest.mark.parametrize(
    ("rows", "depth", "group"), [(256, 256, 128), (200, 704, 64), (64, 2112, 64)]
)
@pytest.mark.parametrize("method", ["compressed-tensors", "fp8"])
def test_fp8_by_block(tmp_path: Path, rows: int, depth: int, group: int, method: str) -> None:
    scale = random_scale(-(-rows // 128), -(-depth // 128)).float()
    suffix, config = "weight_scale", config_of(BLOCK_FP8, format="float-quantized")
    if method == "fp8":
        suffix = "weight_scale_inv"
        config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    weight = fp8_weight(rows, depth)
    coded = read(tmp_path, {"x.weight": weight, f"x.{suffix}": scale}, config)
    spread = scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :depth]
    assert coded.group == group
    assert torch.equal(coded.dequantize(), weight.float() * spread)


def test_whole_bytes_by_row(tmp_path: Path) -> None:
    codes = (random_codes(5, 40, 8) - 128).to(torch.int8)
    tensors = {"x.weight": codes, "x.weight_scale": random_scale(5, 1)}
    coded = read(tmp_path, tensors, config_of(CHANNEL_8, format="int-quantized"))
    assert torch.equal(coded.dequantize(), codes * random_scale(5, 1).float())


def test_several_groups_are_told_apart_by_their_tensors(tmp_path: Path) -> None:
    tensors = packed() | {"y.weight": fp8_weight(8, 32), "y.weight_scale": random_scale(8, 1)}
    tensors |= {"z.weight": torch.ones(2, 2), "a.self_attn.k_scale": torch.ones(1)}
    source = opened(tmp_path, tensors, config_of(CHANNEL_FP8, GROUP_4, format="mixed-precision"))
    assert set(source.names()) == {"x.weight", "y.weight", "z.weight"}
    found = {name: source.read_matrix(name) for name in source.names()}
    x, y = found["x.weight"], found["y.weight"]
    assert isinstance(x, Quantized) and x.scheme is Scheme.INT4
    assert isinstance(y, Quantized) and y.scheme is Scheme.FP8
    assert torch.equal(source.read("z.weight"), torch.ones(2, 2))


# -- whole models ----------------------------------------------------------------------------------


def compress(weight: Tensor, kind: str) -> tuple[dict[str, Tensor], Tensor]:
    """A weight's stored tensors by suffix, and the values that they stand for."""
    largest = weight.abs().amax(1, keepdim=True)
    if kind == "fp8":
        scale = (largest / 448).bfloat16()
        codes = (weight / scale.float()).clamp(-448, 448).to(torch.float8_e4m3fn)
        return {"weight": codes, "weight_scale": scale}, codes.float() * scale.float()
    scale = (largest / 7).bfloat16()
    whole = (weight / scale.float()).round().clamp(-8, 7)
    stored = {
        "weight_packed": pack_words(whole.long() + 8, 4),
        "weight_scale": scale,
        "weight_shape": torch.tensor(weight.shape),
    }
    return stored, whole * scale.float()


def write_model(folder: Path, family: str, kind: str) -> tuple[Path, dict[str, Tensor]]:
    """A tiny model with compressed linears, experts one by one; and its values."""
    raw = zoo.CONFIGS[family]
    plain = zoo.random_tensors(ModelConfig.from_hf(raw))
    stored: dict[str, Tensor] = {}
    values = dict(plain)
    for name, tensor in plain.items():
        if name.endswith("_proj") and ".experts." in name:
            prefix = name.rpartition(".")[0]
            for index, expert in enumerate(tensor):
                kinds = ("gate", "up") if "gate_up" in name else ("down",)
                rows = len(expert) // len(kinds)
                for place, part in enumerate(kinds):
                    at = slice(place * rows, (place + 1) * rows)
                    tensors, found = compress(expert[at], kind)
                    values[name][index][at] = found
                    module = f"{prefix}.{index}.{part}_proj"
                    stored |= {f"{module}.{suffix}": one for suffix, one in tensors.items()}
        elif name.endswith("_proj.weight"):
            tensors, values[name] = compress(tensor, kind)
            module = name.removesuffix(".weight")
            stored |= {f"{module}.{suffix}": one for suffix, one in tensors.items()}
        else:
            stored[name] = tensor
    save_file({n: t.contiguous() for n, t in stored.items()}, folder / "model.safetensors")
    weights = CHANNEL_FP8 if kind == "fp8" else CHANNEL_4
    form = "float-quantized" if kind == "fp8" else "pack-quantized"
    config = raw | config_of(weights, format=form)
    (folder / "config.json").write_text(json.dumps(config))
    return folder, values


@pytest.mark.parametrize("family", ["llama", "gemma4", "gemma4_moe"])
@pytest.mark.parametrize("kind", ["int4", "fp8"])
def test_a_compressed_model_is_the_model_of_its_values(
    tmp_path: Path, family: str, kind: str
) -> None:
    folder, values = write_model(tmp_path, family, kind)
    checkpoint = open_checkpoint(folder)
    for name in checkpoint.source.names():
        assert torch.equal(checkpoint.source.read(name), values[name]), name
    matrices = [checkpoint.source.read_matrix(name) for name in values if "_proj" in name]
    assert all(isinstance(matrix, Quantized) for matrix in matrices)
    sizes = [checkpoint.source.quantized_bytes(name) for name in values if "_proj" in name]
    assert sizes == [one.num_bytes for one in matrices if isinstance(one, Quantized)]
    assert checkpoint.source.quantized_bytes("model.norm.weight") is None
    kernels = zoo.kernels("torch")
    source = zoo.Tensors(values)
    targets = [build_target(checkpoint.config, one, kernels) for one in (checkpoint.source, source)]
    hidden = torch.randn(3, checkpoint.config.hidden_size)
    first, second = (target.logits(hidden) for target in targets)
    assert torch.equal(first, second)
    packed_weights = [_packed_tensors(target) for target in targets]
    assert len(packed_weights[0]) == len(packed_weights[1]) > 10
    for left, right in zip(*packed_weights, strict=True):
        assert torch.equal(left, right)


def _packed_tensors(thing: Any, seen: set[int] | None = None) -> list[Tensor]:
    """Every tensor that hangs on a model's parts, in order."""
    seen = set() if seen is None else seen
    if isinstance(thing, Tensor):
        return [thing]
    if id(thing) in seen or isinstance(thing, type):
        return []
    seen.add(id(thing))
    if isinstance(thing, list | tuple):
        return [tensor for one in thing for tensor in _packed_tensors(one, seen)]
    return [
        t for one in getattr(thing, "__dict__", {}).values() for t in _packed_tensors(one, seen)
    ]


# -- what is refused -------------------------------------------------------------------------------


def test_an_activation_order_in_the_tensors_is_named(tmp_path: Path) -> None:
    tensors = packed() | {"x.weight_g_idx": torch.zeros(96, dtype=torch.int32)}
    with pytest.raises(UnsupportedModelError, match=r"activation order, 'x\.weight_g_idx'"):
        opened(tmp_path, tensors, config_of(GROUP_4))


def _without(*names: str) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in packed().items() if name not in names}


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (_without("x.weight_scale"), "'x.weight_packed' needs one scale"),
        (_without("x.weight_shape"), "needs one scale and, packed, its shape"),
        (packed() | {"x.weight_scale_inv": torch.ones(1)}, "needs one scale"),
        (packed() | {"x.weight": torch.zeros(6, 96)}, "are the same weight"),
        (packed() | {"x.weight_shape": torch.tensor([6, 96, 1])}, "two numbers"),
        (packed() | {"x.weight_shape": torch.tensor([6.0, 96.0])}, "stored as F32.*I64 or I32"),
        (packed() | {"x.weight_shape": torch.tensor([6, -96])}, r"shape \[6, -96\]"),
        (packed() | {"x.weight_shape": torch.tensor([6, 960])}, r"\[6, 960\] is stored as"),
        (packed() | {"x.weight_shape": torch.tensor([2**40, 96])}, "is stored as"),
        (packed() | {"x.weight_scale": random_scale(6, 4)}, r"with scales \[6, 4\]"),
        (packed() | {"x.weight_scale": random_scale(3, 3)}, r"int4 by group"),
        (packed() | {"x.weight_scale": torch.ones(6, 3).int()}, "stored as I32.*F16 or BF16"),
        (packed() | {"x.weight_scale": torch.full((6, 3), torch.nan)}, "not finite"),
        (packed() | {"x.weight_packed": torch.zeros(6, 12)}, "stored as F32.*I32"),
        (packed() | {"x.weight_zero_point": torch.zeros(6, 3).int()}, r"\[6, 3\]; \[1, 3\] fits"),
        (packed() | {"x.weight_zero_point": torch.zeros(1, 3)}, "zero_point.*stored as F32"),
    ],
)
def test_tensors_that_do_not_fit_are_checkpoint_errors(
    tmp_path: Path, tensors: dict[str, Tensor], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        opened(tmp_path, tensors, config_of(GROUP_4)).read("x.weight")


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (torch.zeros(40, 48).bfloat16(), "stored as BF16; it must be F8_E4M3 or I8"),
        (torch.zeros(40, 48).to(torch.float8_e5m2), "stored as F8_E5M2"),
        (torch.zeros(40, 48).to(torch.int8), "not what the config says .fp8 by channel"),
        (torch.zeros(40).to(torch.float8_e4m3fn), r"shape \[40\], no matrix's"),
    ],
)
def test_codes_that_do_not_fit_are_checkpoint_errors(
    tmp_path: Path, weight: Tensor, message: str
) -> None:
    tensors = {"x.weight": weight, "x.weight_scale": random_scale(40, 1)}
    with pytest.raises(CheckpointError, match=message):
        opened(tmp_path, tensors, config_of(CHANNEL_FP8, format="float-quantized")).read("x.weight")


@pytest.mark.parametrize(
    ("weights", "tensors"),
    [
        (GROUP_4, packed()),
        (
            CHANNEL_8,
            {"x.weight": torch.ones(6, 96, dtype=torch.int8), "x.weight_scale": torch.ones(6, 1)},
        ),
    ],
)
def test_an_asymmetric_weight_needs_its_zero_points(
    tmp_path: Path, weights: dict[str, Any], tensors: dict[str, Tensor]
) -> None:
    source = opened(tmp_path, tensors, config_of({**weights, "symmetric": False}))
    with pytest.raises(CheckpointError, match=r"no tensor 'x\.weight_zero_point'.*asymmetric"):
        source.shape("x.weight")


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_fp8_codes_that_are_no_numbers_are_checkpoint_errors(tmp_path: Path, code: int) -> None:
    codes = torch.zeros(40, 48, dtype=torch.uint8)
    codes[7, 5] = code
    tensors = {"x.weight": codes.view(torch.float8_e4m3fn), "x.weight_scale": random_scale(40, 1)}
    source = opened(tmp_path, tensors, config_of(CHANNEL_FP8, format="float-quantized"))
    with pytest.raises(CheckpointError, match=r"'x\.weight' holds NaN"):
        source.read_matrix("x.weight")


def test_a_scale_without_its_weight_is_left_over(tmp_path: Path) -> None:
    tensors = packed() | {"y.weight_scale": torch.ones(2, 1)}
    assert "y.weight_scale" in opened(tmp_path, tensors, config_of(GROUP_4)).names()


def test_experts_of_different_formats_are_refused(tmp_path: Path) -> None:
    folder, _ = write_model(tmp_path, "gemma4_moe", "int4")
    path = folder / "model.safetensors"
    files = SafetensorsFiles([path])
    tensors = {name: files.read(name).clone() for name in files.names()}
    module = "model.layers.0.experts.3.up_proj"
    for suffix in ("weight_packed", "weight_scale", "weight_shape"):
        del tensors[f"{module}.{suffix}"]
    save_file(tensors | {f"{module}.weight": torch.zeros(12, 32)}, path)
    source = open_checkpoint(folder).source
    with pytest.raises(CheckpointError, match=r"experts\.3\.up_proj\.weight.*different formats"):
        source.read_matrix("model.layers.0.experts.gate_up_proj")


def test_a_truncated_file_is_a_checkpoint_error(tmp_path: Path) -> None:
    folder, _ = write_model(tmp_path, "llama", "int4")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="truncated"):
        open_checkpoint(folder)
