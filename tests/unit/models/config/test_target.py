"""What a config.json may say: read within limits, known to be irrelevant, or refused in words."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest
import transformers

from flashdraft.errors import CheckpointError, UnsupportedModelError
from flashdraft.models.config.rope import RopeConfig
from flashdraft.models.config.target import ModelConfig
from flashdraft.models.drafter.config import DrafterConfig
from tests import zoo

FULL, SLIDING = "full_attention", "sliding_attention"
LLAMA, QWEN3, GEMMA4 = (dict[str, Any](zoo.CONFIGS[n]) for n in ("llama", "qwen3", "gemma4"))

# as published, sizes and all
LLAMA_3_2_1B = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "pad_token_id": 128004,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.45.0.dev0",
    "use_cache": True,
    "vocab_size": 128256,
}
SMOLLM2 = {
    **{key: LLAMA_3_2_1B[key] for key in ("architectures", "hidden_act", "model_type")},
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_size": 576,
    "initializer_range": 0.041666666666666664,
    "intermediate_size": 1536,
    "is_llama_config": True,
    "max_position_embeddings": 8192,
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "pad_token_id": 2,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_interleaved": False,
    "rope_scaling": None,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
    "vocab_size": 49152,
}
LLAMA_2 = {
    **SMOLLM2,
    "_name_or_path": "meta-llama/Llama-2-7b-chat-hf",
    "rope_scaling": {"type": "linear", "factor": 2.0},
    "unsloth_version": "2025.1.5",
    "auto_map": {"AutoConfig": "configuration_llama.LlamaConfig"},
    "max_length": 4096,
    "id2label": {"0": "LABEL_0"},
    "quantization_config": None,
}
QWEN3_4B = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2560,
    "initializer_range": 0.02,
    "intermediate_size": 9728,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "unsloth_fixed": True,
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3_CODER_30B = {
    **{key: value for key, value in QWEN3_4B.items() if key != "attention_bias"},
    "architectures": ["Qwen3MoeForCausalLM"],
    "decoder_sparse_step": 1,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 262144,
    "max_window_layers": 28,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "qkv_bias": False,
    "rope_theta": 10000000,
    "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 0,
    "tie_word_embeddings": False,
    "use_qk_norm": True,
}
QWEN2_5_7B = {
    **{key: QWEN3_4B[key] for key in ("bos_token_id", "eos_token_id", "hidden_act", "rope_theta")},
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "hidden_size": 3584,
    "initializer_range": 0.02,
    "intermediate_size": 18944,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "model_type": "qwen2",
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 152064,
}
MISTRAL_7B_V01 = {
    "architectures": ["MistralForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.34.0.dev0",
    "use_cache": True,
    "vocab_size": 32000,
}
GEMMA3_4B = {  # the text part leaves out what transformers knows
    "architectures": ["Gemma3ForConditionalGeneration"],
    "boi_token_index": 255999,
    "eoi_token_index": 256000,
    "eos_token_id": [1, 106],
    "image_token_index": 262144,
    "initializer_range": 0.02,
    "mm_tokens_per_image": 256,
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "transformers_version": "4.50.0.dev0",
    "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
}
GEMMA3_1B = {
    "architectures": ["Gemma3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_logit_softcapping": None,
    "bos_token_id": 2,
    "cache_implementation": "hybrid",
    "eos_token_id": [1, 106],
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "initializer_range": 0.02,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "model_type": "gemma3_text",
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 262144,
}
PUBLISHED = [
    GEMMA3_4B,
    GEMMA3_1B,
    QWEN3_CODER_30B,
    QWEN2_5_7B,
    MISTRAL_7B_V01,
    LLAMA_3_2_1B,
    SMOLLM2,
    LLAMA_2,
    QWEN3_4B,
]
GEMMA4_WHOLE = {
    "architectures": ["Gemma4ForConditionalGeneration"],
    "model_type": "gemma4",
    "dtype": "bfloat16",
    "audio_config": None,
    "text_config": {
        **{key: value for key, value in GEMMA4.items() if key != "architectures"},
        "vocab_size_per_layer_input": 67,
        "num_kv_shared_layers": 0,
        "use_bidirectional_attention": "vision",
        "hidden_activation": "gelu_pytorch_tanh",
        "use_double_wide_mlp": False,
        "pad_token_id": 0,
        "enable_moe_block": False,
    },
    "vision_config": {"model_type": "gemma4_vision", "hidden_size": 1152},
    "vision_soft_tokens_per_image": 280,
    "boi_token_id": 50,
    "eoi_token_id": 52,
    "image_token_id": 51,
    "video_token_id": 53,
    "boa_token_id": 258881,
    "eoa_token_id": 54,
    "eoa_token_index": 54,
    "audio_token_id": 55,
    "eos_token_id": [1, 6],
    "tie_word_embeddings": True,
    "initializer_range": 0.02,
    "transformers_version": "5.5.0",
}


@pytest.mark.parametrize("raw", [*PUBLISHED, GEMMA4_WHOLE])
def test_published_configs_are_read(raw: dict[str, Any]) -> None:
    assert ModelConfig.from_hf(raw).vocab_size > 0


@pytest.mark.parametrize(
    "config",
    [
        transformers.LlamaConfig(num_hidden_layers=2),
        transformers.Qwen2Config(num_hidden_layers=2),
        transformers.Qwen3Config(num_hidden_layers=2),
        transformers.Qwen3MoeConfig(num_hidden_layers=2, norm_topk_prob=True),
        transformers.MistralConfig(num_hidden_layers=2),
        transformers.Gemma3TextConfig(num_hidden_layers=6),
        transformers.Gemma3Config(text_config={"num_hidden_layers": 6}),
        transformers.Gemma4TextConfig(num_hidden_layers=6, hidden_size_per_layer_input=0),
        transformers.Gemma4TextConfig(num_hidden_layers=12, num_kv_shared_layers=6),
        transformers.Gemma4UnifiedConfig(text_config={"num_hidden_layers": 6}),
        transformers.Gemma4Config(text_config={"hidden_size_per_layer_input": 0}),
    ],
    ids=lambda config: config.model_type,
)
def test_whatever_transformers_writes_is_read(config: Any) -> None:
    ModelConfig.from_hf(config.to_diff_dict())
    ModelConfig.from_hf(config.to_dict())


def test_qwen3_slides_from_max_window_layers_on() -> None:
    raw = {**QWEN3, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}
    for changes in ({}, {"sliding_window": None}, {"use_sliding_window": False}):
        expected = transformers.Qwen3Config(**{**raw, **changes})
        found = ModelConfig.from_hf({**raw, **changes})
        kinds = [FULL if layer.window is None else SLIDING for layer in found.layers]
        assert kinds == expected.layer_types
    assert ModelConfig.from_hf(raw).layers[1].window == 9


def test_one_window_for_every_layer() -> None:
    """Mistral's key alone says it, Qwen3's with experts only where another asks for it."""
    windows = [layer.window for layer in ModelConfig.from_hf(MISTRAL_7B_V01).layers]
    assert windows == [4096] * 32
    for changes, window in (({"sliding_window": None}, None), ({"sliding_window": 8}, 8)):
        found = ModelConfig.from_hf({**MISTRAL_7B_V01, **changes})
        assert {layer.window for layer in found.layers} == {window}
    absent = {key: value for key, value in MISTRAL_7B_V01.items() if key != "sliding_window"}
    assert ModelConfig.from_hf(absent).layers[0].window == 4096  # as in transformers
    experts = {**QWEN3_CODER_30B, "sliding_window": 8}
    assert ModelConfig.from_hf(experts).layers[0].window is None
    asked = ModelConfig.from_hf({**experts, "use_sliding_window": True})
    assert {layer.window for layer in asked.layers} == {8}


def test_layers_of_experts_alone_have_no_mlp() -> None:
    config = ModelConfig.from_hf(QWEN3_CODER_30B)
    assert config.experts is not None and config.experts.num_experts == 128
    assert config.intermediate_size == 0 and config.layers[0].head_dim == 128
    saved = {**QWEN3_CODER_30B, "num_experts": None, "num_local_experts": 64}  # transformers 5
    experts = ModelConfig.from_hf(saved).experts
    assert experts is not None and experts.num_experts == 64


def test_gemma3_has_two_ropes_and_what_files_leave_out() -> None:
    config = ModelConfig.from_hf(GEMMA3_4B)
    assert [layer.window for layer in config.layers[:6]] == [1024] * 5 + [None]
    sliding, full = config.layers[0], config.layers[5]
    assert (sliding.rope.theta, sliding.rope.scaling) == (1e4, ())
    assert (full.rope.theta, full.rope.scaling) == (1e6, (("factor", 8.0),))
    assert (config.vocab_size, sliding.head_dim, sliding.num_kv_heads) == (262208, 256, 4)
    assert config.attention_scale == 1 / 16 and config.norm_offset == 1.0
    assert config.eos_token_ids == (1, 106) and config.tie_embeddings
    assert config.vision is None and "gemma3" in str(config.why_no_vision).lower()
    small = ModelConfig.from_hf(GEMMA3_1B)
    assert {layer.rope for layer in small.layers} == {
        RopeConfig(1e4, 256, 256),
        RopeConfig(1e6, 256, 256),
    }
    every_third = ModelConfig.from_hf({**GEMMA3_1B, "sliding_window_pattern": 3})
    assert [layer.window for layer in every_third.layers[:3]] == [512, 512, None]


GEMMA4_E2B = {
    **GEMMA4_WHOLE["text_config"],
    "architectures": ["Gemma4ForConditionalGeneration"],
    "model_type": "gemma4_text",
    "attention_k_eq_v": False,
    "layer_types": [SLIDING, FULL] * 3,
    "num_hidden_layers": 6,
    "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 8,
    "use_bidirectional_attention": None,
}


def test_last_layers_of_small_gemma4_read_what_others_keep() -> None:
    config = ModelConfig.from_hf(GEMMA4_E2B)
    assert [layer.kv_source for layer in config.layers] == [None, None, None, 1, 2, 1]
    inner = GEMMA4["intermediate_size"]
    assert [layer.intermediate_size for layer in config.layers] == [inner] * 3 + [2 * inner] * 3
    assert config.cached_layers == config.layers[:3]
    assert config.cache_places == (0, 1, 2, 1, 2, 1)
    assert config.per_layer is not None and config.per_layer.width == 8
    narrow = ModelConfig.from_hf({**GEMMA4_E2B, "use_double_wide_mlp": False})
    assert {layer.intermediate_size for layer in narrow.layers} == {inner}
    whole = ModelConfig.from_hf(GEMMA4)
    assert whole.cache_places == (0, 1, 2, 3) and whole.cached_layers == whole.layers


def test_the_text_of_gemma4_12b_is_a_gemma4() -> None:
    unified = {**GEMMA4_WHOLE, "model_type": "gemma4_unified"}
    unified["vision_config"] = {"model_type": "gemma4_unified_vision"}
    text = {key: value for key, value in unified["text_config"].items() if "experts" not in key}
    unified["text_config"] = {**text, "model_type": "gemma4_unified_text"}
    found = ModelConfig.from_hf(unified)
    assert found.layers == ModelConfig.from_hf(GEMMA4_WHOLE).layers
    assert found.vision is None and "gemma4_unified_vision" in str(found.why_no_vision)


def test_gpt_oss_is_refused_with_what_it_would_take() -> None:
    raw = {**LLAMA, "model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"]}
    with pytest.raises(UnsupportedModelError, match=r"'gpt_oss'.*sinks.*MXFP4.*vLLM.*supported ty"):
        ModelConfig.from_hf(raw)


def test_biases_by_family() -> None:
    def biases(raw: dict[str, Any]) -> tuple[bool, bool]:
        config = ModelConfig.from_hf(raw)
        return config.qkv_bias, config.output_bias

    assert biases(QWEN2_5_7B) == biases({**QWEN2_5_7B, "attention_bias": True}) == (True, False)
    assert biases({**LLAMA, "attention_bias": True}) == (True, True)
    assert biases(MISTRAL_7B_V01) == biases(LLAMA) == (False, False)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ({**QWEN3_CODER_30B, "norm_topk_prob": False}, "norm_topk_prob = False"),
        ({**QWEN3_CODER_30B, "mlp_only_layers": [3]}, "mlp_only_layers"),
        ({**QWEN3_CODER_30B, "decoder_sparse_step": 2}, "decoder_sparse_step = 2"),
        ({**QWEN3_CODER_30B, "shared_expert_intermediate_size": 512}, "shared_expert"),
        ({**QWEN3_CODER_30B, "use_qk_norm": False}, "use_qk_norm = False"),
        ({**QWEN3_CODER_30B, "layer_types": [SLIDING] * 48}, "sliding layers"),
        ({**QWEN2_5_7B, "num_experts": 60}, "num_experts"),
        ({**GEMMA3_1B, "use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({**GEMMA3_1B, "attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({**GEMMA3_1B, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({**GEMMA3_1B, "hidden_activation": "silu"}, "silu"),
        ({**MISTRAL_7B_V01, "attention_bias": True}, "attention_bias"),
        ({**QWEN3, "rope_scaling": {"type": "yarn", "factor": 4.0, "mcale": 1}}, "mcale"),
        ({**QWEN3, "layer_types": [SLIDING] * 4}, "use_sliding_window"),
        ({**QWEN3, "layer_types": ["chunked_attention"] * 4}, "chunked_attention"),
        ({**LLAMA, "layer_types": [SLIDING] * 4, "sliding_window": 8}, "layer_types"),
        ({**LLAMA, "no_rope_layers": [1, 1, 1, 0]}, "no_rope_layers"),
        ({**LLAMA, "logits_scaling": 8.0}, "logits_scaling"),
        ({**LLAMA, "per_layer_config": {"1": {"head_dim": 4}}}, "per_layer_config"),
        ({**LLAMA, "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({**LLAMA, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({**LLAMA, "rope_scaling": {"type": "linear", "factor": 2.0, "mscale": 1}}, "mscale"),
        (
            {
                **LLAMA,
                "rope_scaling": {"type": "linear", "factor": 2.0},
                "rope_parameters": {"rope_type": "default"},
            },
            "differ",
        ),
        ({**LLAMA, "is_causal": False}, "is_causal = false"),
        ({**GEMMA4, "is_causal": False}, "is_causal = false"),
        ({**GEMMA4, "use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
        ({**GEMMA4, "hidden_activation": "silu"}, "silu"),
        ({**GEMMA4, "layer_types": ["linear_attention"] * 4}, "linear_attention"),
        ({**GEMMA4, "per_layer_config": {"01": {"intermediate_size": 9}}}, "intermediate_size"),
        ({**GEMMA4, "attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        (
            {**GEMMA4, "rope_parameters": {**GEMMA4["rope_parameters"], "rope_theta": 9.0}},
            "rope_theta",
        ),
        ({**GEMMA4_WHOLE, "tie_word_embeddings": False}, "tie_word_embeddings"),
        ({**GEMMA4_WHOLE, "hidden_size": 33}, "hidden_size"),
    ],
)
def test_what_is_not_done_is_refused_by_name(raw: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        ModelConfig.from_hf(raw)


def test_an_unknown_key_passes_where_it_says_nothing() -> None:
    nothing = {"new_key": None, "newer_key": False, "newest_key": 0, "other_key": [], "last": {}}
    assert ModelConfig.from_hf({**LLAMA, **nothing}) == ModelConfig.from_hf(LLAMA)
    with pytest.raises(UnsupportedModelError, match="new_key.*does not know what it changes"):
        ModelConfig.from_hf({**LLAMA, "new_key": "on"})


SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
)
ODD = [True, "8", [8], {"a": 8}, math.inf, -math.inf, math.nan, 10**30, -1, 0, 8.5]


def test_a_trained_length_outside_the_rope_section_has_priority() -> None:
    """As in transformers, whose Phi-3 has it there."""
    model = ModelConfig.from_hf({**LLAMA_3_2_1B, "original_max_position_embeddings": 64})
    scaling = dict(model.layers[0].rope.scaling)
    assert scaling["original_max_position_embeddings"] == 64 and scaling["factor"] == 32.0


@pytest.mark.parametrize("raw", [LLAMA, QWEN3, GEMMA4], ids=["llama", "qwen3", "gemma4"])
def test_odd_numbers_are_refused_in_words(raw: dict[str, Any]) -> None:
    for key in (*SIZES, *(["sliding_window"] if raw is GEMMA4 else [])):
        for value in ODD:
            with pytest.raises(
                CheckpointError, match=rf"not valid: .*{key}.* is .*must be .*again"
            ):
                ModelConfig.from_hf({**raw, key: value})


@pytest.mark.parametrize("key", ["rms_norm_eps", "rope_theta"])
@pytest.mark.parametrize("value", [math.inf, math.nan, -1.0, "1", True, [1.0], 10**400])
def test_odd_factors_are_refused_in_words(key: str, value: Any) -> None:
    with pytest.raises(CheckpointError, match=f"{key} is "):
        ModelConfig.from_hf({**LLAMA, key: value})


@pytest.mark.parametrize("key", ["eos_token_id", "bos_token_id"])
@pytest.mark.parametrize("value", [True, "2", [[2]], 10**30, -1, zoo.VOCAB, 1.5, {"a": 1}, [None]])
def test_odd_token_ids_are_refused_in_words(key: str, value: Any) -> None:
    with pytest.raises(CheckpointError, match=f"{key} is .*vocabulary"):
        ModelConfig.from_hf({**LLAMA, key: value})
    if key == "eos_token_id":
        with pytest.raises(CheckpointError, match=f"{key} is .*vocabulary"):
            ModelConfig.from_hf(LLAMA).with_generation({key: value})


@pytest.mark.parametrize(
    ("base", "changes"),
    [
        (LLAMA, {"num_hidden_layers": 10**7}),
        (GEMMA4, {"num_hidden_layers": 10**7}),
        (LLAMA, {"architectures": "LlamaForCausalLM"}),
        (LLAMA, {"architectures": [3]}),
        (LLAMA, {"text_config": ["model_type"]}),
        (LLAMA, {"text_config": "llama"}),
        (LLAMA, {"quantization_config": [1]}),
        (LLAMA, {"quantization_config": {"quant_method": "compressed-tensors"}}),
        (
            LLAMA,
            {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": 3}},
        ),
        (LLAMA, {"layer_types": FULL}),
        (LLAMA, {"layer_types": [FULL] * 3}),
        (LLAMA, {"layer_types": [1] * 4}),
        (LLAMA, {"rope_parameters": "default"}),
        (LLAMA, {"rope_parameters": {"rope_type": 3}}),
        (LLAMA, {"rope_parameters": {"rope_type": "linear", "factor": "2"}}),
        (LLAMA, {"rope_scaling": [8.0]}),
        (LLAMA, {"tie_word_embeddings": "yes"}),
        (LLAMA, {"attention_bias": 3}),
        (LLAMA, {"hidden_act": ["silu"]}),
        (LLAMA, {"image_token_id": "<image>"}),
        (QWEN3_CODER_30B, {"num_experts_per_tok": 200}),
        (QWEN3_CODER_30B, {"mlp_only_layers": ["3"]}),
        (QWEN3_CODER_30B, {"num_experts": True}),
        (QWEN3_CODER_30B, {"num_local_experts": 64}),
        (QWEN3, {"rope_scaling": {"type": "yarn"}}),
        (QWEN3, {"rope_theta": 1, "rope_scaling": {"type": "yarn", "factor": 4.0}}),
        (QWEN3, {"rope_scaling": {"type": "yarn", "factor": 4.0, "beta_slow": 1e-320}}),
        (QWEN3, {"rope_scaling": {"type": "yarn", "factor": 4.0, "beta_fast": math.inf}}),
        (QWEN3, {"rope_scaling": {"type": "yarn", "factor": 4.0, "beta_fast": -1}}),
        (QWEN3, {"rope_scaling": {"type": "yarn", "factor": 4.0, "attention_factor": 0}}),
        (QWEN3, {"rope_scaling": {"type": "yarn", "factor": 4.0, "attention_factor": math.nan}}),
        (QWEN3, {"rope_scaling": {"type": "yarn", "factor": 4.0, "beta_fast": "32"}}),
        (QWEN3, {"use_sliding_window": "yes"}),
        (QWEN3, {"use_sliding_window": True, "max_window_layers": 1e999}),
        (QWEN3, {"use_sliding_window": True, "sliding_window": "8"}),
        (GEMMA4, {"rope_parameters": None}),
        (GEMMA4, {"rope_parameters": {SLIDING: 3, FULL: 4}}),
        (GEMMA4, {"per_layer_config": [1]}),
        (GEMMA4, {"per_layer_config": {"first": {"head_dim": 4}}}),
        (GEMMA4, {"per_layer_config": {"1" * 5000: {"head_dim": 4}}}),
        (GEMMA4, {"per_layer_config": {"9": {"head_dim": 4}}}),
        (GEMMA4, {"per_layer_config": {"1": 4}}),
        (GEMMA4, {"final_logit_softcapping": "30"}),
        (GEMMA4, {"final_logit_softcapping": math.inf}),
        (GEMMA4, {"enable_moe_block": True}),
        (GEMMA4, {"enable_moe_block": "yes"}),
        (GEMMA4, {"num_kv_shared_layers": 4}),
        (GEMMA4, {"num_kv_shared_layers": 3}),  # no full layer before them
        (GEMMA4, {"num_kv_shared_layers": "2"}),
        (GEMMA4, {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 9}),
        (GEMMA4, {"hidden_size_per_layer_input": -8}),
    ],
)
def test_values_of_the_wrong_kind_are_refused_at_once(
    base: dict[str, Any], changes: dict[str, Any]
) -> None:
    begin = time.perf_counter()
    with pytest.raises(CheckpointError, match=r"not valid: .{1,400} again"):
        ModelConfig.from_hf({**base, **changes})
    assert time.perf_counter() - begin < 1.0


def test_media_tokens_are_forbidden_and_stop_tokens_are_not() -> None:
    assert ModelConfig.from_hf(GEMMA4_WHOLE).forbidden_token_ids == (50, 51, 52, 53, 54, 55)
    stopping = ModelConfig.from_hf({**GEMMA4_WHOLE, "eos_token_id": [1, 51]})
    assert stopping.forbidden_token_ids == (50, 52, 53, 54, 55)
    assert ModelConfig.from_hf(LLAMA).forbidden_token_ids == ()


def test_what_a_generation_config_adds() -> None:
    ordinary = {
        "_from_model_config": True,
        "bos_token_id": 1,
        "do_sample": True,
        "eos_token_id": [2, 7],
        "max_new_tokens": 2048,
        "pad_token_id": 0,
        "suppress_tokens": [7, 9],
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "num_beams": 1,
        "transformers_version": "5.5.0",
    }
    config = ModelConfig.from_hf(LLAMA).with_generation(ordinary)
    assert config.eos_token_ids == (2, 7)
    assert config.forbidden_token_ids == (9,)  # a stop token is a stop token


@pytest.mark.parametrize(
    "changes",
    [
        {"num_beams": 4},
        {"no_repeat_ngram_size": 3},
        {"bad_words_ids": [[5]]},
        {"forced_eos_token_id": 2},
        {"begin_suppress_tokens": [5]},
        {"guidance_scale": 2.0},
        {"watermarking_config": {"bias": 2.5}},
    ],
)
def test_ways_to_generate_that_are_not_done_are_left_out_aloud(
    changes: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    plain = ModelConfig.from_hf(LLAMA)
    assert plain.with_generation(changes) == plain
    (line,) = caplog.messages
    assert "generation_config.json" in line and next(iter(changes)) in line


ZLAB: dict[str, Any] = {
    **{key: value for key, value in QWEN3.items() if key != "architectures"},
    "architectures": ["DFlashDraftModel"],
    "num_hidden_layers": 2,
    "block_size": 4,
    "dflash_config": {"mask_token_id": 1, "target_layer_ids": [0, 2]},
}


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"attention_sink_bias": True}, UnsupportedModelError, "attention_sink_bias"),
        ({"partial_rotary_factor": 0.5}, UnsupportedModelError, "partial_rotary_factor"),
        (
            {"dflash_config": {**ZLAB["dflash_config"], "attention_value_scale": 0.6}},
            UnsupportedModelError,
            "dflash_config.attention_value_scale",
        ),
        ({"num_hidden_layers": 10**7}, CheckpointError, "num_hidden_layers"),
        ({"block_size": math.inf}, CheckpointError, "block_size"),
        ({"block_size": "4"}, CheckpointError, "block_size"),
        ({"num_target_layers": [4]}, CheckpointError, "num_target_layers"),
        (
            {"dflash_config": {"mask_token_id": 10**30, "target_layer_ids": [0]}},
            CheckpointError,
            "mask_token_id",
        ),
        (
            {"dflash_config": {"mask_token_id": 1, "target_layer_ids": ["0"]}},
            CheckpointError,
            "target_layer_ids",
        ),
        ({"is_causal": "no"}, CheckpointError, "is_causal"),
    ],
)
def test_what_a_drafter_does_not_do_is_refused(
    changes: dict[str, Any], error: type[Exception], words: str
) -> None:
    assert DrafterConfig.from_hf(ZLAB).tap_layers == (0, 2)
    with pytest.raises(error, match=words):
        DrafterConfig.from_hf({**ZLAB, **changes})


def test_what_a_speculators_drafter_does_not_do_is_refused() -> None:
    layers = {
        key: value for key, value in ZLAB.items() if key not in ("block_size", "dflash_config")
    }
    raw = {
        "speculators_model_type": "dflash",
        "architectures": ["DFlashSpeculator"],
        "speculators_version": "0.9.0",
        "speculators_config": {"algorithm": "dflash"},
        "transformer_layer_config": layers,
        "draft_vocab_size": zoo.VOCAB,
        "block_size": 4,
        "aux_hidden_state_layer_ids": [1, 3],
        "mask_token_id": 1,
        "dtype": "bfloat16",
    }
    assert DrafterConfig.from_speculators(raw).tap_layers == (0, 2)
    with pytest.raises(UnsupportedModelError, match="confidence_head"):
        DrafterConfig.from_speculators({**raw, "confidence_head": True})
    with pytest.raises(UnsupportedModelError, match="attention_sink"):
        DrafterConfig.from_speculators(
            {**raw, "transformer_layer_config": {**layers, "attention_sink": 1}}
        )
    with pytest.raises(CheckpointError, match="transformer_layer_config"):
        DrafterConfig.from_speculators({**raw, "transformer_layer_config": 3})


def test_a_text_part_may_say_what_it_is() -> None:
    """As transformers saves the text part of a multimodal model."""
    whole = {"model_type": "llama", "architectures": ["X"], "text_config": {**LLAMA}}
    assert ModelConfig.from_hf(whole).architecture == "X"
