"""Export: both layouts hold the same drafter, what a layout cannot say is refused, provenance."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from flashdraft.core import VERSION
from flashdraft.errors import CheckpointError, FlashdraftError, RequestError, UnsupportedModelError
from flashdraft.kernels.kinds import WeightOptions
from flashdraft.models.config.rope import RopeConfig
from flashdraft.models.config.target import ModelConfig
from flashdraft.models.drafter.config import DrafterConfig
from flashdraft.models.drafter.loading import load_drafter, save_drafter, save_speculators
from flashdraft.models.drafter.model import Drafter
from flashdraft.models.files.opening import read_json
from flashdraft.train.export import export, provenance, read_provenance, write_provenance
from tests.tiny import VOCAB_SIZE, make_tiny_checkpoint

CONFIG = DrafterConfig(
    hidden_size=32,
    intermediate_size=40,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    num_layers=2,
    vocab_size=VOCAB_SIZE,
    max_position=64,
    norm_eps=1e-6,
    rope=RopeConfig(10000.0, 8, 8),
    windows=(None, None),
    causal=(False, False),
    block_size=4,
    mask_token_id=3,
    tap_layers=(0, 1),
    num_target_layers=2,
)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return make_tiny_checkpoint(tmp_path / "target")


def make_drafter(folder: Path, config: DrafterConfig = CONFIG, **saved: Any) -> Drafter:
    torch.manual_seed(0)
    drafter = Drafter(config)
    if config.draft_vocab_size is not None:
        drafter.state_dict()["d2t"].copy_(torch.arange(config.draft_vocab_size))
    if not saved.get("unsaved"):
        save_drafter(drafter, folder, torch.bfloat16)
    return drafter


def same_tensors(one: Path, two: Path) -> bool:
    left, right = load_file(one / "model.safetensors"), load_file(two / "model.safetensors")
    return left.keys() == right.keys() and all(torch.equal(left[n], right[n]) for n in left)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"any_width": True},
        {"windows": (5, None), "causal": (True, False)},
        {"windows": (5, 5), "causal": (False, False)},
        {"rope": RopeConfig(5000.0, 8, 8, (("factor", 2.0),))},
    ],
)
def test_there_and_back(tmp_path: Path, target: Path, changes: dict[str, Any]) -> None:
    config = replace(CONFIG, **changes)
    make_drafter(tmp_path / "zlab", config)
    export(tmp_path / "zlab", tmp_path / "spec", "speculators", str(target))
    export(tmp_path / "spec", tmp_path / "back", "zlab", str(target))
    assert same_tensors(tmp_path / "zlab", tmp_path / "spec")
    assert same_tensors(tmp_path / "zlab", tmp_path / "back")
    model = ModelConfig.from_hf(read_json(target / "config.json"))
    # what the layout does not say: the number of target layers; the scale is said outright
    expected = replace(config, num_target_layers=None, embed_scale=1.0)
    for name in ("spec", "back"):
        assert load_drafter(tmp_path / name, model).config == expected


def test_speculators_config(tmp_path: Path, target: Path) -> None:
    make_drafter(tmp_path / "zlab")
    export(tmp_path / "zlab", tmp_path / "spec", "speculators", str(target))
    config = read_json(tmp_path / "spec" / "config.json")
    assert config["aux_hidden_state_layer_ids"] == [1, 2]
    assert config["draft_vocab_size"] == VOCAB_SIZE
    assert config["speculators_config"]["verifier"] == {
        "name_or_path": str(target),
        "architectures": ["LlamaForCausalLM"],
    }
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 3
    layer = config["transformer_layer_config"]
    assert layer["rope_parameters"] == {"rope_type": "default", "rope_theta": 10000.0}
    assert layer["hidden_size"] == 32 and "dflash_config" not in layer
    # vLLM takes its opposite for the causality of every layer, the full ones too
    assert config["sliding_window_non_causal"] is True


def test_a_reduced_vocabulary(tmp_path: Path, target: Path) -> None:
    config = replace(CONFIG, draft_vocab_size=100)
    drafter = make_drafter(tmp_path, config, unsaved=True)
    model = ModelConfig.from_hf(read_json(target / "config.json"))
    save_speculators(drafter, tmp_path / "spec", model, target_name="t", target_architectures=["L"])
    tensors = load_file(tmp_path / "spec" / "model.safetensors")
    assert tensors["d2t"].dtype == torch.int64
    assert tensors["t2d"].nonzero().squeeze(1).tolist() == list(range(0, 200, 2))
    assert load_drafter(tmp_path / "spec", model).config.draft_vocab_size == 100
    with pytest.raises(UnsupportedModelError, match="reduced vocabulary"):
        export(tmp_path / "spec", tmp_path / "zlab", "zlab", str(target))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"embed_scale": 5.0}, "embedding scale is 5.0"),
        ({"output_multiplier": 2.0}, "output multiplier"),
        ({"logit_softcap": 30.0}, "softcap"),
        ({"causal": (True, True)}, "causal within a block"),
        ({"windows": (5, 5), "causal": (True, True), "embed_scale": 2.0}, "scale"),
    ],
)
def test_what_speculators_cannot_say(
    tmp_path: Path, target: Path, changes: dict[str, Any], message: str
) -> None:
    make_drafter(tmp_path / "zlab", replace(CONFIG, **changes))
    with pytest.raises(UnsupportedModelError, match=message):
        export(tmp_path / "zlab", tmp_path / "spec", "speculators", str(target))
    assert not (tmp_path / "spec").exists()


def test_the_targets_own_scale_counts(tmp_path: Path) -> None:
    gemma = make_tiny_checkpoint(tmp_path / "gemma", "gemma4")
    make_drafter(tmp_path / "zlab")
    with pytest.raises(UnsupportedModelError, match="embedding scale"):
        export(tmp_path / "zlab", tmp_path / "spec", "speculators", str(gemma))


def test_what_cannot_be_exported(tmp_path: Path, target: Path) -> None:
    make_drafter(tmp_path / "zlab")
    for out, layout, model, message in (
        ("out", "eagle", None, "layout"),
        ("out", "speculators", None, "--model"),
        ("zlab", "zlab", None, "already holds a checkpoint"),
        ("target/config.json", "zlab", None, "is a file"),
    ):
        with pytest.raises(RequestError, match=message):
            export(tmp_path / "zlab", tmp_path / out, layout, model)
    make_drafter(tmp_path / "other", replace(CONFIG, hidden_size=48))
    with pytest.raises(FlashdraftError, match="hidden size is 48, the target's is 32"):
        export(tmp_path / "other", tmp_path / "out", "zlab", str(target))
    assert not (tmp_path / "out").exists()


def test_provenance_travels_with_the_drafter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", [str(tmp_path / "bin" / "flashdraft"), "train", "--seed", "1"])
    make_drafter(tmp_path / "zlab")
    record = provenance(
        target={"name": "tiny", "fingerprint": "ab"},
        data=[{"digest": "cd", "examples": 3}],
        recipe={"lr": 6e-4},
        held_out={"accepted_length": 3.1},
    )
    write_provenance(tmp_path / "zlab", record)
    export(tmp_path / "zlab", tmp_path / "out")
    found = read_provenance(tmp_path / "out")
    assert found is not None
    exported = found.pop("exported")
    assert found == json.loads(json.dumps(record))
    assert found["argv"] == ["flashdraft", "train", "--seed", "1"]  # no folders of this machine
    assert {"torch", "python"} <= found["versions"].keys()
    assert found["versions"]["flashdraft"] == VERSION
    assert found["created"] and found["hardware"] and "commit" in found
    assert exported["layout"] == "zlab"
    assert not list((tmp_path / "out").glob("*.part"))


@pytest.mark.parametrize(
    ("trained", "asked", "refused"),
    [
        (("int4", "int8"), (), True),
        (("int4", "int8"), ("fp8",), True),
        (("int4", "int8"), ("int4", "fp8"), True),
        ((None, None), ("int4",), True),
        ((None, "fp8"), ("fp8",), True),
        (("int4", "int8"), ("int4",), False),
        (("int4", "int8"), ("int4", "int8"), False),
        ((None, None), (), False),
    ],
)
def test_a_drafter_is_exported_for_the_format_it_was_trained_on(
    tmp_path: Path,
    target: Path,
    trained: tuple[str | None, ...],
    asked: tuple[str | None, ...],
    refused: bool,
) -> None:
    make_drafter(tmp_path / "zlab")
    formats, said = WeightOptions(*trained), WeightOptions(*asked)
    about = {"name": "tiny", "fingerprint": "ab", **formats._asdict()}
    write_provenance(tmp_path / "zlab", provenance(target=about, data=[], recipe={}))
    arguments = (tmp_path / "zlab", tmp_path / "out", "speculators", str(target), said)
    if refused:
        with pytest.raises(RequestError, match="on tiny with its weights") as caught:
            export(*arguments)
        assert formats.describe() in str(caught.value) and said.describe() in str(caught.value)
        assert not (tmp_path / "out").exists()
    else:
        found = read_provenance(export(*arguments))
        assert found is not None and found["target"] == about  # it travels on
    export(tmp_path / "zlab", tmp_path / "nameless")  # this layout names no target


def test_an_old_record_is_of_a_target_as_stored(tmp_path: Path, target: Path) -> None:
    make_drafter(tmp_path / "zlab")
    record = provenance(target={"name": "tiny", "fingerprint": "ab"}, data=[], recipe={})
    write_provenance(tmp_path / "zlab", record)
    arguments = (tmp_path / "zlab", tmp_path / "out", "speculators", str(target))
    with pytest.raises(RequestError, match="on tiny with its weights as stored"):
        export(*arguments, WeightOptions("int4"))
    assert export(*arguments).is_dir()


def test_who_records_no_target_is_believed(tmp_path: Path, target: Path) -> None:
    make_drafter(tmp_path / "zlab")
    asked = WeightOptions("int4", "int8")
    folder = export(tmp_path / "zlab", tmp_path / "out", "speculators", str(target), asked)
    found = read_provenance(folder)
    assert found is not None and found["exported"]["quantize"] == "int4"
    assert found["exported"]["quantize_head"] == "int8"


def test_formats_that_nobody_could_have_recorded(tmp_path: Path, target: Path) -> None:
    make_drafter(tmp_path / "zlab")
    about = {"name": "tiny", "quantize": ["x"], "quantize_head": 7}
    write_provenance(tmp_path / "zlab", provenance(target=about, data=[], recipe={}))
    with pytest.raises(CheckpointError, match="damaged: quantize is .*Delete it"):
        export(tmp_path / "zlab", tmp_path / "out", "zlab", str(target))


@pytest.mark.parametrize(
    "error", [SafetensorError("I/O error: No space left on device"), OSError(28, "No space left")]
)
def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    make_drafter(tmp_path / "zlab")

    def full(_tensors: object, path: Path, **__: object) -> None:
        path.write_bytes(b"half")
        raise error

    monkeypatch.setattr("flashdraft.models.drafter.loading.save_file", full)
    with pytest.raises(RequestError, match="out cannot be written: .*No space left.*Make room"):
        export(tmp_path / "zlab", tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_damaged_provenance(tmp_path: Path) -> None:
    assert read_provenance(tmp_path) is None
    (tmp_path / "flashdraft.json").write_text("{")
    with pytest.raises(FlashdraftError, match="damaged"):
        read_provenance(tmp_path)
