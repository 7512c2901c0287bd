"""Vision towers in config.json: read, or refused without taking the text away."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from flashdraft.errors import CheckpointError
from flashdraft.models.config.layers import PerLayerConfig
from flashdraft.models.config.target import ModelConfig
from flashdraft.models.config.vision import NO_TOWER, VisionConfig, VisionTokens
from tests.unit.models.vision.towers import PUBLISHED, TOWER, published, published_small


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_towers_are_read(name: str) -> None:
    config = ModelConfig.from_hf(published(name))
    assert config.vision == VisionConfig(
        hidden_size=1152,
        intermediate_size=4304,
        num_layers=27,
        num_heads=16,
        head_dim=72,
        patch_size=16,
        pooling=3,
        num_positions=10240,
        rope_theta=100.0,
        norm_eps=1e-6,
        standardize=True,
        clipped=False,
        default_budget=280,
        tokens=VisionTokens(255999, 258880, 258882, 258884),
    )
    assert config.vision.cell == 48
    assert config.why_no_vision is None and config.sees_pictures_whole


def test_the_tower_of_a_small_model_is_read() -> None:
    """It has limits, its pictures are seen as text is, and what is for sounds is nobody's."""
    config = ModelConfig.from_hf(published_small())
    large = ModelConfig.from_hf(published("31B")).vision
    assert config.vision is not None and large is not None
    sizes = {"hidden_size": 768, "intermediate_size": 3072, "num_layers": 16, "num_heads": 12}
    assert config.vision == replace(large, **sizes, head_dim=64, standardize=False, clipped=True)
    assert config.why_no_vision is None and not config.sees_pictures_whole
    assert config.per_layer == PerLayerConfig(width=256, pad_token=0)
    assert set(config.forbidden_token_ids) == {
        *(255999, 258880, 258882, 258884),  # of pictures and films
        *(256000, 258881, 258883),  # of sounds
    }


def test_the_row_of_pictures_is_in_the_table() -> None:
    raw = published_small()
    raw["text_config"]["pad_token_id"] = 7
    per_layer = ModelConfig.from_hf(raw).per_layer
    assert per_layer is not None and per_layer.pad_token == 7
    raw["text_config"]["pad_token_id"] = 262144
    with pytest.raises(CheckpointError, match="pad_token_id is 262144; it must be .* to 262,143"):
        ModelConfig.from_hf(raw)


def with_tower(tower: Any = (), outer: Any = ()) -> ModelConfig:
    raw = published("31B")
    return ModelConfig.from_hf({**raw, "vision_config": {**TOWER, **dict(tower)}, **dict(outer)})


@pytest.mark.parametrize("raw", [published("31B") | {"vision_config": None}, None])
def test_text_alone(raw: dict[str, Any] | None) -> None:
    raw = raw or published("31B")["text_config"]
    config = ModelConfig.from_hf(raw)
    assert config.vision is None and config.why_no_vision == NO_TOWER


@pytest.mark.parametrize(
    ("tower", "outer", "why"),
    [
        ({"hidden_activation": "silu"}, {}, "hidden_activation = 'silu'"),
        ({"num_key_value_heads": 8}, {}, "num_key_value_heads = 8.*only towers with 16"),
        ({"global_head_dim": 64}, {}, "global_head_dim = 64.*only towers with 72"),
        ({"attention_bias": True}, {}, "attention_bias = True"),
        ({"rope_parameters": {"rope_type": "yarn"}}, {}, "RoPE of type 'yarn'"),
        ({"rope_parameters": {"factor": 2.0}}, {}, "factor.* does not know what it changes"),
        ({"layer_scale": 0.1}, {}, "'vision_config.layer_scale' = 0.1"),
        ({"model_type": "siglip_vision_model"}, {}, "of type 'siglip_vision_model'"),
        ({"head_dim": 70, "global_head_dim": 70}, {}, "head_dim is 70; .*multiple of 4"),
        ({"num_hidden_layers": 0}, {}, "num_hidden_layers is 0"),
        ({}, {"image_token_id": 262144}, "image_token_id is 262144"),
        ({}, {"eoi_token_id": 255999}, "three different tokens"),
        ({}, {"vision_soft_tokens_per_image": 0}, "vision_soft_tokens_per_image is 0"),
        ({}, {"vision_feature_layer": -2}, "'vision_feature_layer' = -2"),
    ],
)
def test_another_tower_leaves_the_text(tower: Any, outer: Any, why: str) -> None:
    config = with_tower(tower, outer)
    assert config.vision is None and (len(config.layers), config.hidden_size) == (60, 5376)
    assert config.why_no_vision is not None and re.search(why, config.why_no_vision)


def test_towers_of_other_families_leave_the_text() -> None:
    text = {
        **{"model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48},
        **{"num_hidden_layers": 2, "num_attention_heads": 4},
    }
    raw = {"model_type": "llava", "text_config": text, "image_token_index": 5}
    config = ModelConfig.from_hf({**raw, "vision_config": {"model_type": "clip_vision_model"}})
    assert config.vision is None and "'clip_vision_model'" in str(config.why_no_vision)


def test_what_is_missing_is_transformers_default() -> None:
    raw = published("31B") | {"vision_config": {}}
    for key in ("vision_soft_tokens_per_image", "boi_token_id", "image_token_id", "eoi_token_id"):
        del raw[key]
    vision = ModelConfig.from_hf(raw).vision
    assert vision is not None and (vision.hidden_size, vision.num_layers) == (768, 16)
    assert vision.default_budget == 280 and not vision.standardize
    assert vision.tokens == VisionTokens(255999, 258880, 258882, 258884)


def test_the_whole_configs_budget_goes_before_the_towers() -> None:
    changed = with_tower({"default_output_length": 70}, {"vision_soft_tokens_per_image": 140})
    assert changed.vision is not None and changed.vision.default_budget == 140


def test_without_vision() -> None:
    config = with_tower().without_vision("Because.")
    assert config.vision is None and config.why_no_vision == "Because."
