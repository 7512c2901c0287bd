"""The one table of what can be read: it names what the readers read, and the page has it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks import readable_tables
from flashdraft.errors import UnsupportedModelError
from flashdraft.models import sources
from flashdraft.models.adapters.config import read_adapter_config
from flashdraft.models.config.target import READERS, ModelConfig
from flashdraft.models.gguf.names import ARCHITECTURES
from flashdraft.models.readable import (
    FAMILIES,
    FORMATS,
    REFUSED_ADAPTERS,
    REFUSED_FAMILIES,
    REFUSED_FORMATS,
)
from flashdraft.models.sources import drafted_targets, known_models, readable_kinds
from tests import tiny, zoo


def test_every_model_type_and_architecture_is_in_the_table() -> None:
    assert {one for row in FAMILIES for one in row.model_types} == READERS.keys()
    assert {row.gguf for row in FAMILIES} - {None} == ARCHITECTURES.keys()
    assert not REFUSED_FAMILIES.keys() & READERS.keys()


def test_a_text_model_is_not_named_beside_its_whole() -> None:
    shown = {row.names: row.shown_types for row in FAMILIES}
    assert (shown["Gemma 3"], shown["Mistral"]) == ("gemma3", "mistral")


@pytest.mark.parametrize("configs", [zoo.CONFIGS, tiny.CONFIGS], ids=["law", "train"])
def test_every_family_is_among_the_targets_of_tests(configs: dict[str, dict[str, Any]]) -> None:
    tried = {config["model_type"] for config in configs.values()}
    gemma = zoo.CONFIGS["gemma4"]
    if "gemma4_text" in tried and read_as(gemma, "gemma4_unified_text") == read_as(gemma):
        tried.add("gemma4_unified_text")  # the same model by another name
    assert [row.names for row in FAMILIES if not tried & set(row.model_types)] == []


def read_as(config: dict[str, Any], model_type: str = "gemma4_text") -> ModelConfig:
    kept = {key: value for key, value in config.items() if key != "hidden_size_per_layer_input"}
    return ModelConfig.from_hf(kept | {"model_type": model_type})


def test_drafters_are_those_of_the_known_pairs() -> None:
    known = {name: one.family for name, one in sources._KNOWN.items()}
    assert set(known.values()) <= {row.names for row in FAMILIES}
    listed = [name for row in FAMILIES for name in drafted_targets(row.names)]
    assert sorted(listed) == sorted(one.name for one in known_models() if one.drafter)
    assert drafted_targets("Mistral") == []


@pytest.mark.parametrize("model_type", REFUSED_FAMILIES)
def test_refused_families_are_refused_with_the_reason(model_type: str) -> None:
    with pytest.raises(UnsupportedModelError, match=re.escape(REFUSED_FAMILIES[model_type])):
        ModelConfig.from_hf({"model_type": model_type})


def test_every_gguf_format_is_in_the_table() -> None:
    said = " ".join(row.names for row in FORMATS).replace(",", " ").split()
    assert set(readable_kinds().gguf) <= set(said)
    assert not set(REFUSED_FORMATS) & set(said)


@pytest.mark.parametrize("name", REFUSED_ADAPTERS)
def test_refused_adapters_are_refused_by_their_names(tmp_path: Path, name: str) -> None:
    keys = {"IA3": {"peft_type": "IA3"}, "DoRA": {"use_dora": True}, "QALoRA": {"use_qalora": True}}
    said = keys.get(name, {"init_lora_weights": name.lower()})
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"} | said))
    with pytest.raises(UnsupportedModelError, match=f"(?i){name}"):
        read_adapter_config(tmp_path)


def test_the_page_has_the_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert readable_tables.main(["--check"]) == 0, capsys.readouterr().out
