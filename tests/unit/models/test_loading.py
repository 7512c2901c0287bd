"""Opening a checkpoint folder: config, stop tokens, and the text model's plain tensor names."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from flashdraft.errors import CheckpointError, UnsupportedModelError
from flashdraft.models.loading import loading_progress, open_checkpoint

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}


def write(folder: Path, tensors: dict[str, Tensor], **changes: Any) -> Path:
    (folder / "config.json").write_text(json.dumps({**LLAMA, **changes}))
    save_file(tensors, folder / "model.safetensors")
    return folder


def numbered(*names: str) -> dict[str, Tensor]:
    return {name: torch.full((2, 2), float(i)) for i, name in enumerate(names)}


def test_plain_folder(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write(tmp_path, numbered("model.norm.weight", "lm_head.weight")))
    assert checkpoint.path == tmp_path
    assert checkpoint.config.family == "llama" and checkpoint.config.eos_token_ids == (2,)
    assert checkpoint.raw_config["hidden_size"] == 8 and checkpoint.generation_config == {}
    assert set(checkpoint.source.names()) == {"model.norm.weight", "lm_head.weight"}


def test_generation_config_adds_stop_tokens(tmp_path: Path) -> None:
    write(tmp_path, numbered("model.norm.weight"), eos_token_id=[1, 16])
    settings = {"eos_token_id": [1, 16, 5], "temperature": 1.0}
    (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.generation_config == settings
    assert checkpoint.config.eos_token_ids == (1, 16, 5)


@pytest.mark.parametrize(
    ("stored", "plain"),
    [
        ("model.language_model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("language_model.model.norm.weight", "model.norm.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("model.layers.0.moe.experts.down_proj", "model.layers.0.experts.down_proj"),
        ("model.vision_tower.encoder.layers.0.mlp.up_proj.linear.weight", None),
        ("model.embed_vision.embedding_projection.weight", None),
        ("model.audio_tower.conv.weight", None),
        ("multi_modal_projector.linear.weight", None),
        ("model.layers.0.self_attn.rotary_emb.inv_freq", None),
        ("model.layers.0.strange.weight", "model.layers.0.strange.weight"),  # the model refuses it
    ],
)
def test_names(tmp_path: Path, stored: str, plain: str | None) -> None:
    source = open_checkpoint(write(tmp_path, numbered("model.a", stored))).source
    assert set(source.names()) == {"model.a"} | ({plain} if plain else set())
    if plain is not None:
        assert source.read(plain)[0, 0] == 1.0 and source.shape(plain) == (2, 2)


def test_two_tensors_of_one_name(tmp_path: Path) -> None:
    write(tmp_path, numbered("model.norm.weight", "model.language_model.norm.weight"))
    with pytest.raises(CheckpointError, match=r"model\.language_model\.norm\.weight.*same"):
        open_checkpoint(tmp_path)


def test_a_tied_head_stored_again_is_left_out(tmp_path: Path) -> None:
    write(tmp_path, numbered("model.norm.weight", "lm_head.weight"), tie_word_embeddings=True)
    assert set(open_checkpoint(tmp_path).source.names()) == {"model.norm.weight"}


def write_experts(folder: Path, prefix: str, count: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    parts = {}
    for expert in range(count):
        for kind, shape in (("gate", (3, 4)), ("up", (3, 4)), ("down", (4, 3))):
            parts[f"{prefix}.{expert}.{kind}_proj.weight"] = torch.randn(*shape).bfloat16()
    write(folder, {**parts, "model.norm.weight": torch.zeros(4)})
    return parts


@pytest.mark.parametrize("prefix", ["experts", "moe.experts"])
def test_experts_are_joined(tmp_path: Path, prefix: str) -> None:
    stored = f"model.language_model.layers.0.{prefix}"
    parts = write_experts(tmp_path, stored, 12)  # 12: ids sort as numbers, not as text
    source = open_checkpoint(tmp_path).source
    gate_up, down = (f"model.layers.0.experts.{kind}_proj" for kind in ("gate_up", "down"))
    assert set(source.names()) == {gate_up, down, "model.norm.weight"}
    assert source.shape(gate_up) == (12, 6, 4) and source.shape(down) == (12, 4, 3)
    assert source.shape("model.norm.weight") == source.read("model.norm.weight").shape
    fused_gate_up, fused_down = source.read(gate_up), source.read(down)
    assert fused_gate_up.dtype == torch.bfloat16
    for expert in range(12):
        assert torch.equal(fused_gate_up[expert, :3], parts[f"{stored}.{expert}.gate_proj.weight"])
        assert torch.equal(fused_gate_up[expert, 3:], parts[f"{stored}.{expert}.up_proj.weight"])
        assert torch.equal(fused_down[expert], parts[f"{stored}.{expert}.down_proj.weight"])


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    parts = write_experts(tmp_path, "model.layers.0.experts", 3)
    del parts["model.layers.0.experts.1.up_proj.weight"]
    with pytest.raises(CheckpointError, match=r"layers\.0\.experts\.1\.up_proj\.weight"):
        open_checkpoint(write(tmp_path, parts))


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("number", "message"),
    [
        ("9" * 5000, "is of an expert whose number has 5000 digits"),
        (str(10**9), "is of an expert whose number has 10 digits"),
        ("999999999", r"no tensor 'model\.layers\.0\.experts\.3\.gate_proj\.weight'"),
    ],
)
def test_experts_that_cannot_be_so_many(tmp_path: Path, number: str, message: str) -> None:
    parts = write_experts(tmp_path, "model.layers.0.experts", 3)
    parts[f"model.layers.0.experts.{number}.gate_proj.weight"] = torch.zeros(3, 4)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(write(tmp_path, parts))


def test_experts_must_agree_in_shape(tmp_path: Path) -> None:
    parts = write_experts(tmp_path, "model.layers.0.experts", 3)
    parts["model.layers.0.experts.2.up_proj.weight"] = torch.zeros(5, 4)
    source = open_checkpoint(write(tmp_path, parts)).source
    with pytest.raises(CheckpointError, match=r"experts\.2\.up_proj\.weight.*\[5, 4\]"):
        source.shape("model.layers.0.experts.gate_up_proj")


def test_missing_or_broken_config(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        open_checkpoint(tmp_path)
    write(tmp_path, numbered("model.norm.weight"))
    for content, message in (
        ("{", "not valid JSON"),
        ("[1]", "no JSON object"),
        (json.dumps({k: v for k, v in LLAMA.items() if k != "hidden_size"}), "'hidden_size'"),
        (json.dumps({**LLAMA, "num_attention_heads": 0}), "not valid"),
        (json.dumps({**LLAMA, "hidden_size": "wide"}), "not valid"),
    ):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(CheckpointError, match=message):
            open_checkpoint(tmp_path)


def test_unknown_family(tmp_path: Path) -> None:
    write(tmp_path, numbered("model.norm.weight"), model_type="mamba")
    with pytest.raises(UnsupportedModelError, match="mamba"):
        open_checkpoint(tmp_path)


def test_pickles_only(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match="pickled"):
        open_checkpoint(tmp_path)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_shows_how_much_was_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = open_checkpoint(write(tmp_path, numbered("model.a", "model.b"))).source
    for terminal in (Terminal(), io.StringIO()):
        monkeypatch.setattr("sys.stderr", terminal)
        with loading_progress(source, "tiny") as on_read:
            for name in source.names():
                source.read(name)
                on_read(name)
        shown = terminal.getvalue()
        lines = ["Loading tiny [#####-----] 50%", "Loading tiny [##########] 100%", ""]
        drawn = "".join(f"\r\x1b[K{line}" for line in lines)
        assert shown == (drawn if terminal.isatty() else "")
