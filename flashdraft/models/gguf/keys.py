"""Which of llama.cpp's keys a GGUF file may have: read, without effect, or refused.

A file is like a config.json (config/keys.py): a key that nobody reads may change the forward pass,
so it must be known not to. Values and tensors are reader.py's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flashdraft.errors import UnsupportedModelError, quoted
from flashdraft.models.gguf.file import GGUFFile

_READ = """
    context_length embedding_length block_count feed_forward_length attention.head_count
    attention.head_count_kv attention.layer_norm_rms_epsilon attention.key_length rope.freq_base
    rope.scaling.type rope.scaling.factor rope.scaling.original_context_length
    rope.scaling.yarn_beta_fast rope.scaling.yarn_beta_slow expert_count"""
_EXPERTS = "expert_used_count expert_feed_forward_length"
_READ_IN: Mapping[str, str] = {
    "gemma4": f"""
        attention.sliding_window attention.sliding_window_pattern attention.key_length_swa
        attention.shared_kv_layers embedding_length_per_layer_input final_logit_softcapping
        rope.freq_base_swa {_EXPERTS}""",
    "qwen3moe": _EXPERTS,
    "gemma3": "attention.sliding_window rope.freq_base_swa",
}
_IRRELEVANT: Mapping[str, str] = {
    "the table of embeddings tells its size": "vocab_size",
    "how the tensors of the original lay in its file": "tensor_data_layout",
    "of another norm than the one these models have": "attention.layer_norm_epsilon",
    "it says how a context was stretched, not by what": "rope.scaling.finetuned",
}
_IRRELEVANT_IN: Mapping[str, Mapping[str, str]] = {
    "gemma4": {
        "rope_freqs.weight tells which dimensions of full layers rotate": "rope.dimension_count",
    },
}
_WITHOUT_EXPERTS: Mapping[str, str] = {"there are no experts": _EXPERTS}
# keys that may only say again what other keys, or the architecture, say already
_SAME_AS = {
    "attention.value_length": "attention.key_length",
    "attention.value_length_swa": "attention.key_length_swa",
    "rope.dimension_count": "attention.key_length",
    "rope.dimension_count_swa": "attention.key_length_swa",
    "embedding_length_out": "embedding_length",
}
_ONLY: Mapping[str, Any] = {
    "attention.causal": True,
    "rope.scale_linear": 1.0,
    "rope.scaling.attn_factor": 1.0,
    "logit_scale": 1.0,
    "residual_scale": 1.0,
    "embedding_scale": 1.0,
}
_ONLY_OF_EXPERTS: Mapping[str, Any] = {
    "expert_gating_func": 1,  # softmax
    "expert_weights_norm": True,
    "expert_weights_scale": 1.0,
}
_ONLY_IN: Mapping[str, Mapping[str, Any]] = {
    "gemma4": {**_ONLY_OF_EXPERTS, "attention.scale": 1.0},
    "qwen3moe": _ONLY_OF_EXPERTS,
}


def check_keys(file: GGUFFile, architecture: str, head_dim: int) -> None:
    """Refuse a file with a key of its architecture that is not read and may change something.

    `head_dim` is the size of a head where no key states it.
    """
    found = _READ_IN.get(architecture, "")
    reasons = {**_IRRELEVANT, **_IRRELEVANT_IN.get(architecture, {})}
    if _EXPERTS not in found:
        reasons |= _WITHOUT_EXPERTS
    passing = {key for keys in (_READ, found, *reasons.values()) for key in keys.split()}
    only = {**_ONLY, **_ONLY_IN.get(architecture, {})}
    prefix = f"{architecture}."
    stated = {
        key.removeprefix(prefix): value
        for key, value in file.metadata.items()
        if key.startswith(prefix)
    }
    for key, value in stated.items():
        if key in passing:
            continue
        if key in _SAME_AS:
            expected = stated.get(_SAME_AS[key], head_dim)
        elif key in only:
            expected = only[key]
        elif key == "attention.sliding_window" and _reaches(value, stated.get("context_length")):
            continue
        elif value:
            raise UnsupportedModelError(
                f"{file.path} has {quoted(prefix + key)} = {quoted(value)}; flashdraft does not "
                f"know what it changes in a {architecture} model. Use another file of the model."
            )
        else:
            continue
        if value != expected:
            raise UnsupportedModelError(
                f"{file.path} has {quoted(prefix + key)} = {quoted(value)}; only "
                f"{quoted(expected)} is supported in a {architecture} model. Use another file."
            )


def _reaches(window: Any, length: Any) -> bool:
    """Whether a window is as long as the context: then it hides nothing."""
    return isinstance(window, int) and isinstance(length, int) and (window == 0 or window >= length)
