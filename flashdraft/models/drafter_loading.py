"""Drafter checkpoints: read in z-lab's and speculators' layouts, written in z-lab's.

Strict: a tensor that is missing, misshapen or unknown is an error, and so is a drafter that does
not fit its target. What the tensors mean is drafter.py's business.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from flashdraft.errors import CheckpointError
from flashdraft.models.config import Json, ModelConfig
from flashdraft.models.drafter import Drafter
from flashdraft.models.drafter_config import DrafterConfig
from flashdraft.models.loading import read_json
from flashdraft.models.safetensors_reader import open_safetensors
from flashdraft.models.weights import Weights

# speculators may store frozen copies of the target's own tensors beside the drafter's
# (verifier is its word for the target), and t2d says again what d2t says
_TARGET_COPIES = ("embed_tokens.weight", "verifier_norm.weight", "verifier_lm_head.weight", "t2d")


def read_drafter_config(folder: Path) -> DrafterConfig:
    """Read a drafter's config.json, of either layout."""
    raw = read_json(folder / "config.json")
    read = DrafterConfig.from_speculators if _is_speculators(raw) else DrafterConfig.from_hf
    try:
        return read(raw)
    except KeyError as error:
        raise CheckpointError(f"The drafter's config in {folder} lacks the key {error}.") from None
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise CheckpointError(f"The drafter's config in {folder} is not valid: {error}.") from None


def load_drafter(
    folder: Path, target: ModelConfig, on_read: Callable[[str], None] | None = None
) -> Drafter:
    """Load a drafter for this target, in the checkpoint's own dtype; `on_read` hears every name."""
    config = read_drafter_config(folder)
    check_fit(config, target)
    weights = Weights(open_safetensors(folder), on_read)
    if _is_speculators(read_json(folder / "config.json")):
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
    tensors = {
        name: tensor.detach().to("cpu", dtype).contiguous()
        for name, tensor in drafter.state_dict().items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    # the drafter may still be mapped from the very file that is written here
    unfinished = folder / "model.safetensors.part"
    save_file(tensors, unfinished, metadata={"format": "pt"})
    unfinished.replace(folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def check_fit(config: DrafterConfig, target: ModelConfig) -> None:
    """Raise unless the drafter was made for a target of this shape."""
    remedy = f"Use a drafter that was trained for this {target.architecture}."
    num_layers = len(target.layers)
    pairs = [
        ("hidden size", config.hidden_size, target.hidden_size),
        ("vocabulary size", config.vocab_size, target.vocab_size),
    ]
    if config.num_target_layers is not None:
        pairs.append(("number of target layers", config.num_target_layers, num_layers))
    for what, ours, theirs in pairs:
        if ours != theirs:
            raise CheckpointError(
                f"The drafter does not fit the target: its {what} is {ours}, the target's is "
                f"{theirs}. {remedy}"
            )
    if max(config.tap_layers) >= num_layers:
        raise CheckpointError(
            f"The drafter does not fit the target: it reads layer {max(config.tap_layers)} "
            f"(counted from 0), the target has {num_layers} layers. {remedy}"
        )


def _is_speculators(raw: Json) -> bool:
    return "speculators_model_type" in raw


def _check_offsets(offsets: Tensor, vocab_size: int) -> None:
    target_ids = torch.arange(offsets.shape[0]) + offsets
    low, high = int(target_ids.min()), int(target_ids.max())
    if low < 0 or high >= vocab_size:
        raise CheckpointError(
            f"Tensor 'd2t' maps draft tokens to the ids {low} to {high}; the target's vocabulary "
            f"has {vocab_size}."
        )
