"""GPTQ, AWQ and NVFP4: weights packed by the tools' own code, bit for bit what that makes of them.

made_*.safetensors hold one small weight for each case, with the values that the tool's own code
dequantised to in float32; their metadata has the configs and the tools' versions.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from flashdraft.errors import CheckpointError
from flashdraft.kernels.kinds import Scheme
from flashdraft.kernels.quantized import Quantized
from flashdraft.models.config.quantization import read_quantization
from flashdraft.models.files.safetensors import SafetensorsFiles
from flashdraft.models.packed.opening import packed_table
from flashdraft.models.packed.reading import PackedTensors, packed_tensors

Case = tuple[dict[str, Tensor], dict[str, Any]]
FILES = sorted(Path(__file__).parent.glob("made_*.safetensors"))
TOOLS = {  # by what a case's name begins with: the package, and whose format it packs
    "AutoGPTQ": ("auto-gptq", "GPTQ"),
    "AutoAWQ": ("autoawq", "AWQ"),
    "GPTQModel": ("gptqmodel", "GPTQ"),
    "ModelOpt": ("nvidia-modelopt", ""),
    "compressed-tensors": ("compressed-tensors", ""),
}


def made() -> dict[str, Case]:
    """By tool: a weight's tensors, the values among them, and what the config says."""
    cases: dict[str, Case] = {}
    for path in FILES:
        with safe_open(path, framework="pt") as file:
            for name, config in json.loads(file.metadata()["configs"]).items():
                cases[name] = ({}, config)
            for key in file.keys():  # noqa: SIM118, which is no dict
                case, _, tensor = key.partition("|")
                cases[case][0][tensor] = file.get_tensor(key)
    return cases


MADE = made()
INTEGERS = [name for name in MADE if "NVFP4" not in name]


def opened(
    folder: Path, case: str, changes: Mapping[str, Tensor | None] | None = None, **said: Any
) -> PackedTensors:
    tensors, config = MADE[case]
    stored = {f"x.{key}": one for key, one in tensors.items() if key != "values"}
    for key, one in (changes or {}).items():
        stored.pop(f"x.{key}", None)
        if one is not None:
            stored[f"x.{key}"] = one
    save_file(stored, folder / "model.safetensors")
    files = SafetensorsFiles([folder / "model.safetensors"])
    formats = read_quantization({"quantization_config": config | said})
    bare, source = packed_table(files, formats), packed_tensors(files, formats)
    assert set(bare.names()) == set(source.names())
    for name in bare.names():
        assert bare.quantized_bytes(name) == source.quantized_bytes(name)
    return source


def count_differing(found: Tensor, expected: Tensor) -> int:
    """How many values differ in a bit, but for the sign of zeros."""
    assert found.shape == expected.shape and found.dtype == expected.dtype == torch.float32
    return int(((found + 0.0).view(torch.int32) != (expected + 0.0).view(torch.int32)).sum())


def same_values(found: Tensor, expected: Tensor) -> bool:
    return count_differing(found, expected) == 0


def compare_case(folder: Path, case: str) -> tuple[int, int]:
    """How many values were compared with the tool's, and how many differ."""
    values = MADE[case][0]["values"]
    return values.numel(), count_differing(opened(folder, case).read("x.weight"), values)


@pytest.mark.parametrize("case", MADE)
def test_values_are_the_tool_s_bit_for_bit(tmp_path: Path, case: str) -> None:
    assert compare_case(tmp_path, case) == (32 * 32, 0)
    source, values = opened(tmp_path, case), MADE[case][0]["values"]
    assert list(source.names()) == ["x.weight"] and source.shape("x.weight") == (32, 32)
    matrix = source.read_matrix("x.weight", torch.device("cpu"))
    if case.endswith("desc_act"):
        assert isinstance(matrix, Tensor) and source.quantized_bytes("x.weight") is None
        assert same_values(matrix, values)
        return
    assert isinstance(matrix, Quantized)
    assert same_values(matrix.dequantize(), values)
    assert torch.equal(source.read("x.weight"), matrix.dequantize())
    assert source.quantized_bytes("x.weight") == matrix.num_bytes
    wide = case == "AutoGPTQ 8" or "NVFP4" in case
    assert matrix.scheme is (Scheme.INT8 if wide else Scheme.INT4)
    # without zero points the kernels for few rows take it
    assert (matrix.minimum is None) == ("NVFP4" in case or case.endswith("sym"))


def test_groups_of_a_whole_row(tmp_path: Path) -> None:
    tensors, _ = MADE["AutoGPTQ 4"]
    one = {key: tensors[key][:1].clone() for key in ("scales", "qzeros")}
    source = opened(tmp_path, "AutoGPTQ 4", {**one, "g_idx": None}, group_size=-1)
    matrix = source.read_matrix("x.weight")
    assert isinstance(matrix, Quantized) and matrix.group == 32
    assert same_values(matrix.dequantize()[:, :16], tensors["values"][:, :16])


def test_an_activation_order_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = opened(tmp_path, "AutoGPTQ 4 desc_act")
    for _ in range(2):
        source.read_matrix("x.weight")
    assert caplog.text.count("activation order (desc_act)") == 1


@pytest.mark.parametrize("case", INTEGERS)
def test_a_bias_of_zeros_is_left_out(tmp_path: Path, case: str) -> None:
    source = opened(tmp_path, case, {"bias": torch.zeros(32, dtype=torch.float16)})
    assert list(source.names()) == ["x.weight"]
    source = opened(tmp_path, case, {"bias": torch.ones(32, dtype=torch.float16)})
    assert set(source.names()) == {"x.weight", "x.bias"}


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        ("AutoAWQ", {"scales": None}, r"'x\.qweight' needs scales and qzeros; .* has 'x\.qzeros'"),
        ("AutoAWQ", {"qzeros": torch.zeros(2, 5).int()}, r"shape \[2, 5\]; \[2, 4\] fits"),
        ("AutoAWQ", {"qzeros": torch.zeros(2, 4)}, "stored as F32; it must be I32"),
        ("AutoAWQ", {"scales": torch.ones(3, 32)}, r"shape \[3, 32\]; \[2, 32\] fits"),
        ("AutoAWQ", {"scales": torch.full((2, 32), torch.inf)}, "not finite"),
        (
            "AutoAWQ",
            {"scales": torch.full((2, 32), 3e38)},
            r"'x\.scales' holds scales .* above 3\.32e",
        ),
        ("AutoGPTQ 4 desc_act", {"scales": torch.full((2, 32), -3e38)}, "above 3.32e"),
        (
            "ModelOpt NVFP4",
            {"weight_scale_2": torch.tensor(3e35)},
            r"'x\.weight_scale' and 'x\.weight_scale_2' make scales that are not finite",
        ),
        ("ModelOpt NVFP4", {"weight_scale_2": torch.tensor(3e38)}, "above 3.32e"),
        (
            "compressed-tensors NVFP4",
            {"weight_global_scale": torch.full((1,), 1e-38)},
            r"'x\.weight_global_scale' make scales that are not finite",
        ),
        ("AutoAWQ", {"qweight": torch.zeros(32).int()}, r"shape \[32\], no matrix's"),
        ("AutoAWQ", {"qweight": torch.zeros(24, 4).int()}, "rows of 24 values; groups of 16"),
        ("AutoGPTQ 4", {"qweight": torch.zeros(4, 32)}, "stored as F32; it must be I32"),
        ("AutoGPTQ 4", {"g_idx": torch.zeros(31).int()}, r"shape \[31\]; \[32\] fits"),
        ("AutoGPTQ 4", {"g_idx": torch.full((32,), 2).int()}, "groups from 2 to 2; .* has 2"),
        ("AutoGPTQ 4", {"g_idx": torch.full((32,), -1).int()}, "groups from -1 to -1"),
        ("AutoGPTQ 4 desc_act", {"g_idx": None}, r"needs 'x\.g_idx', which the checkpoint lacks"),
        ("AutoGPTQ 4", {"weight": torch.zeros(2, 2)}, "are the same weight"),
        ("ModelOpt NVFP4", {"weight_scale_2": None}, r"needs .* and 'x\.weight_scale_2'; of these"),
        ("ModelOpt NVFP4", {"weight_scale_2": torch.ones(2)}, "must hold one number"),
        ("ModelOpt NVFP4", {"weight_scale_2": torch.tensor(torch.nan)}, "not finite"),
        ("ModelOpt NVFP4", {"weight": torch.zeros(32, 16).char()}, "stored as I8; it must be U8"),
        ("ModelOpt NVFP4", {"weight": torch.zeros(32, 12).byte()}, "whole groups of 8 bytes"),
        ("ModelOpt NVFP4", {"weight_scale": torch.ones(32, 2)}, "stored as F32.* F8_E4M3"),
        (
            "ModelOpt NVFP4",
            {"weight_scale": torch.full((32, 2), 0x7F).byte().view(torch.float8_e4m3fn)},
            "not finite",
        ),
        (
            "compressed-tensors NVFP4",
            {"weight_global_scale": torch.zeros(1)},
            "is 0; scales are divided by it",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_checkpoint_errors(
    tmp_path: Path, case: str, changes: dict[str, Tensor | None], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        opened(tmp_path, case, changes).read_matrix("x.weight")
