"""Folders and files of other tools: each is called by its name, with what to do instead."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from flashdraft import cli
from flashdraft.errors import CheckpointError, FlashdraftError, UnsupportedModelError
from flashdraft.llm import LLM
from flashdraft.models.drafter.loading import load_drafter
from flashdraft.models.loading import open_checkpoint
from tests.tiny import CONFIGS, make_tiny_drafter
from tests.unit.models.gguf.factory import random_values, write_gguf

CONFIG = CONFIGS["llama"]
WEIGHTS = {"model.norm.weight": torch.zeros(4)}
ADAPTER = {"base_model_name_or_path": "org/base", "peft_type": "LORA", "r": 8}
MLX = {"group_size": 64, "bits": 4}
MODELOPT = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "W4A8_AWQ"}}
GPTQ = {"bits": 3, "group_size": 128, "desc_act": False}
AWQ = {"zero_point": True, "q_group_size": 128, "w_bit": 4, "version": "GEMV"}
REMEDY = "Name the model that they were made from"


def write(folder: Path, files: dict[str, Any]) -> Path:
    """Files by name: JSON, or tensors where the name says so."""
    for name, content in files.items():
        if name.endswith(".safetensors"):
            save_file({key: torch.zeros(4) for key in content}, folder / name)
        else:
            (folder / name).write_text(json.dumps(content))
    return folder


def folders() -> dict[str, tuple[dict[str, Any], str]]:
    whole = {"config.json": CONFIG, "model.safetensors": list(WEIGHTS)}

    def quantised(*tensors: str, **keys: Any) -> dict[str, Any]:
        return {"config.json": {**CONFIG, **keys}, "model.safetensors": [*WEIGHTS, *tensors]}

    lora = "is a LoRA adapter for 'org/base'.*name that model, and this folder by --lora"
    adapter = {"adapter_config.json": ADAPTER, "adapter_model.safetensors": ["lora_A.weight"]}
    return {
        "LoRA": (adapter, lora),
        "LoRA with its base's config": ({**adapter, "config.json": CONFIG}, lora),
        "diffusers": (
            {"model_index.json": {"_class_name": "FluxPipeline"}},
            "is a diffusers pipeline .'FluxPipeline'.*writes no text",
        ),
        "embedding": (
            {**whole, "config_sentence_transformers.json": {}},
            "is an embedding model.*writes no text",
        ),
        "embedding by its modules": ({**whole, "modules.json": []}, "is an embedding model"),
        "tokenizer": ({"tokenizer_config.json": {}}, "holds a tokenizer alone.*whole model"),
        "maker's layout": ({"params.json": {"dim": 4096}}, "maker's own layout.*config.json"),
        "classifier": (
            {"config.json": {**CONFIG, "architectures": ["LlamaForSequenceClassification"]}},
            "is a classifier .*writes no text",
        ),
        "encoder": (
            {"config.json": {"model_type": "bert", "architectures": ["BertModel"]}},
            "is an encoder .'BertModel'",
        ),
        "encoder-decoder": (
            {"config.json": {"model_type": "t5", "is_encoder_decoder": True}},
            "is an encoder-decoder .'t5'",
        ),
        "MLX": (quantised("x.scales", quantization=MLX), "by MLX .4 bits in groups of 64"),
        "MLX, twice": (quantised(quantization=MLX, quantization_config=MLX), "by MLX .4 bits"),
        "MLX by its tensors": (quantised("x.scales", "x.biases"), "by MLX .as the tensor 'x"),
        "ModelOpt": (
            {**quantised("x.weight_scale_2"), "hf_quant_config.json": MODELOPT},
            "by ModelOpt as 'W4A8_AWQ'.*" + REMEDY,
        ),
        "ModelOpt in its config": (
            quantised(quantization_config={"quant_method": "modelopt", "quant_algo": "INT4_AWQ"}),
            "by ModelOpt as 'INT4_AWQ'.*" + REMEDY,
        ),
        "GPTQ": (
            {**quantised("x.qweight"), "quantize_config.json": GPTQ},
            "by GPTQ with bits 3, not 4 or 8.*" + REMEDY,
        ),
        "GPTQ in its config": (
            quantised(quantization_config={"quant_method": "gptq"}),
            "by GPTQ with bits None",
        ),
        "GPTQ by its tensors": (
            quantised("x.qweight"),
            "by GPTQ or AWQ without a config that says how .as the tensor 'x.qweight'",
        ),
        "AWQ": (
            {**quantised("x.qweight"), "quant_config.json": AWQ},
            "by AWQ in the version 'GEMV'.*" + REMEDY,
        ),
        "bitsandbytes": (
            quantised("x.weight", "x.weight.absmax", "x.weight.quant_map"),
            "by bitsandbytes .as the tensor 'x.weight.absmax'.*" + REMEDY,
        ),
    }  # fmt: skip


@pytest.mark.parametrize("kind", folders())
def test_a_folder_is_called_by_its_name(tmp_path: Path, kind: str) -> None:
    files, message = folders()[kind]
    with pytest.raises(UnsupportedModelError, match=message):
        LLM(str(write(tmp_path, files)), device="cpu")


@pytest.mark.parametrize(
    "kind", [name for name in folders() if "tensors" not in name and name != "bitsandbytes"]
)
def test_plan_has_the_same_words(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only what tensors alone tell is not seen by it: it opens no weights."""
    write(tmp_path, folders()[kind][0])
    with pytest.raises(FlashdraftError) as found:
        open_checkpoint(tmp_path)
    assert cli.main(["plan", str(tmp_path), "--gpu", "h200"]) == 2
    assert str(found.value) in capsys.readouterr().err


def test_doctor_has_the_same_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, folders()["GPTQ"][0])
    assert cli.main(["doctor", "--model", str(tmp_path), "--device", "cpu"]) == 2
    assert "by GPTQ with bits 3" in capsys.readouterr().err


def test_a_lora_is_no_drafter(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="LoRA adapter for 'org/base'"):
        load_drafter(write(tmp_path, folders()["LoRA"][0]), None)


def test_whole_models_beside_left_over_files_stay_models(tmp_path: Path) -> None:
    files = {"config.json": CONFIG, "model.safetensors": list(WEIGHTS)}
    empty = {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}
    write(tmp_path, {**files, "adapter_config.json": ADAPTER, "hf_quant_config.json": empty})
    assert set(open_checkpoint(tmp_path).source.names()) == set(WEIGHTS)


def test_a_folder_of_gguf_files_names_them(tmp_path: Path) -> None:
    for index in range(5):
        (tmp_path / f"model-{index}.gguf").write_bytes(b"GGUF")
    message = r"holds GGUF files \(model-0\.gguf, model-1\.gguf, model-2\.gguf, …\): name the file"
    with pytest.raises(UnsupportedModelError, match=message):
        open_checkpoint(tmp_path)


def test_only_pickles(tmp_path: Path) -> None:
    write(tmp_path, {"config.json": CONFIG})
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(
        CheckpointError, match=r"pickled weights \(pytorch_model\.bin\).*safetensors"
    ):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("architecture", "general", "message"),
    [
        ("clip", {}, "is the vision or audio part of a model: name the language model's"),
        ("llama", {"general.type": "mmproj"}, "is the vision or audio part"),
        ("llama", {"general.type": "adapter"}, "is a LoRA adapter: merge it"),
        ("llama", {"general.type": "imatrix"}, "is an importance matrix"),
    ],
)
def test_a_gguf_that_is_no_whole_model(
    tmp_path: Path, architecture: str, general: dict[str, Any], message: str
) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, architecture, {}, {"x": random_values(4)}, general=general)
    with pytest.raises(UnsupportedModelError, match=rf"m\.gguf .*{message}"):
        LLM(str(path), device="cpu")


def test_a_drafter_named_as_the_model_is_called_one(tmp_path: Path) -> None:
    drafter = make_tiny_drafter(tmp_path / "drafter")
    with pytest.raises(UnsupportedModelError, match="is a drafter: .* with --draft"):
        open_checkpoint(drafter)
