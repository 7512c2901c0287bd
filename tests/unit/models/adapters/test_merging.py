"""LoRAs: what peft's own merge makes of the same adapters, whole models, and what is refused.

made.safetensors has adapters that peft saved, and the weights before and after its merge; its
metadata has the configs and the versions.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from flashdraft import cli
from flashdraft.errors import (
    CheckpointError,
    FlashdraftError,
    ModelNotFoundError,
    UnsupportedModelError,
)
from flashdraft.llm import LLM
from flashdraft.models.adapters.config import read_adapter_config, require_adapter
from flashdraft.models.adapters.merging import MergedTensors
from flashdraft.models.loading import open_checkpoint
from tests import few_bits, tiny, zoo

MADE = Path(__file__).with_name("made.safetensors")
with safe_open(MADE, framework="pt") as made:
    CONFIGS: dict[str, dict[str, Any]] = json.loads(made.metadata()["configs"])
Q = "base_model.model.model.layers.0.self_attn.q_proj"
DOWN = "base_model.model.model.layers.0.mlp.down_proj"


def parts_of(case: str, kind: str) -> dict[str, Tensor]:
    """The adapter's tensors, or weights before ("base") or after ("merged") peft's merge."""
    prefix = f"{case}|{kind}|"
    return {k.removeprefix(prefix): v for k, v in load_file(MADE).items() if k.startswith(prefix)}


def write(folder: Path, case: str, tensors: dict[str, Tensor] | None = None, **said: Any) -> Path:
    """An adapter's folder; changes to its config, and other tensors."""
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(CONFIGS[case] | said))
    found = parts_of(case, "adapter") if tensors is None else tensors
    save_file(found, folder / "adapter_model.safetensors")
    return folder


def merged(
    folder: Path, case: str, tensors: dict[str, Tensor] | None = None, **said: Any
) -> MergedTensors:
    base = zoo.Tensors(parts_of(case, "base"))
    return MergedTensors(base, write(folder, case, tensors, **said), is_tied=False)


@pytest.mark.parametrize("case", CONFIGS)
def test_what_peft_merges(tmp_path: Path, case: str) -> None:
    source, expected = merged(tmp_path, case), parts_of(case, "merged")
    assert set(source.names()) == set(expected)
    for name, values in expected.items():
        found = source.read(name)
        torch.testing.assert_close(found, values, rtol=1e-6, atol=1e-6)
        assert torch.equal(source.read_matrix(name, torch.device("cpu")), found)
        assert found.dtype is torch.float32 and source.shape(name) == tuple(values.shape)
        assert not torch.allclose(values, parts_of(case, "base")[name])


def test_a_base_in_bfloat16_is_not_rounded_again(tmp_path: Path) -> None:
    base = {name: values.bfloat16() for name, values in parts_of("plain", "base").items()}
    source = MergedTensors(zoo.Tensors(base), write(tmp_path, "plain"), is_tied=False)
    exact = merged(tmp_path, "plain")
    for name, values in base.items():
        change = exact.read(name) - parts_of("plain", "base")[name]
        torch.testing.assert_close(source.read(name), values.float() + change)


def write_tiny(folder: Path) -> Path:
    """An adapter for the tiny Llama of tests/tiny.py."""
    generator = torch.Generator().manual_seed(3)
    hidden, inner = tiny.CONFIGS["llama"]["hidden_size"], tiny.CONFIGS["llama"]["intermediate_size"]
    tensors = {
        f"{DOWN}.lora_A.weight": torch.randn(4, inner, generator=generator),
        f"{DOWN}.lora_B.weight": torch.randn(hidden, 4, generator=generator),
    }
    return write(folder, "plain", tensors)


def test_a_model_with_a_lora_answers_otherwise_and_lawfully(tmp_path: Path) -> None:
    model, lora = tiny.make_tiny_checkpoint(tmp_path / "model"), write_tiny(tmp_path / "lora")
    plain = open_checkpoint(model).source
    name = "model.layers.0.mlp.down_proj.weight"
    found = open_checkpoint(model, lora=lora).source
    assert not torch.equal(found.read(name), plain.read(name))
    others = [one for one in plain.names() if one != name]
    assert all(torch.equal(found.read(one), plain.read(one)) for one in others)
    answers = {}
    for draft in (None, "ngram"):
        for adapter in (None, lora):
            with LLM(str(model), draft=draft, lora=adapter, device="cpu", cache_gb=0.01) as llm:
                answers[draft, adapter] = llm.generate([[5, 6, 7, 8] * 3])[0].token_ids
    assert answers[None, lora] == answers["ngram", lora] != answers[None, None]


def test_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny.make_tiny_checkpoint(tmp_path / "model")
    words = ["generate", "hello", "--model", str(model), "--device", "cpu", "--cache-gb", "0.01"]
    answers = []
    for more in ([], ["--lora", str(write_tiny(tmp_path / "lora"))]):
        assert cli.main([*words, "--max-tokens", "8", "--temperature", "0", *more]) == 0
        answers.append(capsys.readouterr().out)
    assert answers[0] != answers[1]
    assert cli.main([*words, "--lora", str(model)]) == 2
    assert "There is no LoRA adapter" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"peft_type": "IA3"}, "is of the kind 'IA3'; only LORA"),
        ({"use_dora": True}, "asks for DoRA"),
        ({"fan_in_fan_out": True}, "lie turned around"),
        ({"use_qalora": True}, "asks for QALoRA"),
        ({"init_lora_weights": "pissa"}, "'pissa', which changes the model's own weights"),
        ({"init_lora_weights": 1}, "= 1, which changes"),
        ({"layer_replication": [[0, 1]]}, "has 'layer_replication'"),
        ({"trainable_token_indices": [3]}, "has 'trainable_token_indices'"),
        ({"target_parameters": ["x.weight"]}, "has 'target_parameters'"),
        ({"a_key_of_tomorrow": 2}, "does not know what it changes in a merge"),
        ({"rank_pattern": {".*q_proj": 2}}, r"has the pattern '\.\*q_proj' in rank_pattern"),
    ],
)
def test_other_adapters_are_called_by_their_names(
    tmp_path: Path, said: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=f"{message}.*Merge it with peft"):
        merged(tmp_path, "plain", **said)


@pytest.mark.parametrize(
    "said",
    [
        {"r": 0},
        {"r": True},
        {"r": "4"},
        {"r": 10**12},
        {"use_rslora": 1},
        {"use_rslora": "true"},
        {"lora_alpha": float("nan")},
        {"lora_alpha": None},
        {"rank_pattern": [1]},
        {"rank_pattern": {"q_proj": -1}},
        {"alpha_pattern": {"q_proj": "x"}},
    ],
)
def test_broken_configs_are_checkpoint_errors(tmp_path: Path, said: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="adapter_config.json.*again"):
        merged(tmp_path, "plain", **said)


def changed(**tensors: Tensor | None) -> dict[str, Tensor]:
    """The tensors of "plain" with others; "q.A" stands for q_proj's lora_A."""
    found = parts_of("plain", "adapter")
    for name, values in tensors.items():
        found.pop(name, None)
        if values is not None:
            found[name] = values
    return found


A, B = f"{Q}.lora_A.weight", f"{Q}.lora_B.weight"


@pytest.mark.parametrize(
    ("tensors", "error", "message"),
    [
        ({A: None}, CheckpointError, "q_proj.lora_B.weight' without the other of its pair"),
        ({B: None}, CheckpointError, "q_proj.lora_A.weight' without the other of its pair"),
        ({A: torch.zeros(4, 17)}, CheckpointError, r"shape \[4, 17\]; \[4, 16\] fits"),
        ({A: torch.zeros(8, 16), B: torch.zeros(16, 8)}, CheckpointError, r"\[16, 4\] fits"),
        ({A: torch.full((4, 16), torch.inf)}, CheckpointError, "not finite"),
        ({A: torch.zeros(4, 16).int()}, CheckpointError, "stored as I32; it must be F64 or F32"),
        ({B: torch.zeros(16, 4).bool()}, CheckpointError, "stored as BOOL; it must be F64 or F32"),
        ({A: torch.zeros(4, 16).char()}, CheckpointError, "stored as I8; it must be F64 or F32"),
        (
            {f"{Q}.lora_embedding_A": torch.zeros(4, 16)},
            UnsupportedModelError,
            "q_proj.lora_embedding_A', of an embedding, for '.*q_proj.weight', which is none",
        ),
        (
            {"base_model.model.model.embed_tokens.lora_A.weight": torch.zeros(4, 16)},
            UnsupportedModelError,
            "of a linear, for 'model.embed_tokens.weight', which is none",
        ),
        ({f"{Q}.lora_magnitude_vector": torch.ones(16)}, UnsupportedModelError, "how to merge it"),
        ({"lora_A.weight": torch.zeros(4, 16)}, UnsupportedModelError, "how to merge it"),
        ({f"{Q}.bias": torch.ones(16)}, UnsupportedModelError, "the model does not have"),
        (
            {"base_model.model.model.vision_tower.x.lora_A.weight": torch.zeros(4, 4)},
            UnsupportedModelError,
            "of the text model are merged",
        ),
        (
            {f"{DOWN.replace('layers.0', 'layers.7')}.lora_A.weight": torch.zeros(4, 24)},
            UnsupportedModelError,
            "layers.7.mlp.down_proj.weight', which the model does not have",
        ),
    ],
)
def test_tensors_that_do_not_fit(
    tmp_path: Path, tensors: dict[str, Tensor | None], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        merged(tmp_path, "plain", changed(**tensors)).read("model.layers.0.self_attn.q_proj.weight")


def test_a_product_for_a_norm_is_refused_in_words(tmp_path: Path) -> None:
    norm = "model.layers.0.input_layernorm"
    base = zoo.Tensors({f"{norm}.weight": torch.ones(16)})
    tensors = {
        f"base_model.model.{norm}.lora_A.weight": torch.ones(4, 16),
        f"base_model.model.{norm}.lora_B.weight": torch.ones(16, 4),
    }
    with pytest.raises(UnsupportedModelError, match=r"which has shape \[16\]; .* matrices alone"):
        MergedTensors(base, write(tmp_path, "plain", tensors), is_tied=False)


def test_an_adapter_without_tensors_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no tensors: it changes nothing"):
        merged(tmp_path, "plain", {})


@pytest.mark.parametrize("alpha", [1e38, 1e308])
def test_weights_that_an_adapter_makes_infinite_name_it(tmp_path: Path, alpha: float) -> None:
    source = merged(tmp_path, "plain", changed(**{A: torch.full((4, 16), 1e3)}), lora_alpha=alpha)
    with pytest.raises(CheckpointError, match="adapter_model.*not finite, .* with .*lora_alpha"):
        source.read("model.layers.0.self_attn.q_proj.weight")


def test_tied_tables_and_weights_in_few_bits_are_refused(tmp_path: Path) -> None:
    base = zoo.Tensors(parts_of("embedding", "base"))
    with pytest.raises(UnsupportedModelError, match="uses both to read tokens and to choose them"):
        MergedTensors(base, write(tmp_path, "embedding"), is_tied=True)
    (tmp_path / "model").mkdir()
    model = few_bits.write_model(tmp_path / "model", "AWQ")
    lora = write(tmp_path / "lora", "plain")
    with pytest.raises(UnsupportedModelError, match="few bits: it would have to be rounded again"):
        open_checkpoint(model, lora=lora)


def test_a_folder_without_safe_tensors_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path, "plain")
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(CheckpointError, match="pickled adapters, which can run code"):
        MergedTensors(zoo.Tensors({}), folder, is_tied=False)
    for name in ("", "none", "a" * 5000, str(folder / "adapter_config.json")):
        with pytest.raises(ModelNotFoundError, match="There is no LoRA adapter"):
            require_adapter(name)
    (folder / "adapter_config.json").write_text("{")
    with pytest.raises(FlashdraftError):
        read_adapter_config(folder)
