"""Drafter folders, good and spoilt in one place each, against the rules of vLLM and SGLang."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from flashdraft.bench.plan.pairs import DRAFTERS
from flashdraft.cli import main
from flashdraft.errors import CheckpointError
from flashdraft.external.checkpoint_rules import FolderReport, check_folder
from flashdraft.external.tensor_rules import expected_shapes
from flashdraft.models.config.target import ModelConfig
from flashdraft.models.drafter.config import DrafterConfig
from flashdraft.models.drafter.loading import save_drafter, save_speculators
from flashdraft.models.drafter.model import Drafter
from tests.tiny import CONFIGS, VOCAB_SIZE, make_tiny_checkpoint

Json = dict[str, Any]
TARGET = ModelConfig.from_hf(CONFIGS["llama"])
CONFIG: Json = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "num_target_layers": 2,
    "block_size": 8,
    "dflash_config": {"mask_token_id": 3, "target_layer_ids": [0, 1]},
}


def drafter(**changes: Any) -> Drafter:
    torch.manual_seed(0)
    return Drafter(DrafterConfig.from_hf({**CONFIG, **changes}))


@pytest.fixture
def zlab(tmp_path: Path) -> Path:
    save_drafter(drafter(), tmp_path)
    return tmp_path


@pytest.fixture
def speculators(tmp_path: Path) -> Path:
    save_speculators(
        drafter(), tmp_path, TARGET, target_name="t", target_architectures=["LlamaForCausalLM"]
    )
    return tmp_path


def edit(folder: Path, change: Callable[[Json], object]) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


def retensor(folder: Path, change: Callable[[Json], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def broken(report: FolderReport) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {"vllm": set(), "sglang": set()}
    for one in report.failures:
        found[one.engine].add(one.rule)
        assert one.reason.endswith(".") and "\n" not in one.reason
    return found


def test_what_we_write_passes_in_both_engines(zlab: Path) -> None:
    report = check_folder(zlab, TARGET)
    assert (report.layout, report.failures, report.limits) == ("zlab", (), ())
    assert report.is_servable and report.passes("vllm") and report.passes("sglang")


def test_speculators_layout_is_for_vllm_alone(speculators: Path) -> None:
    report = check_folder(speculators, TARGET)
    assert broken(report) == {"vllm": set(), "sglang": {"layout"}}
    assert report.is_servable and report.passes("vllm") and not report.passes("sglang")


@pytest.mark.parametrize(
    ("change", "vllm", "sglang"),
    [
        ({"architectures": ["Qwen3ForCausalLM"]}, {"architectures"}, {"architectures"}),
        ({"model_type": "llama"}, {"model_type"}, {"model_type"}),
        ({"block_size": 1, "dflash_config": None}, None, None),
        ({"hidden_act": "gelu"}, {"hidden_act"}, {"hidden_act"}),
        ({"num_target_layers": None}, set(), {"num_target_layers"}),
        ({"rope_theta": None}, set(), {"rope_theta"}),
        ({"head_dim": None}, {"head_dim"}, {"head_dim"}),
        ({"num_key_value_heads": 3}, {"num_key_value_heads"}, {"num_key_value_heads"}),
        ({"layer_types": ["full_attention"]}, {"layer_types"}, {"layer_types"}),
        ({"layer_types": ["sliding_attention"] * 2}, {"sliding_window"}, {"sliding_window"}),
        ({"layer_types": ["other"] * 2}, {"layer_types"}, {"layer_types"}),
        ({"hidden_size": 64}, {"shapes"}, {"shapes"}),
    ],
)
def test_each_rule_of_the_config(
    zlab: Path, change: Json, vllm: set[str] | None, sglang: set[str] | None
) -> None:
    edit(zlab, lambda config: config.update(change))
    found = broken(check_folder(zlab))
    if vllm is None:
        rules = {"block_size", "dflash_config", "mask_token_id", "target_layer_ids"}
        assert found == {"vllm": rules, "sglang": rules}
    else:
        assert found == {"vllm": vllm, "sglang": sglang}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("mask_token_id", VOCAB_SIZE),
        ("mask_token_id", None),
        ("target_layer_ids", []),
        ("target_layer_ids", [0, 2]),
        ("target_layer_ids", "0"),
        ("block_size", 1),
    ],
)
def test_each_rule_of_the_drafters_own_part(zlab: Path, key: str, value: Any) -> None:
    edit(zlab, lambda config: config["dflash_config"].update({key: value}))
    assert broken(check_folder(zlab)) == {"vllm": {key}, "sglang": {key}}


def test_taps_must_match_the_projection(zlab: Path) -> None:
    edit(zlab, lambda config: config["dflash_config"].update(target_layer_ids=[1]))
    (one, other) = check_folder(zlab).failures
    assert "fc.weight has shape [32, 64]; the config asks for [32, 32]" in one.reason
    assert other.engine == "sglang"


def test_a_target_of_another_shape_is_noticed(zlab: Path) -> None:
    other = ModelConfig.from_hf({**CONFIGS["llama"], "hidden_size": 64, "num_hidden_layers": 1})
    assert broken(check_folder(zlab, other))["vllm"] == {
        "hidden_size", "num_target_layers", "target_layer_ids",
    }  # fmt: skip


def test_missing_and_foreign_tensors(zlab: Path) -> None:
    def spoil(tensors: Json) -> None:
        del tensors["layers.1.self_attn.k_norm.weight"]
        tensors["foreign.weight"] = torch.zeros(2, dtype=torch.bfloat16)

    retensor(zlab, spoil)
    reasons = [one.reason for one in check_folder(zlab).failures if one.engine == "vllm"]
    assert len(reasons) == 2
    assert reasons[0].startswith("layers.1.self_attn.k_norm.weight is missing")
    assert reasons[1].startswith("foreign.weight is not part of a drafter")


def test_a_prefix_is_vllms_trouble_alone(zlab: Path) -> None:
    def prefix(tensors: Json) -> None:
        for name in list(tensors):
            tensors[f"model.{name}"] = tensors.pop(name)

    retensor(zlab, prefix)
    assert broken(check_folder(zlab)) == {"vllm": {"prefix"}, "sglang": set()}


def test_stored_copies_of_the_targets_tensors(zlab: Path) -> None:
    copy = torch.zeros(VOCAB_SIZE, 32, dtype=torch.bfloat16)
    retensor(zlab, lambda tensors: tensors.update({"embed_tokens.weight": copy}))
    assert broken(check_folder(zlab)) == {"vllm": {"borrowed"}, "sglang": set()}


def test_a_hidden_mask_vector_is_refused_by_vllm(zlab: Path) -> None:
    vector = torch.zeros(32, dtype=torch.bfloat16)
    retensor(zlab, lambda tensors: tensors.update(mask_hidden=vector))
    assert "mask_hidden" in broken(check_folder(zlab))["vllm"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_dtypes_must_agree_and_be_usual(zlab: Path, dtype: torch.dtype) -> None:
    retensor(zlab, lambda t: t.update({"fc.weight": t["fc.weight"].to(dtype)}))
    assert broken(check_folder(zlab)) == {"vllm": {"dtype"}, "sglang": {"dtype"}}


def test_weights_must_be_there(zlab: Path) -> None:
    (zlab / "model.safetensors").unlink()
    assert broken(check_folder(zlab)) == {"vllm": {"weights"}, "sglang": {"weights"}}
    (zlab / "config.json").unlink()
    with pytest.raises(CheckpointError, match="no config.json"):
        check_folder(zlab)


@pytest.mark.parametrize(
    ("key", "value", "rule"),
    [
        ("speculators_model_type", "eagle3", "speculators_model_type"),
        ("sample_from_anchor", True, "sample_from_anchor"),
        ("speculators_config", {}, "verifier"),
        ("aux_hidden_state_layer_ids", [0, 1], "target_layer_ids"),
        ("mask_token_id", None, "mask_token_id"),
        ("transformer_layer_config", None, "transformer_layer_config"),
    ],
)
def test_each_rule_of_speculators_layout(
    speculators: Path, key: str, value: Any, rule: str
) -> None:
    edit(speculators, lambda config: config.update({key: value}))
    report = check_folder(speculators)
    assert rule in broken(report)["vllm"]
    assert not report.is_servable


def test_speculators_may_not_mix_causal_windows_with_full_layers(speculators: Path) -> None:
    def mix(config: Json) -> None:
        config["sliding_window_non_causal"] = False
        decoder = config["transformer_layer_config"]
        decoder["layer_types"] = ["sliding_attention", "full_attention"]
        decoder["sliding_window"] = 16

    edit(speculators, mix)
    report = check_folder(speculators)
    assert broken(report)["vllm"] == {"sliding_window_non_causal"}
    assert [one.rule for one in report.limits] == ["runner"]
    edit(speculators, lambda config: config.pop("sliding_window_non_causal"))
    assert broken(check_folder(speculators))["vllm"] == {"sliding_window_non_causal"}


def test_published_drafters_pass_but_for_their_weights(tmp_path: Path) -> None:
    for name, config in DRAFTERS.items():
        folder = tmp_path / name.replace("/", "-")
        folder.mkdir()
        full = {**config, "rms_norm_eps": 1e-6, "num_target_layers": 60}
        (folder / "config.json").write_text(json.dumps(full))
        report = check_folder(folder)
        assert broken(report) == {"vllm": {"weights"}, "sglang": {"weights"}}, name
        assert [one.rule for one in report.limits] == ["runner"] * ("gemma" in name), name


def test_limits_are_told_and_refuse_nothing(zlab: Path) -> None:
    changes = {"final_logit_softcapping": 30.0, "auto_map": {"AutoModel": "x.Y"}}
    edit(zlab, lambda config: config.update(changes))
    report = check_folder(zlab)
    assert report.is_servable
    assert {(one.engine, one.rule) for one in report.limits} == {
        ("vllm", "final_logit_softcapping"), ("vllm", "auto_map"), ("sglang", "auto_map"),
    }  # fmt: skip


def test_the_shapes_are_those_of_our_own_drafter() -> None:
    flat = {**CONFIG, **CONFIG["dflash_config"]}
    own = {name: tuple(one.shape) for name, one in drafter().state_dict().items()}
    assert expected_shapes(flat) == own


def test_the_command_reports_and_its_status_says_whether_it_passed(
    zlab: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = make_tiny_checkpoint(tmp_path / "target")
    assert main(["export", "--check", str(zlab), "--model", str(target)]) == 0
    assert "vLLM 0.32.0: loads it\nSGLang 0.5.23: loads it\n" in capsys.readouterr().out
    edit(zlab, lambda config: config.pop("num_target_layers"))
    assert main(["export", "--check", str(zlab)]) == 1
    out = capsys.readouterr().out
    assert "vLLM 0.32.0: loads it" in out
    assert "SGLang 0.5.23: does not load it\n  x num_target_layers:" in out
    assert main(["export", str(zlab), "--check", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["engines"]["vllm"] == {
        "version": "0.32.0", "loads": True, "failures": [], "limits": [],
    }  # fmt: skip
    assert found["engines"]["sglang"]["failures"][0]["rule"] == "num_target_layers"


def test_export_needs_one_of_out_and_check(zlab: Path) -> None:
    for more in ([], ["--out", "x", "--check"]):
        with pytest.raises(SystemExit):
            main(["export", str(zlab), *more])
