"""`quantization_config`: what is read, what is refused by name, and what is broken."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from flashdraft.errors import CheckpointError, UnsupportedModelError
from flashdraft.models.config.quantization import read_quantization
from flashdraft.models.config.target import ModelConfig
from flashdraft.models.drafter.opening import read_drafter_config
from flashdraft.models.loading import open_checkpoint
from tests import zoo
from tests.unit.models.test_compressed_tensors import (
    BLOCK_FP8,
    CHANNEL_8,
    CHANNEL_FP8,
    GROUP_4,
    config_of,
)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"quant_method": "gptq", "bits": 4}, "by GPTQ"),
        ({"quant_method": "awq"}, "by AWQ"),
        ({"quant_method": "bitsandbytes"}, "by bitsandbytes"),
        ({"quant_algo": "NVFP4"}, "'NVFP4'"),
        ({"bits": 4}, "'unnamed'"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "'e5m2'"),
        (config_of(GROUP_4, format="nvfp4-pack-quantized"), "'nvfp4-pack-quantized'"),
        (config_of(GROUP_4, format="marlin-24"), "'marlin-24'"),
        (config_of(GROUP_4, sparsity_config={"format": "sparse-24-bitmask"}), "sparse-24"),
        (config_of(GROUP_4, transform_config={"config_groups": {}}), "transforms"),
        (config_of(GROUP_4, quantization_status="frozen"), "'frozen'"),
        (config_of({**GROUP_4, "actorder": "group"}), "activation order"),
        (config_of({**GROUP_4, "num_bits": 3}), "int3 weights by group"),
        (config_of({**CHANNEL_FP8, "num_bits": 4}), "float4 weights by channel"),
        (config_of({**CHANNEL_FP8, "strategy": "tensor_group"}), "by tensor_group"),
        (config_of({**CHANNEL_8, "strategy": "block"}), "int8 weights by block"),
    ],
)
def test_unknown_schemes_are_named(said: dict[str, Any], message: str) -> None:
    config = said if "quantization_config" in said else {"quantization_config": said}
    with pytest.raises(UnsupportedModelError, match=f"{message}.*it reads weights of 4 or 8 bits"):
        read_quantization(config)
    with pytest.raises(UnsupportedModelError, match=message):
        ModelConfig.from_hf(zoo.CONFIGS["llama"] | config)
    with pytest.raises(UnsupportedModelError, match=message):  # a multimodal model's text part
        read_quantization({"text_config": config})


@pytest.mark.parametrize("part", ["input_activations", "output_activations"])
def test_rounded_activations_of_few_bit_weights_are_named(part: str) -> None:
    config = config_of(GROUP_4)
    config["quantization_config"]["config_groups"]["group_0"][part] = {"num_bits": 8, "type": "int"}
    with pytest.raises(UnsupportedModelError, match="activations of 8 bits.*int4 weights by group"):
        read_quantization(config)


def test_static_order_and_unquantised_groups_are_read() -> None:
    formats = read_quantization(config_of({**GROUP_4, "actorder": "static"}, GROUP_4))
    assert len(formats) == 1
    assert read_quantization({"quantization_config": None}) == read_quantization({}) == ()


@pytest.mark.parametrize(
    "said",
    [
        {"quant_method": "compressed-tensors"},
        {"quant_method": "compressed-tensors", "config_groups": 7},
        {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": "all"}}},
        config_of({**GROUP_4, "group_size": 0})["quantization_config"],
        config_of({**GROUP_4, "group_size": None})["quantization_config"],
        config_of({**GROUP_4, "num_bits": "four"})["quantization_config"],
        config_of({**GROUP_4, "type": ["int"]})["quantization_config"],
        config_of({**GROUP_4, "symmetric": "false"})["quantization_config"],
        config_of({**BLOCK_FP8, "block_structure": None})["quantization_config"],
        config_of({**BLOCK_FP8, "block_structure": [128, 0]})["quantization_config"],
        {"quant_method": "fp8", "weight_block_size": [1, 2, 3]},
        ["fp8"],
        "fp8",
    ],
)
def test_broken_configs_are_checkpoint_errors(tmp_path: Path, said: Any) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps(zoo.CONFIGS["llama"] | {"quantization_config": said})
    )
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="config of"):
        open_checkpoint(tmp_path)


def test_a_quantised_drafter_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_of(GROUP_4)))
    with pytest.raises(UnsupportedModelError, match="use it in bf16"):
        read_drafter_config(tmp_path)
