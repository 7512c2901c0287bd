"""A LoRA folder's adapter_config.json: what it asks for, read whole or refused.

As in a config.json every key is read, is known to change nothing here, or is refused where it says
something. The tensors are merging.py's.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashdraft.errors import CheckpointError, ModelNotFoundError, UnsupportedModelError, quoted
from flashdraft.models.files.opening import read_json

CONFIG_NAME, WEIGHTS_NAME = "adapter_config.json", "adapter_model.safetensors"
_MERGE = "Merge it with peft (`merge_and_unload()`, `save_pretrained()`) and name the result."
_REMEDY = "Fetch the adapter again."
_READ = (
    "peft_type r lora_alpha use_rslora rank_pattern alpha_pattern bias lora_bias init_lora_weights"
)
_IRRELEVANT: Mapping[str, str] = {
    "the tensors tell what they change": """
        target_modules exclude_modules modules_to_save layers_to_transform layers_pattern""",
    "of training alone": """
        task_type inference_mode lora_dropout loftq_config eva_config corda_config lora_ga_config
        runtime_config megatron_config megatron_core""",
    "where it comes from": "base_model_name_or_path revision auto_mapping peft_version",
    "of other kinds, which are refused by their own keys": "qalora_group_size",
}
# beginnings that leave the model's own weights as they are; others take away what they begin with
_INITS = (True, False, None, "gaussian", "eva", "orthogonal")
# what changes more than a product that is added to a weight, by the key that asks for it
_OTHERS = {
    "use_dora": "DoRA, which scales rows by their length",
    "use_qalora": "QALoRA",
    "fan_in_fan_out": "made for weights that lie turned around (fan_in_fan_out)",
}


@dataclass(frozen=True)
class AdapterConfig:
    """How much of its products a LoRA adds."""

    rank: int
    alpha: float
    uses_root: bool  # of the rank, to divide by
    ranks: Mapping[str, int]  # by pattern of a module's name
    alphas: Mapping[str, float]

    def rank_of(self, module: str) -> int:
        """The rank that a module's matrices must have."""
        return _by_pattern(self.ranks, module, self.rank)

    def scaling_of(self, module: str) -> float:
        """What a module's product is multiplied with."""
        rank, alpha = self.rank_of(module), _by_pattern(self.alphas, module, self.alpha)
        return alpha / (math.sqrt(rank) if self.uses_root else rank)


def require_adapter(name: str) -> Path:
    """The folder that a name stands for, if it is an adapter's."""
    folder = Path(name).expanduser()
    try:
        is_one = bool(name) and (folder / CONFIG_NAME).is_file()
    except OSError:  # too long, or otherwise no name of a file
        is_one = False
    if not is_one:
        raise ModelNotFoundError(
            f"There is no LoRA adapter {name[:200]!r}: name a folder with {CONFIG_NAME} and "
            f"{WEIGHTS_NAME}. One of the Hub is fetched by `hf download ORG/NAME --local-dir DIR`."
        )
    return folder


def read_adapter_config(folder: Path) -> AdapterConfig:
    """A folder's adapter_config.json."""
    path = folder / CONFIG_NAME
    said = read_json(path)
    kind = said.get("peft_type")
    if kind != "LORA":
        raise UnsupportedModelError(
            f"{path} is of the kind {quoted(kind)}; only LORA is merged. {_MERGE}"
        )
    passing = set(f"{_READ} {' '.join(_IRRELEVANT.values())}".split())
    for key, value in said.items():
        if value and key in _OTHERS:
            raise UnsupportedModelError(f"{path} asks for {_OTHERS[key]}. {_MERGE}")
        if value and key not in passing:
            raise UnsupportedModelError(
                f"{path} has {quoted(key)} = {quoted(value)}; flashdraft does not know what it "
                f"changes in a merge. {_MERGE}"
            )
    root = said.get("use_rslora")
    if root is not None and not isinstance(root, bool):
        raise CheckpointError(
            f"{path}: use_rslora is {quoted(root)}; it must be true or false. {_REMEDY}"
        )
    beginning = said.get("init_lora_weights", True)
    if not any(beginning is one or beginning == one != 1 for one in _INITS):
        raise UnsupportedModelError(
            f"{path} has 'init_lora_weights' = {quoted(beginning)}, which changes the model's own "
            f"weights as well. {_MERGE}"
        )
    return AdapterConfig(
        rank=_rank(path, "r", said.get("r", 8)),
        alpha=_number(path, "lora_alpha", said.get("lora_alpha", 8)),
        uses_root=bool(root),
        ranks={
            key: _rank(path, "rank_pattern", value)
            for key, value in _pattern(path, said, "rank_pattern").items()
        },
        alphas={
            key: _number(path, "alpha_pattern", value)
            for key, value in _pattern(path, said, "alpha_pattern").items()
        },
    )


def _by_pattern(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    """The value of the first pattern that is a module's name, or ends it after a dot."""
    for pattern, value in patterns.items():
        if module == pattern or module.endswith(f".{pattern}"):
            return value
    return default


def _pattern(path: Path, said: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = said.get(key) or {}
    if not isinstance(found, Mapping):
        raise CheckpointError(f"{path}: {key} is {quoted(found)}; it must be an object. {_REMEDY}")
    for name in found:
        if not re.fullmatch(r"[\w.]+", name):  # others would have to be run, as regular expressions
            raise UnsupportedModelError(
                f"{path} has the pattern {quoted(name)} in {key}; only plain names are supported. "
                f"{_MERGE}"
            )
    return found


def _rank(path: Path, key: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 2**31:
        raise CheckpointError(
            f"{path}: {key} is {quoted(value)}; a rank must be a whole number of at least 1. "
            f"{_REMEDY}"
        )
    return value


def _number(path: Path, key: str, value: Any) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value):
        raise CheckpointError(
            f"{path}: {key} is {quoted(value)}; it must be a finite number. {_REMEDY}"
        )
    return float(value)
