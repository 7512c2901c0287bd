"""Drafter checkpoints: read and written in z-lab's layout and in speculators'.

Strict: a tensor that is missing, misshapen or unknown is an error, and so is a drafter that does
not fit its target. What the tensors mean is model.py's business.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from flashdraft.errors import CheckpointError, UnsupportedModelError
from flashdraft.files import put_in_place, write_whole
from flashdraft.models.config.target import ModelConfig
from flashdraft.models.drafter.config import DSPARK_ARCHITECTURE, DrafterConfig
from flashdraft.models.drafter.head_config import SELECTOR
from flashdraft.models.drafter.model import Drafter
from flashdraft.models.drafter.opening import check_fit, is_speculators, read_drafter_config
from flashdraft.models.files.opening import read_json, reading
from flashdraft.models.files.safetensors import open_safetensors
from flashdraft.models.weights import GuardedTensors, Weights

# Frozen copies of the target's own tensors may lie beside the drafter's: speculators' (verifier is
# its word for the target, and t2d says again what d2t says) and DeepSpec's.
_TARGET_COPIES = ("embed_tokens.weight", "verifier_norm.weight", "verifier_lm_head.weight", "t2d")
_SPECULATORS_VERSION = "0.9.0"  # whose config this is
# what z-lab's config says beside the decoder's own keys
_NOT_DECODER_KEYS = (
    "architectures",
    "block_size",
    "dflash_config",
    "num_target_layers",
    "rope_scaling",
    "is_causal",
)


def load_drafter(
    folder: Path, target: ModelConfig | None, on_read: Callable[[str], None] | None = None
) -> Drafter:
    """Load a drafter for this target, in the checkpoint's own dtype; `on_read` hears every name.

    Without a target (to convert a checkpoint, say) nothing is checked against one.
    """
    config = read_drafter_config(folder)
    if target is not None:
        check_fit(config, target)
    with reading(f"The drafter in {folder}"):
        return _load_weights(folder, config, on_read)


def _load_weights(
    folder: Path, config: DrafterConfig, on_read: Callable[[str], None] | None
) -> Drafter:
    weights = Weights(GuardedTensors(open_safetensors(folder), folder), on_read)
    document = read_json(folder / "config.json")
    is_dspark = DSPARK_ARCHITECTURE in (document.get("architectures") or [])
    if is_speculators(document) or is_dspark:
        weights.drop(*_TARGET_COPIES)
        if config.draft_vocab_size is None:
            weights.drop("lm_head.weight", "d2t")  # the target's own head again, and no mapping
    with torch.device("meta"):
        drafter = Drafter(config)
    tensors = {
        name: weights.take(name, tensor.shape) for name, tensor in drafter.state_dict().items()
    }
    weights.finish()
    if config.draft_vocab_size is not None:
        tensors["d2t"] = tensors["d2t"].long()
        _check_offsets(tensors["d2t"], config.vocab_size)
    drafter.load_state_dict(tensors, assign=True)
    return drafter


def save_drafter(drafter: Drafter, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write a drafter in z-lab's layout: config.json and model.safetensors."""
    config = {**drafter.config.to_hf(), "dtype": str(dtype).removeprefix("torch.")}
    _write(folder, _stored(drafter, dtype), config)


def save_speculators(
    drafter: Drafter,
    folder: Path,
    target: ModelConfig,
    *,
    target_name: str,
    target_architectures: Sequence[str],
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Write a drafter in speculators' layout, for this target; what it cannot say is refused."""
    config = drafter.config
    check_fit(config, target)
    kind, architecture = _speculators_kind(config)
    document = {
        "architectures": [architecture],
        "speculators_model_type": kind,
        "speculators_version": _SPECULATORS_VERSION,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": config.num_slots}
            ],
            "verifier": {
                "name_or_path": target_name,
                "architectures": list(target_architectures),
            },
        },
        "dtype": str(dtype).removeprefix("torch."),
        **_speculators_keys(config, target),
    }
    tensors = _stored(drafter, dtype)
    if "d2t" in tensors:  # beside the offsets, the set of ids they lead to
        known = torch.zeros(config.vocab_size, dtype=torch.bool)
        known[torch.arange(len(tensors["d2t"])) + tensors["d2t"]] = True
        tensors["t2d"] = known
    _write(folder, tensors, document)


def _speculators_kind(config: DrafterConfig) -> tuple[str, str]:
    """Speculators' type of a drafter, and its architecture."""
    if config.head is None:
        return "dflash", "DFlashSpeculator"
    if config.head.kind != SELECTOR:
        return "dspark", "DSparkSpeculator"
    if config.draft_vocab_size is not None:
        raise UnsupportedModelError(
            f"The drafter has a selector over a reduced vocabulary of {config.draft_vocab_size}; "
            "speculators' layout knows selectors over the target's whole one alone."
        )
    return "dflash2", "DFlash2DraftModel"


def _speculators_keys(config: DrafterConfig, target: ModelConfig) -> dict[str, Any]:
    """What the drafter is, in speculators' words."""
    scale = target.embed_scale if config.embed_scale is None else config.embed_scale
    for what, value, plain in (
        ("embedding scale", scale, 1.0),
        ("output multiplier", config.output_multiplier, 1.0),
        ("logit softcap", config.logit_softcap, None),
    ):
        if value != plain:
            raise UnsupportedModelError(
                f"The drafter's {what} is {value}; speculators' layout has no place for it. Use "
                "z-lab's layout."
            )
    sliding = {
        causal for causal, window in zip(config.causal, config.windows, strict=True) if window
    }
    full = {
        causal for causal, window in zip(config.causal, config.windows, strict=True) if not window
    }
    if len(sliding) > 1 or True in full:
        raise UnsupportedModelError(
            f"The drafter's layers are causal within a block as {list(config.causal)}; in "
            "speculators' layout full layers never are and sliding ones all or none. Use z-lab's."
        )
    whole = replace(config, draft_vocab_size=None, head=None, convolution=None).to_hf()
    decoder = {key: value for key, value in whole.items() if key not in _NOT_DECODER_KEYS}
    scaling = whole["rope_scaling"] or {"rope_type": "default"}
    decoder["rope_parameters"] = {**scaling, "rope_theta": config.rope.theta}
    return {
        "transformer_layer_config": decoder,
        "draft_vocab_size": config.draft_vocab_size or config.vocab_size,
        "block_size": config.block_size,
        "target_hidden_size": None,  # the drafter's own
        "aux_hidden_state_layer_ids": [tap + 1 for tap in config.tap_layers],
        "mask_token_id": config.mask_token_id,
        # without sliding layers it says nothing, but vLLM would read "causal" for every layer
        "sliding_window_non_causal": True not in sliding,
        "sample_from_anchor": config.from_anchor,
        **config.added_keys(),
        **({"any_width": True} if config.any_width else {}),  # a key of our own
    }


def _stored(drafter: Drafter, dtype: torch.dtype) -> dict[str, Tensor]:
    return {
        name: tensor.detach().to("cpu", dtype if tensor.is_floating_point() else None).contiguous()
        for name, tensor in drafter.state_dict().items()
    }


def _write(folder: Path, tensors: dict[str, Tensor], config: Mapping[str, Any]) -> None:
    """Write a checkpoint, each file whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    # the drafter may still be mapped from the very file that is written here
    unfinished = folder / "model.safetensors.part"
    save_file(tensors, unfinished, metadata={"format": "pt"})
    put_in_place(unfinished, folder / "model.safetensors")
    write_whole(folder / "config.json", json.dumps(config, indent=2) + "\n")


def _check_offsets(offsets: Tensor, vocab_size: int) -> None:
    target_ids = torch.arange(offsets.shape[0]) + offsets
    low, high = int(target_ids.min()), int(target_ids.max())
    if low < 0 or high >= vocab_size:
        raise CheckpointError(
            f"Tensor 'd2t' maps draft tokens to the ids {low} to {high}; the target's vocabulary "
            f"has {vocab_size}."
        )
