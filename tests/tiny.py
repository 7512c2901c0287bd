"""A tiny random checkpoint on disk, for tests that load one: weights, tokenizer, chat template.

    from tests.tiny import make_tiny_checkpoint
    llm = LLM(str(make_tiny_checkpoint(tmp_path, "gemma4")), dtype="float32")

The weights are random, with a fixed seed: the text is noise, and the same noise every time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import tokenizers
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from flashdraft.models.config.rope import RopeConfig
from flashdraft.models.drafter.config import DrafterConfig
from flashdraft.models.drafter.loading import save_drafter
from flashdraft.models.drafter.model import Drafter

VOCAB_SIZE = 300
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # ids 0, 1, 2
END_OF_TURN = 2
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# the merged tokens come from here: 300 - 256 bytes - 3 special tokens
_CORPUS = (
    "the quick brown fox jumps over the lazy dog and then the dog sleeps under the old tree while "
    "another fox thinks about nothing in particular; user assistant system token draft target"
)

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": END_OF_TURN,
    "dtype": "float32",
}
_LLAMA = _COMMON | {"hidden_act": "silu", "head_dim": 16, "rope_theta": 10000.0}
_GEMMA4 = _COMMON | {
    "model_type": "gemma4_text",
    "architectures": ["Gemma4ForCausalLM"],
    "head_dim": 16,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 24,
    "final_logit_softcapping": 30.0,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {
            "rope_type": "proportional",
            "partial_rotary_factor": 0.25,
            "rope_theta": 1000000.0,
        },
    },
}
_GEMMA3_KEYS = (*_COMMON, "head_dim", "layer_types", "sliding_window", "hidden_activation")
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _LLAMA | {"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
    "qwen3": _LLAMA | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]},
    "qwen2": _LLAMA | {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]},
    "mistral": _LLAMA
    | {
        "model_type": "mistral",
        "architectures": ["MistralForCausalLM"],
        "sliding_window": 24,
    },
    "qwen3-moe": _LLAMA
    | {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "norm_topk_prob": True,
    },
    "gemma3": {key: _GEMMA4[key] for key in _GEMMA3_KEYS}
    | {
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "query_pre_attn_scalar": 16,
        "rope_local_base_freq": 10000.0,
        "rope_theta": 1000000.0,
    },
    "gemma4": _GEMMA4,
    "gemma4-12b": {
        **{key: value for key, value in _GEMMA4.items() if key != "hidden_size_per_layer_input"},
        "model_type": "gemma4_unified_text",
    },
    "gemma4-small": {  # as E2B: layers 2 and 3 read what 0 and 1 keep
        **{key: value for key, value in _GEMMA4.items() if key != "num_global_key_value_heads"},
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "attention_k_eq_v": False,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB_SIZE,
    },
    "gemma4-moe": _GEMMA4
    | {
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 16,
    },
}


def make_tiny_checkpoint(folder: Path, family: str = "llama") -> Path:
    """Write a loadable model of one of the families in CONFIGS into `folder`; return it."""
    folder.mkdir(parents=True, exist_ok=True)
    config = CONFIGS[family]
    _write_json(folder / "config.json", config)
    generator = torch.Generator().manual_seed(1234)
    tensors = {}
    for name, shape in _shapes(config):
        # norms and scalars stay near 1, matrices large enough for clear favourites among tokens
        offset, spread = (1.0, 0.1) if len(shape) == 1 else (0.0, 0.2)
        tensors[name] = offset + spread * torch.randn(shape, generator=generator)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    make_tiny_tokenizer().save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "bos_token": SPECIAL_TOKENS[0],
            "eos_token": SPECIAL_TOKENS[END_OF_TURN],
            "chat_template": CHAT_TEMPLATE,
        },
    )
    return folder


def make_tiny_drafter(folder: Path) -> Path:
    """Write a random drafter of one layer for any of these targets into the folder."""
    config = DrafterConfig(
        hidden_size=32,
        intermediate_size=48,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        num_layers=1,
        vocab_size=VOCAB_SIZE,
        max_position=1024,
        norm_eps=1e-6,
        rope=RopeConfig(10000.0, 8, 8),
        windows=(None,),
        causal=(False,),
        block_size=5,
        mask_token_id=1,
        tap_layers=(0, 1),
    )
    torch.manual_seed(0)
    save_drafter(Drafter(config), folder, torch.float32)
    return folder


def make_tiny_tokenizer(marks: Sequence[str] = ()) -> tokenizers.Tokenizer:
    """A byte-level BPE of VOCAB_SIZE tokens: it can spell any text, and split any character.

    `marks` are further special tokens, with the ids from 3 on.
    """
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        min_frequency=1,
        special_tokens=[*SPECIAL_TOKENS, *marks],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_CORPUS], trainer)
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    return tokenizer


def make_byte_fallback_tokenizer() -> tokenizers.Tokenizer:
    """In Gemma's manner: single characters, and byte tokens for what is not in the vocabulary."""
    tokens = ["<pad>", "<mark>", "<eos>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcxEND"]
    vocab = {token: index for index, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [], unk_token="<pad>", byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    backend.add_special_tokens([AddedToken(one, special=True) for one in tokens[:3]])
    return backend


def _shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor of the model, by its name in a Hugging Face checkpoint."""
    is_gemma = config["model_type"].startswith("gemma")
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    yield "model.norm.weight", (hidden,)
    norms = ["input_layernorm", "post_attention_layernorm"]
    if is_gemma:
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    if is_gemma and "num_experts" in config:
        norms += [f"{place}_feedforward_layernorm_2" for place in ("pre", "post")]
        norms += ["post_feedforward_layernorm_1"]
    width, first_shared = config.get("hidden_size_per_layer_input"), _first_shared(config)
    if width:
        total = config["num_hidden_layers"] * width
        yield "model.embed_tokens_per_layer.weight", (config["vocab_size"], total)
        yield "model.per_layer_model_projection.weight", (total, hidden)
        yield "model.per_layer_projection_norm.weight", (width,)
    for index in range(config["num_hidden_layers"]):
        inner = config["intermediate_size"] * (1 if index < first_shared else 2)
        prefix = f"model.layers.{index}"
        for norm in norms:
            yield f"{prefix}.{norm}.weight", (hidden,)
        if width:
            yield f"{prefix}.per_layer_input_gate.weight", (width, hidden)
            yield f"{prefix}.per_layer_projection.weight", (hidden, width)
            yield f"{prefix}.post_per_layer_input_norm.weight", (hidden,)
        yield from _attention_shapes(config, index, f"{prefix}.self_attn")
        if config["model_type"] == "qwen3_moe":
            yield f"{prefix}.mlp.gate.weight", (config["num_experts"], hidden)
            size = config["moe_intermediate_size"]
            for expert in range(config["num_experts"]):  # one by one, as the Hub has them
                for name in ("gate", "up"):
                    yield f"{prefix}.mlp.experts.{expert}.{name}_proj.weight", (size, hidden)
                yield f"{prefix}.mlp.experts.{expert}.down_proj.weight", (hidden, size)
            continue
        for name in ("gate", "up"):
            yield f"{prefix}.mlp.{name}_proj.weight", (inner, hidden)
        yield f"{prefix}.mlp.down_proj.weight", (hidden, inner)
        if config["model_type"].startswith("gemma4"):
            yield f"{prefix}.layer_scalar", (1,)
        if "num_experts" in config:
            count, size = config["num_experts"], config["moe_intermediate_size"]
            yield f"{prefix}.router.scale", (hidden,)
            yield f"{prefix}.router.proj.weight", (count, hidden)
            yield f"{prefix}.router.per_expert_scale", (count,)
            yield f"{prefix}.experts.gate_up_proj", (count, 2 * size, hidden)
            yield f"{prefix}.experts.down_proj", (count, hidden, size)


def _first_shared(config: dict[str, Any]) -> int:
    """The first layer that reads another's keys and values."""
    layers: int = config["num_hidden_layers"]
    return layers - int(config.get("num_kv_shared_layers", 0))


def _attention_shapes(
    config: dict[str, Any], index: int, prefix: str
) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, dim, heads = config["hidden_size"], config["head_dim"], config["num_attention_heads"]
    kv_heads, projections = config["num_key_value_heads"], ["k", "v"]
    is_full = config.get("layer_types", ["full_attention"] * 2)[index] == "full_attention"
    if is_full and "global_head_dim" in config:
        dim = config["global_head_dim"]
        if config["attention_k_eq_v"]:
            kv_heads = config["num_global_key_value_heads"]
            projections = ["k"]  # the value is the key's projection
    is_shared = index >= _first_shared(config)
    projections = [] if is_shared else projections
    yield f"{prefix}.q_proj.weight", (heads * dim, hidden)
    yield f"{prefix}.o_proj.weight", (hidden, heads * dim)
    for name in projections:
        yield f"{prefix}.{name}_proj.weight", (kv_heads * dim, hidden)
    if config["model_type"] == "qwen2":
        yield f"{prefix}.q_proj.bias", (heads * dim,)
        yield f"{prefix}.k_proj.bias", (kv_heads * dim,)
        yield f"{prefix}.v_proj.bias", (kv_heads * dim,)
    if config["model_type"].startswith(("qwen3", "gemma")):
        yield f"{prefix}.q_norm.weight", (dim,)
        if not is_shared:
            yield f"{prefix}.k_norm.weight", (dim,)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2), encoding="utf-8")
