"""The drafter's config, from both published layouts and back to the native one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from flashdraft.errors import CheckpointError, FlashdraftError, UnsupportedModelError
from flashdraft.models.config.rope import RopeConfig
from flashdraft.models.drafter.config import DrafterConfig, tensor_shapes
from flashdraft.models.drafter.head_config import MARKOV, SELECTOR, ConvolutionConfig, HeadConfig
from flashdraft.models.drafter.model import Drafter

SLIDING, FULL = "sliding_attention", "full_attention"
GEMMA: dict[str, Any] = {  # the published config of the Gemma 4 26B-A4B drafter
    "architectures": ["DFlashDraftModel"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "block_size": 16,
    "dflash_config": {"mask_token_id": 4, "target_layer_ids": [1, 6, 11, 17, 22, 27]},
    "dtype": "bfloat16",
    "final_logit_softcapping": 30.0,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2816,
    "intermediate_size": 5632,
    "layer_types": [SLIDING] * 4 + [FULL],
    "max_position_embeddings": 262144,
    "max_window_layers": 5,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 5,
    "num_key_value_heads": 8,
    "num_target_layers": 30,
    "rms_norm_eps": 1e-06,
    "sliding_window": 2048,
    "tie_word_embeddings": False,
    "use_sliding_window": True,
    "vocab_size": 262144,
    "rope_theta": 1000000,
    "rope_scaling": None,
}
SPECULATORS: dict[str, Any] = {
    "speculators_model_type": "dflash",
    "architectures": ["DFlashSpeculator"],
    "aux_hidden_state_layer_ids": [1, 17, 29, 47, 58],
    "block_size": 8,
    "draft_vocab_size": 32000,
    "mask_token_id": 4,
    "sliding_window_non_causal": False,
    "sample_from_anchor": False,
    "transformer_layer_config": {  # only what differs from the defaults of its class
        "model_type": "qwen3",
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "num_hidden_layers": 2,
        "num_key_value_heads": 16,
        "layer_types": [SLIDING, FULL],
        "use_sliding_window": True,
        "sliding_window": 2048,
        "vocab_size": 262144,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
}
SECOND = {  # of DFlash 2's dflash_config
    "conv_kernel_size": 2,
    "conv_group_size": 16,
    "selector_rank": 256,
    "selector_top_k": 16,
}
DSPARK: dict[str, Any] = {  # as DeepSpec writes them, beside the target's own keys
    **{key: value for key, value in GEMMA.items() if key != "dflash_config"},
    "architectures": ["Qwen3DSparkModel"],
    "block_size": 7,
    "layer_types": [FULL] * 5,
    "mask_token_id": 4,
    "num_anchors": 512,
    "target_layer_ids": [1, 6, 11, 17, 22, 27],
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
    "markov_rank": 256,
    "markov_head_type": "vanilla",
}
TINY = replace(DrafterConfig.from_hf(GEMMA), num_layers=2, windows=(5, None), causal=(True, False))


def changed(base: dict[str, Any], options: dict[str, Any] | None = None, **keys: Any) -> Any:
    """A config with some keys changed, those of dflash_config given as `options`."""
    nested = base.get("dflash_config", {})
    return {**base, "dflash_config": {**nested, **(options or {})}, **keys}


class TestZLabConfig:
    def test_published_gemma_config(self) -> None:
        config = DrafterConfig.from_hf(GEMMA)
        assert (config.hidden_size, config.intermediate_size) == (2816, 5632)
        assert (config.num_heads, config.num_kv_heads, config.head_dim) == (32, 8, 128)
        assert config.windows == (2048, 2048, 2048, 2048, None)
        assert config.causal == (True, True, True, True, False)
        assert config.tap_layers == (1, 6, 11, 17, 22, 27)
        assert (config.block_size, config.mask_token_id) == (16, 4)
        assert (config.vocab_size, config.num_target_layers) == (262144, 30)
        assert config.rope == RopeConfig(1e6, 128, 128)
        assert (config.logit_softcap, config.output_multiplier) == (30.0, 1.0)
        assert config.embed_scale is None and config.draft_vocab_size is None

    def test_any_width_is_a_property_of_the_checkpoint(self) -> None:
        assert not DrafterConfig.from_hf(GEMMA).any_width
        config = DrafterConfig.from_hf(changed(GEMMA, {"any_width": True}))
        assert config.any_width
        assert DrafterConfig.from_hf(config.to_hf()) == config
        assert "any_width" not in DrafterConfig.from_hf(GEMMA).to_hf()["dflash_config"]

    def test_dflash_config_goes_before_the_top_level(self) -> None:
        options = {
            "block_size": 8,
            "final_logit_softcapping": 15.0,
            "input_embedding_scale": 2.5,
            "output_multiplier": 0.5,
        }
        config = DrafterConfig.from_hf(changed(GEMMA, options))
        assert (config.block_size, config.logit_softcap) == (8, 15.0)
        assert (config.embed_scale, config.output_multiplier) == (2.5, 0.5)

    @pytest.mark.parametrize(
        ("options", "keys", "causal"),
        [
            ({}, {"is_causal": False}, (False,) * 5),
            ({}, {"is_causal": True}, (True,) * 5),
            ({"causal": True}, {}, (True,) * 5),
            ({"causal": True}, {"is_causal": False}, (False,) * 5),
            ({}, {"use_sliding_window": False}, (True,) * 4 + (False,)),
        ],
    )
    def test_causality_within_a_block(
        self, options: dict[str, Any], keys: dict[str, Any], causal: tuple[bool, ...]
    ) -> None:
        assert DrafterConfig.from_hf(changed(GEMMA, options, **keys)).causal == causal

    def test_layer_types_may_be_left_to_max_window_layers(self) -> None:
        without = {key: value for key, value in GEMMA.items() if key != "layer_types"}
        config = DrafterConfig.from_hf({**without, "max_window_layers": 3})
        assert config.windows == (None, None, None, 2048, 2048)
        config = DrafterConfig.from_hf({**without, "use_sliding_window": False})
        assert config.windows == (None,) * 5 and config.causal == (False,) * 5

    @pytest.mark.parametrize(
        ("bad", "words"),
        [
            (changed(GEMMA, {**SECOND, "markov_rank": 8}), "conv_kernel_size and markov_rank"),
            (changed(GEMMA, {"markov_rank": 8, "markov_head_type": "rnn"}), "markov_head_type"),
            (
                {**GEMMA, "architectures": ["Gemma4DSparkModel"], "dflash_config": None},
                "not a block",
            ),
            ({**GEMMA, "hidden_act": "gelu"}, "silu"),
            ({**GEMMA, "attention_bias": True}, "attention_bias"),
            ({**GEMMA, "model_type": "llama"}, "qwen3"),
            ({**GEMMA, "layer_types": ["chunked_attention"] * 5}, "chunked_attention"),
            ({"architectures": ["Qwen3ForCausalLM"]}, "not a block drafter"),
        ],
    )
    def test_what_is_not_supported_is_named(self, bad: dict[str, Any], words: str) -> None:
        with pytest.raises(UnsupportedModelError, match=words):
            DrafterConfig.from_hf(bad)

    @pytest.mark.parametrize(
        ("bad", "words"),
        [
            ({**GEMMA, "block_size": 1}, "at least 2"),
            ({**GEMMA, "architectures": ["DFlash2DraftModel"]}, "selector_rank"),
            (changed(GEMMA, {"conv_kernel_size": 2}), "selector_rank"),
            (changed(GEMMA, {**SECOND, "conv_group_size": 24}), "must divide"),
            (changed(GEMMA, {**SECOND, "selector_top_k": 64}), "selector_top_k"),
            (changed(GEMMA, {"markov_rank": 0}), "markov_rank"),
            (changed(GEMMA, {"mask_token_id": 262144}), "262144"),
            (changed(GEMMA, {"target_layer_ids": []}), "at least"),
            ({**GEMMA, "num_key_value_heads": 5}, "multiple"),
            ({**GEMMA, "layer_types": [FULL]}, "1 entries for 5"),
        ],
    )
    def test_contradictions_are_named(self, bad: dict[str, Any], words: str) -> None:
        with pytest.raises(CheckpointError, match=words):
            DrafterConfig.from_hf(bad)

    @pytest.mark.parametrize(
        "config",
        [
            DrafterConfig.from_hf(GEMMA),
            DrafterConfig.from_hf(changed(GEMMA, is_causal=False)),
            DrafterConfig.from_hf(changed(GEMMA, is_causal=True)),
            TINY,
            DrafterConfig.from_hf(changed(GEMMA, SECOND, architectures=["DFlash2DraftModel"])),
            DrafterConfig.from_hf(DSPARK),
            replace(TINY, head=HeadConfig(MARKOV, 8, is_gated=True), any_width=True),
            replace(TINY, num_target_layers=None, embed_scale=1.0, output_multiplier=0.25),
            replace(TINY, windows=(None, None), causal=(False, False), logit_softcap=30.0),
            replace(TINY, rope=RopeConfig(10000.0, 128, 128, (("factor", 4.0),))),
            replace(
                TINY,
                rope=RopeConfig(
                    1e6,
                    128,
                    128,
                    (
                        ("factor", 4.0),
                        ("original_max_position_embeddings", 32768.0),
                        ("beta_fast", 32.0),
                        ("beta_slow", 1.0),
                        ("attention_factor", 1.25),
                        ("truncate", 1.0),
                    ),
                ),
            ),
            replace(
                TINY,
                rope=RopeConfig(
                    500000.0,
                    128,
                    128,
                    (
                        ("factor", 8.0),
                        ("high_freq_factor", 4.0),
                        ("low_freq_factor", 1.0),
                        ("original_max_position_embeddings", 8192.0),
                    ),
                ),
            ),
        ],
    )
    def test_written_and_read_again(self, config: DrafterConfig) -> None:
        assert DrafterConfig.from_hf(config.to_hf()) == config

    @pytest.mark.parametrize("nested", [True, False])
    def test_second_generation(self, nested: bool) -> None:
        keys = changed(GEMMA, SECOND) if nested else {**GEMMA, **SECOND}
        config = DrafterConfig.from_hf({**keys, "architectures": ["DFlash2DraftModel"]})
        assert config.head == HeadConfig(SELECTOR, 256, 16)
        assert config.convolution == ConvolutionConfig(2, 16)
        assert config.num_slots == 15 and config.first_row == 1
        written = config.to_hf()
        assert written["architectures"] == ["DFlash2DraftModel"]
        assert written["dflash_config"].items() >= SECOND.items()

    def test_dspark_as_deepspec_writes_it(self) -> None:
        config = DrafterConfig.from_hf(DSPARK)
        assert config.head is not None and config.convolution is None
        assert (config.head.kind, config.head.rank, config.head.is_gated) == (MARKOV, 256, False)
        assert config.head.has_confidence and config.head.confidence_sees_token
        assert config.from_anchor and config.num_slots == 7 and config.first_row == 0
        assert config.causal == (False,) * 5

    def test_written_where_other_readers_look(self) -> None:
        written = TINY.to_hf()
        assert written["architectures"] == ["DFlashDraftModel"]
        assert written["model_type"] == "qwen3"
        assert written["rope_theta"] == 1e6
        assert written["block_size"] == written["dflash_config"]["block_size"] == 16
        assert written["dflash_config"]["target_layer_ids"] == [1, 6, 11, 17, 22, 27]
        assert written["layer_types"] == [SLIDING, FULL]
        assert "is_causal" not in written

    @pytest.mark.parametrize(
        "config",
        [
            replace(TINY, draft_vocab_size=20),
            replace(TINY, windows=(5, 6)),
            replace(TINY, causal=(False, True)),
        ],
    )
    def test_what_the_layout_cannot_say_is_not_written(self, config: DrafterConfig) -> None:
        with pytest.raises(UnsupportedModelError):
            config.to_hf()


class TestSpeculatorsConfig:
    def test_sparse_config(self) -> None:
        config = DrafterConfig.from_speculators(SPECULATORS)
        assert config.tap_layers == (0, 16, 28, 46, 57)
        assert (config.num_heads, config.num_kv_heads, config.head_dim) == (32, 16, 128)
        assert config.windows == (2048, None)
        assert config.causal == (True, False)
        assert config.embed_scale == 1.0
        assert (config.draft_vocab_size, config.vocab_size) == (32000, 262144)
        assert config.rope == RopeConfig(10000.0, 128, 128)
        assert config.num_target_layers is None

    def test_whole_vocabulary_and_bidirectional_windows(self) -> None:
        config = DrafterConfig.from_speculators(
            {**SPECULATORS, "draft_vocab_size": 262144, "sliding_window_non_causal": True}
        )
        assert config.draft_vocab_size is None
        assert config.causal == (False, False)

    def test_dspark_predicts_from_its_anchor_unless_it_says_otherwise(self) -> None:
        keys = {**SPECULATORS, "speculators_model_type": "dspark", "markov_head_type": "gated"}
        del keys["sample_from_anchor"]
        config = DrafterConfig.from_speculators(keys)
        assert config.head == HeadConfig(MARKOV, 256, 16, True, True, True)
        assert config.from_anchor and config.num_slots == 8 and config.draft_vocab_size == 32000
        config = DrafterConfig.from_speculators({**keys, "sample_from_anchor": False})
        assert not config.from_anchor and config.num_slots == 7

    def test_second_generation_sees_its_whole_block(self) -> None:
        keys = {**SPECULATORS, **SECOND, "speculators_model_type": "dflash2"}
        del keys["sliding_window_non_causal"]
        config = DrafterConfig.from_speculators({**keys, "draft_vocab_size": 262144})
        assert config.causal == (False, False) and config.head == HeadConfig(SELECTOR, 256, 16)
        assert config.convolution == ConvolutionConfig(2, 16)

    def test_our_own_key_is_read_where_it_stands(self) -> None:
        assert not DrafterConfig.from_speculators(SPECULATORS).any_width
        assert DrafterConfig.from_speculators({**SPECULATORS, "any_width": True}).any_width

    def test_rope_per_layer_kind(self) -> None:
        nested = {SLIDING: {"rope_theta": 5000.0}, FULL: {"rope_theta": 7.0}}
        layer = {**SPECULATORS["transformer_layer_config"], "rope_parameters": nested}
        config = DrafterConfig.from_speculators({**SPECULATORS, "transformer_layer_config": layer})
        assert config.rope.theta == 5000.0

    @pytest.mark.parametrize(
        "keys",
        [
            {"speculators_model_type": "eagle3"},
            {"target_hidden_size": 4096},
            {"aux_hidden_state_layer_ids": [0, 3]},
        ],
    )
    def test_what_is_not_supported_raises(self, keys: dict[str, Any]) -> None:
        with pytest.raises(FlashdraftError):
            DrafterConfig.from_speculators({**SPECULATORS, **keys})


def test_parameters_are_named_as_in_the_checkpoints() -> None:
    with torch.device("meta"):
        shapes = {
            name: list(tensor.shape)
            for name, tensor in Drafter(DrafterConfig.from_hf(GEMMA)).state_dict().items()
        }
    assert len(shapes) == 11 * 5 + 3
    assert sum(torch.Size(shape).numel() for shape in shapes.values()) == 429_689_088
    assert shapes["fc.weight"] == [2816, 16896]
    assert shapes["layers.4.self_attn.q_proj.weight"] == [4096, 2816]
    assert shapes["layers.4.self_attn.k_norm.weight"] == [128]
    assert shapes["layers.0.mlp.down_proj.weight"] == [2816, 5632]
    assert {"hidden_norm.weight", "norm.weight"} < shapes.keys()


ADDED: list[dict[str, Any]] = [
    {},
    {"head": HeadConfig(MARKOV, 8, is_gated=True, has_confidence=True)},
    {"head": HeadConfig(MARKOV, 8, has_confidence=True, confidence_sees_token=True)},
    {"head": HeadConfig(SELECTOR, 8), "convolution": ConvolutionConfig(2, 16)},
]


@pytest.mark.parametrize("added", ADDED)
@pytest.mark.parametrize("draft_vocab_size", [None, 40])
def test_the_shapes_are_those_of_the_module(
    draft_vocab_size: int | None, added: dict[str, Any]
) -> None:
    config = replace(DrafterConfig.from_hf(GEMMA), draft_vocab_size=draft_vocab_size, **added)
    with torch.device("meta"):
        module = Drafter(config)
    found = {name: tuple(one.shape) for name, one in module.named_parameters()}
    assert tensor_shapes(config) == found
