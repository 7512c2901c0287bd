"""`quantization_config`: what is read, what is refused by name, and what is broken."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from flashdraft.errors import CheckpointError, UnsupportedModelError
from flashdraft.kernels.kinds import Scheme
from flashdraft.models.config.quantization import read_quantization
from flashdraft.models.config.quantizers import nvfp4
from flashdraft.models.config.target import ModelConfig
from flashdraft.models.config.weight_format import Layout, WeightFormat
from flashdraft.models.drafter.opening import read_drafter_config
from flashdraft.models.loading import open_checkpoint
from flashdraft.models.stored import read_target_config
from tests import zoo
from tests.unit.models.packed.test_compressed import (
    BLOCK_FP8,
    CHANNEL_8,
    CHANNEL_FP8,
    GROUP_4,
    config_of,
)

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}
NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
E2M1 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"quant_method": "gptq"}, "by GPTQ with bits None, not 4 or 8"),
        ({"quant_method": "gptq", "bits": 3}, "by GPTQ with bits 3, not 4 or 8"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "by GPTQ in the format 'marlin'"),
        ({**GPTQ, "is_marlin_format": True}, "by GPTQ in the format 'marlin'"),
        ({**GPTQ, "pack_dtype": "int64"}, "by GPTQ in words of 'int64'"),
        ({**GPTQ, "dynamic": {"+:.*": {"bits": 8}}}, r"for some modules \(dynamic\)"),
        ({**GPTQ, "bits": 4.0}, "by GPTQ with bits 4.0, not 4 or 8"),
        ({**GPTQ, "rotation": "hadamard"}, "by GPTQ with 'rotation' = 'hadamard'"),
        ({**GPTQ, "adapter": {"rank": 8}}, "by GPTQ with 'adapter' = {'rank': 8}"),
        ({**GPTQ, "a_key_of_tomorrow": 2}, "by GPTQ with 'a_key_of_tomorrow' = 2"),
        ({"quant_method": "awq", "bits": True}, "by AWQ with bits True, not 4"),
        ({**AWQ, "bits": 4.0}, "by AWQ with bits 4.0, not 4"),
        ({**AWQ, "desc_act": True}, r"by AWQ in an activation order .desc_act"),
        ({**AWQ, "checkpoint_format": "gemv_fast"}, "the checkpoint_format 'gemv_fast'"),
        ({**AWQ, "rotation": "hadamard"}, "by AWQ with 'rotation'"),
        ({**NVFP4, "pre_quant_scale": True}, "by ModelOpt with 'pre_quant_scale' = True"),
        ({**AWQ, "version": "gemv"}, "by AWQ in the version 'gemv'"),
        ({**AWQ, "backend": "llm-awq"}, "for the backend 'llm-awq'"),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, "as 'MIXED_PRECISION'"),
        ({**NVFP4, "group_size": 32}, "as NVFP4 in groups of 32, not 16"),
        ({"quant_method": "bitsandbytes"}, "by bitsandbytes"),
        ({"quant_algo": "NVFP4"}, "'NVFP4'"),
        ({"bits": 4}, "'unnamed'"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "'e5m2'"),
        ({**GPTQ, "data_type": "mx_fp"}, "by GPTQ as 'mx_fp'"),
        ({"quant_method": "fp8", "rotation": "hadamard"}, "as fp8 with 'rotation'"),
        (config_of(GROUP_4, rotation="hadamard"), "as compressed-tensors with 'rotation'"),
        (config_of({**GROUP_4, "a_key_of_tomorrow": 2}), "by group with 'a_key_of_tomorrow' = 2"),
        (config_of({**E2M1, "a_key_of_tomorrow": 2}), "with 'a_key_of_tomorrow' = 2"),
        (config_of(GROUP_4, E2M1), "with NVFP4 beside other formats"),
        (config_of({**E2M1, "group_size": 32}), "float4 weights by tensor_group"),
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
        {**GPTQ, "group_size": 0},
        {**GPTQ, "group_size": True},
        {**GPTQ, "sym": "yes"},
        {**AWQ, "group_size": "128"},
        {**AWQ, "zero_point": 1},
        {**GPTQ, "desc_act": 1},
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


@pytest.mark.parametrize(
    ("said", "form"),
    [
        (GPTQ, WeightFormat(Scheme.INT4, "group", 128, layout=Layout.GPTQ)),
        (
            {**GPTQ, "bits": 8, "checkpoint_format": "gptq_v2", "sym": False, "group_size": -1},
            WeightFormat(Scheme.INT8, "channel", symmetric=False, layout=Layout.GPTQ_V2),
        ),
        (
            {**GPTQ, "dynamic": {"-:.*lm_head": {}}, "desc_act": True},
            WeightFormat(Scheme.INT4, "group", 128, layout=Layout.GPTQ, is_ordered=True),
        ),
        (
            {**GPTQ, "meta": {"quantizer": "x:1"}, "damp_percent": 0.1, "rotation": None},
            WeightFormat(Scheme.INT4, "group", 128, layout=Layout.GPTQ),
        ),
        (
            {**GPTQ, "group_size": -1, "desc_act": True},  # one group, whatever the order
            WeightFormat(Scheme.INT4, "channel", layout=Layout.GPTQ),
        ),
        (AWQ, WeightFormat(Scheme.INT4, "group", 128, symmetric=False, layout=Layout.AWQ)),
        (NVFP4, nvfp4()),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, WeightFormat(Scheme.FP8, "tensor")),
        (config_of(E2M1)["quantization_config"], nvfp4()),
    ],
)
def test_other_quantisers(said: dict[str, Any], form: WeightFormat) -> None:
    assert read_quantization({"quantization_config": said}) == (form,)


@pytest.mark.parametrize(
    ("file", "content", "layout"),
    [
        ("quantize_config.json", {"bits": 4, "group_size": 128, "sym": True}, Layout.GPTQ),
        ("quant_config.json", {"w_bit": 4, "q_group_size": 64, "version": "GEMM"}, Layout.AWQ),
        ("hf_quant_config.json", {"quantization": {"quant_algo": "NVFP4"}}, Layout.NVFP4),
        ("hf_quant_config.json", {"quantization": {"kv_cache_quant_algo": "FP8"}}, None),
    ],
)
def test_what_a_file_beside_config_json_says(
    tmp_path: Path, file: str, content: Any, layout: Layout | None
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(zoo.CONFIGS["llama"]))
    (tmp_path / file).write_text(json.dumps(content))
    formats = read_quantization(read_target_config(tmp_path))
    assert [form.layout for form in formats] == ([layout] if layout else [])
    said = {**zoo.CONFIGS["llama"], "quantization_config": GPTQ}
    (tmp_path / "config.json").write_text(json.dumps(said))
    assert read_target_config(tmp_path) == said


@pytest.mark.parametrize(
    "said",
    [
        {  # as AutoGPTQ, transformers and AutoRound write it, together
            **GPTQ,
            **{"damp_percent": 0.1, "static_groups": False, "true_sequential": True},
            **{"model_name_or_path": None, "model_file_base_name": "model", "use_exllama": True},
            **{"tokenizer": None, "dataset": ["c4"], "exllama_config": {"version": 1}},
            **{"autoround_version": "0.4", "iters": 200, "data_type": "int", "act_bits": 16},
        },
        {  # as AutoAWQ and transformers do
            **AWQ,
            **{"version": "gemm", "modules_to_not_convert": ["lm_head"], "do_fuse": False},
            **{"modules_to_fuse": {"a": 1}, "exllama_config": {"version": 1}, "backend": "autoawq"},
        },
        {  # ModelOpt
            **NVFP4,
            **{"producer": {"name": "modelopt"}, "ignore": ["lm_head"], "config_groups": {"a": {}}},
            **{"kv_cache_scheme": {"num_bits": 8}, "exclude_modules": ["lm_head"]},
        },
        {  # llm-compressor
            **config_of({**GROUP_4, "observer": "minmax", "observer_kwargs": {"a": 1}})[
                "quantization_config"
            ],
            **{"version": "0.9", "global_compression_ratio": 1.5, "kv_cache_scheme": None},
            **{"sparsity_config": {}, "transform_config": {}, "ignore": ["lm_head"]},
        },
        {  # fp8 with blocks
            "quant_method": "fp8",
            **{"fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
            **{"modules_to_not_convert": ["lm_head"], "scale_fmt": "ue8m0"},
        },
    ],
)
def test_what_ordinary_checkpoints_say_is_known(said: dict[str, Any]) -> None:
    assert len(read_quantization({"quantization_config": said})) == 1
