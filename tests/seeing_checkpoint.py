"""A tiny random Gemma 4 with a vision tower, as transformers makes and writes it.

As a small one it has what E2B and E4B have: inputs of every layer's own, layers that share keys and
values, a tower with limits, and one for sounds, which nobody reads.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken

from tests.tiny import VOCAB_SIZE, make_tiny_tokenizer

CELL, BUDGET = 12, 70  # pixels of a token's side, tokens of a picture by default
_MARKS = {499: "<|image>", 500: "<|image|>", 502: "<image|>", 504: "<|video|>"}
_LAYERS = [*["sliding_attention"] * 5, "full_attention"] * 2
_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}"
    "{% if part.type == 'image' %}<|image|>{% elif part.type == 'video' %}<|video|>"
    "{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}<|im_start|>model\n"
)
_TEXT: dict[str, Any] = {
    "model_type": "gemma4_text",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_global_key_value_heads": 1,
    "head_dim": 16,
    "global_head_dim": 32,
    "attention_k_eq_v": True,
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 512,
    "sliding_window": 96,
    "max_position_embeddings": 4096,
    "layer_types": _LAYERS,
    "final_logit_softcapping": 30.0,
    "rope_parameters": {
        "full_attention": {
            "rope_type": "proportional",
            "partial_rotary_factor": 0.25,
            "rope_theta": 1000000.0,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "use_bidirectional_attention": "vision",
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "eos_token_id": 2,
    "bos_token_id": 0,
}
_VISION: dict[str, Any] = {
    "model_type": "gemma4_vision",
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "global_head_dim": 24,
    "pooling_kernel_size": 3,
    "patch_size": CELL // 3,
    "position_embedding_size": 512,
    "use_clipped_linears": False,
    "standardize": True,
    "default_output_length": BUDGET,
    "rope_parameters": {"rope_theta": 100.0, "rope_type": "default"},
}
_SMALL_TEXT: dict[str, Any] = {
    "attention_k_eq_v": False,
    "num_global_key_value_heads": None,
    "num_kv_shared_layers": 4,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 8,
    "use_bidirectional_attention": None,
}
_SMALL_VISION = {"standardize": False, "use_clipped_linears": True}
_AUDIO: dict[str, Any] = {
    "model_type": "gemma4_audio",
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "subsampling_conv_channels": [4, 2],
    "output_proj_dims": 24,
}


def make_seeing_checkpoint(folder: Path, small: bool = False, **tower: int) -> Path:
    """Write the model with its tokenizer and a chat template into `folder`; return it.

    `tower` are other sizes of its tower, as a vision_config names them.
    """
    library = importlib.import_module("transformers")
    config = library.Gemma4Config(
        text_config={**_TEXT, **(_SMALL_TEXT if small else {})},
        vision_config={**_VISION, **(_SMALL_VISION if small else {}), **tower},
        audio_config=_AUDIO if small else None,
        boi_token_id=499,
        eoi_token_id=502,
        image_token_id=500,
        video_token_id=504,
        audio_token_id=501,
        eos_token_id=2,
        vision_soft_tokens_per_image=BUDGET,
        tie_word_embeddings=True,
        dtype="float32",
    )
    torch.manual_seed(5)
    model = library.Gemma4ForConditionalGeneration(config)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "inv_freq" in name or not tensor.is_floating_point():
                continue
            if name.endswith(("_min", "_max")):  # of a tower's matrices: they are reached
                tensor.fill_(-0.2 if name.endswith("_min") else 0.2)
            elif tensor.dim() < 2 and "std_bias" not in name:  # norms and scales stay near 1
                center = 0.5 if "q_norm" in name or "k_norm" in name else 1.0
                tensor.copy_(center + 0.1 * torch.randn_like(tensor))
            else:
                tensor.copy_(0.15 * torch.randn_like(tensor))
    model.save_pretrained(folder)
    tokenizer = make_tiny_tokenizer()
    names = [_MARKS.get(index, f"<unused{index}>") for index in range(VOCAB_SIZE, 512)]
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in names])
    assert tokenizer.token_to_id("<|image|>") == 500
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>", "chat_template": _TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    return folder
