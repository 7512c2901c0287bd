"""Drafter checkpoints on disk: both layouts, strictness, and the fit to a target."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from flashdraft.errors import CheckpointError, FlashdraftError, UnsupportedModelError
from flashdraft.models.config.rope import RopeConfig
from flashdraft.models.config.target import ModelConfig
from flashdraft.models.drafter.config import DrafterConfig
from flashdraft.models.drafter.head_config import MARKOV, SELECTOR, ConvolutionConfig, HeadConfig
from flashdraft.models.drafter.loading import load_drafter, save_drafter, save_speculators
from flashdraft.models.drafter.model import Drafter
from flashdraft.models.drafter.opening import read_drafter_config

TARGET = ModelConfig.from_hf(
    {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 50,
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 6,
        "num_attention_heads": 3,
    }
)
CONFIG = DrafterConfig(
    hidden_size=24,
    intermediate_size=40,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    num_layers=2,
    vocab_size=50,
    max_position=64,
    norm_eps=1e-6,
    rope=RopeConfig(10000.0, 8, 8),
    windows=(5, None),
    causal=(True, False),
    block_size=4,
    mask_token_id=3,
    tap_layers=(0, 2, 5),
    num_target_layers=6,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A drafter in z-lab's layout."""
    torch.manual_seed(0)
    save_drafter(Drafter(CONFIG), tmp_path)
    return tmp_path


def rewrite(folder: Path, tensors: dict[str, Tensor] | None = None, **config: Any) -> None:
    """Change some tensors and some keys of the config in place."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    stored = {**load_file(folder / "model.safetensors"), **(tensors or {})}
    save_file(stored, folder / "model.safetensors")


def speculators(folder: Path, draft_vocab_size: int) -> None:
    """Turn the folder's checkpoint into speculators' layout."""
    config = json.loads((folder / "config.json").read_text())
    own = ("architectures", "dflash_config", "block_size", "num_target_layers", "is_causal")
    layer = {k: v for k, v in config.items() if k not in own}
    document = {
        "speculators_model_type": "dflash",
        "architectures": ["DFlashSpeculator"],
        "transformer_layer_config": layer,
        "aux_hidden_state_layer_ids": [1, 3, 6],
        "block_size": 4,
        "mask_token_id": 3,
        "draft_vocab_size": draft_vocab_size,
        "sliding_window_non_causal": True,
    }
    (folder / "config.json").write_text(json.dumps(document))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saved_and_loaded(tmp_path: Path, dtype: torch.dtype) -> None:
    drafter = Drafter(CONFIG)
    save_drafter(drafter, tmp_path, dtype)
    loaded = load_drafter(tmp_path, TARGET)
    assert loaded.config == CONFIG
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == str(dtype)[6:]
    expected = drafter.state_dict()
    assert loaded.state_dict().keys() == expected.keys() == load_names(tmp_path)
    for name, tensor in loaded.state_dict().items():
        assert tensor.dtype == dtype
        assert torch.equal(tensor, expected[name].to(dtype)), name
    assert all(parameter.requires_grad for parameter in loaded.parameters())


def load_names(folder: Path) -> set[str]:
    return set(load_file(folder / "model.safetensors"))


def test_saved_over_the_file_it_was_loaded_from(folder: Path) -> None:
    before = load_file(folder / "model.safetensors")
    save_drafter(load_drafter(folder, TARGET), folder)
    after = load_file(folder / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]


def test_reading_is_heard(folder: Path) -> None:
    heard: list[str] = []
    load_drafter(folder, TARGET, heard.append)
    assert set(heard) == load_names(folder)


def test_missing_tensor(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj\.weight"):
        load_drafter(folder, TARGET)


@pytest.mark.parametrize("name", ["layers.2.norm.weight", "lm_head.weight", "embed_tokens.weight"])
def test_unknown_tensor(folder: Path, name: str) -> None:
    rewrite(folder, {name: torch.zeros(50, 24)})
    with pytest.raises(CheckpointError, match=name):
        load_drafter(folder, TARGET)


def test_misshapen_tensor(folder: Path) -> None:
    rewrite(folder, {"fc.weight": torch.zeros(24, 48)})
    with pytest.raises(CheckpointError, match=r"fc\.weight.*\[24, 48\].*\[24, 72\]"):
        load_drafter(folder, TARGET)


def test_truncated_file(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="truncated"):
        load_drafter(folder, TARGET)


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (replace(TARGET, hidden_size=32), "hidden size is 24, the target's is 32"),
        (replace(TARGET, vocab_size=51), "vocabulary size is 50, the target's is 51"),
        (replace(TARGET, layers=TARGET.layers[:5]), "target layers is 6, the target's is 5"),
    ],
)
def test_a_drafter_for_another_target(folder: Path, target: ModelConfig, words: str) -> None:
    with pytest.raises(CheckpointError, match=f"{words}.*LlamaForCausalLM"):
        load_drafter(folder, target)


def test_taps_beyond_the_target(folder: Path) -> None:
    rewrite(folder, num_target_layers=None)
    with pytest.raises(CheckpointError, match=r"reads layer 5 .* has 5 layers"):
        load_drafter(folder, replace(TARGET, layers=TARGET.layers[:5]))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"dflash_config": {"target_layer_ids": [1]}}, "mask_token_id"),
        ({"hidden_size": "wide"}, "not valid"),
        ({"dflash_config": ["?"]}, "not valid"),
    ],
)
def test_a_broken_config_is_a_typed_error(folder: Path, config: dict[str, Any], words: str) -> None:
    rewrite(folder, **config)
    with pytest.raises(CheckpointError, match=words):
        read_drafter_config(folder)


def test_no_config_at_all(tmp_path: Path) -> None:
    with pytest.raises(FlashdraftError, match=r"config\.json"):
        load_drafter(tmp_path, TARGET)


def test_speculators_with_the_whole_vocabulary(folder: Path) -> None:
    """Its frozen copies of the target's tensors are left out."""
    names = load_names(folder)
    rewrite(folder, {f"{n}.weight": torch.zeros(50, 24) for n in ("lm_head", "embed_tokens")})
    speculators(folder, draft_vocab_size=50)
    drafter = load_drafter(folder, TARGET)
    assert drafter.state_dict().keys() == names
    assert drafter.config == replace(
        CONFIG, causal=(False, False), embed_scale=1.0, num_target_layers=None
    )


def test_speculators_with_a_reduced_vocabulary(folder: Path) -> None:
    chosen = torch.arange(10) * 5 + 3
    head, offsets = torch.randn(10, 24), chosen - torch.arange(10)
    kept = torch.zeros(50, dtype=torch.bool).index_fill(0, chosen, True)
    rewrite(folder, {"lm_head.weight": head, "d2t": offsets, "t2d": kept})
    speculators(folder, draft_vocab_size=10)
    drafter = load_drafter(folder, TARGET)
    assert drafter.lm_head is not None and torch.equal(drafter.lm_head.weight, head)
    assert drafter.d2t is not None and torch.equal(drafter.d2t, offsets)
    with pytest.raises(UnsupportedModelError, match="whole vocabulary"):
        save_drafter(drafter, folder)
    rewrite(folder, {"d2t": offsets + 40})
    with pytest.raises(CheckpointError, match=r"d2t.*43 to 88.*has 50"):
        load_drafter(folder, TARGET)


HEADS: list[dict[str, Any]] = [
    {"head": HeadConfig(MARKOV, 6)},
    {"head": HeadConfig(MARKOV, 6, is_gated=True, has_confidence=True), "from_anchor": True},
    {"head": HeadConfig(SELECTOR, 6, 9), "convolution": ConvolutionConfig(2, 8)},
]


@pytest.mark.parametrize("layout", ["zlab", "speculators"])
@pytest.mark.parametrize("added", HEADS)
def test_heads_make_the_round_trip(tmp_path: Path, added: dict[str, Any], layout: str) -> None:
    drafter = Drafter(replace(CONFIG, embed_scale=1.0, num_target_layers=None, **added))
    for parameter in drafter.parameters():
        torch.nn.init.normal_(parameter)
    first, second = tmp_path / "first", tmp_path / "second"

    def save(one: Drafter, folder: Path) -> None:
        if layout == "zlab":
            return save_drafter(one, folder)
        names = {"target_name": "target", "target_architectures": ["LlamaForCausalLM"]}
        save_speculators(one, folder, TARGET, **names)

    save(drafter, first)
    again = load_drafter(first, TARGET)
    assert again.config == drafter.config
    save(again, second)
    for name in ("config.json", "model.safetensors"):
        assert (first / name).read_bytes() == (second / name).read_bytes()
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor.bfloat16()), name
    kind = json.loads((first / "config.json").read_text()).get("speculators_model_type")
    head = added["head"].kind
    assert (
        kind == {"zlab": None, "speculators": {MARKOV: "dspark", SELECTOR: "dflash2"}[head]}[layout]
    )


def test_a_head_s_missing_tensor_is_named(tmp_path: Path) -> None:
    save_drafter(Drafter(replace(CONFIG, head=HeadConfig(MARKOV, 6))), tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    del stored["markov_head.markov_w2.weight"]
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="markov_head.markov_w2"):
        load_drafter(tmp_path, TARGET)


def test_copies_of_the_target_s_tensors_are_left_beside_dspark(tmp_path: Path) -> None:
    config = replace(CONFIG, windows=(None, None), causal=(False, False), from_anchor=True)
    drafter = Drafter(replace(config, head=HeadConfig(MARKOV, 6, has_confidence=True)))
    save_drafter(drafter, tmp_path)
    document = json.loads((tmp_path / "config.json").read_text())
    options = document.pop("dflash_config")
    del options["sample_from_anchor"]
    document |= {**options, "architectures": ["Qwen3DSparkModel"], "num_anchors": 512}
    (tmp_path / "config.json").write_text(json.dumps(document))
    copies = {"embed_tokens.weight": torch.zeros(50, 24), "lm_head.weight": torch.zeros(50, 24)}
    rewrite(tmp_path, copies)
    assert load_drafter(tmp_path, TARGET).config == drafter.config
