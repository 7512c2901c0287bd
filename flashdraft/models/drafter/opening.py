"""A drafter's folder before its weights: its config, of either layout, and its target's shape.

No torch: what reads and writes tensors is loading.py.
"""

from __future__ import annotations

from pathlib import Path

from flashdraft.errors import CheckpointError, UnsupportedModelError
from flashdraft.models.config.target import Json, ModelConfig
from flashdraft.models.drafter.config import DrafterConfig
from flashdraft.models.files.opening import check_model_files, read_json, reading
from flashdraft.models.other_formats import refuse_other_folder


def read_drafter_config(folder: Path) -> DrafterConfig:
    """Read a drafter's config.json, of either layout."""
    check_model_files(folder)
    refuse_other_folder(folder)
    raw = read_json(folder / "config.json")
    if raw.get("quantization_config"):
        raise UnsupportedModelError(
            f"The drafter in {folder} is stored in a quantised format; use it in bf16. On a GPU, "
            "quantize makes it smaller as it is loaded."
        )
    read = DrafterConfig.from_speculators if is_speculators(raw) else DrafterConfig.from_hf
    with reading(f"The drafter's config in {folder}"):
        return read(raw)


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


def is_speculators(raw: Json) -> bool:
    """Whether a config is in speculators' layout."""
    return "speculators_model_type" in raw
