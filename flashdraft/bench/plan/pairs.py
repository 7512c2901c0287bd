"""The pairs that can be planned without a network: their sizes, and their accepted lengths.

The published config.json of every model known by name, down to the keys that count, and what is
known of each pair's accepted length. A folder or a GGUF file brings its own config, and what its
tensors take where they are stored in few bits. No weights are read here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flashdraft.errors import ModelNotFoundError, RequestError
from flashdraft.models.config.quantization import read_quantization
from flashdraft.models.config.target import ModelConfig
from flashdraft.models.drafter.config import DrafterConfig
from flashdraft.models.drafter.opening import check_fit, read_drafter_config
from flashdraft.models.files.opening import reading
from flashdraft.models.sources import DEFAULT_MODEL, default_drafter
from flashdraft.models.stored import BARE, LEFT_OUT, open_stored, read_target_config

_SLIDING, _FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True)
class AcceptedLength:
    """A pair's known accepted length when `verify` draft tokens are verified, and whose figure."""

    value: float
    verify: int
    origin: str
    is_measured: bool = False  # by us, or else published

    @property
    def chance(self) -> float:
        """Chance of a draft token, once all before it were accepted, that gives this length."""
        low, high = 0.0, 1.0 - 1e-9
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (
                (middle, high)
                if expected_length(middle, self.verify) < self.value
                else (low, middle)
            )
        return low


def expected_length(chance: float, verify: int) -> float:
    """Tokens per step, bonus token included, if `verify` draft tokens are verified."""
    return (1.0 - chance ** (verify + 1)) / (1.0 - chance)


@dataclass(frozen=True)
class Pair:
    """A target and who drafts for it. Without a drafter there may still be n-gram lookup."""

    model: str  # as the user named it
    target: ModelConfig
    draft: str  # as the user named it: auto, none, ngram or a drafter
    drafter_name: str | None = None
    drafter: DrafterConfig | None = None
    accepted: AcceptedLength | None = None
    # bytes of the target's tensors that are stored in few bits, by name; empty = floats throughout
    stored: Mapping[str, int] = field(default_factory=dict)
    sight: tuple[str, ...] = ()  # serve's flags for the tower, where one was chosen or left out


_GEMMA4: dict[str, Any] = {
    "model_type": "gemma4_text",
    "vocab_size": 262144,
    "head_dim": 256,
    "global_head_dim": 512,
    "attention_k_eq_v": True,
    "sliding_window": 1024,
    "max_position_embeddings": 262144,
    "tie_word_embeddings": True,
    "rope_parameters": {
        _FULL: {
            "rope_type": "proportional",
            "rope_theta": 1000000.0,
            "partial_rotary_factor": 0.25,
        },
        _SLIDING: {"rope_theta": 10000.0},
    },
    "use_bidirectional_attention": "vision",
}
_TOWER: dict[str, Any] = {
    "model_type": "gemma4_vision",
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 72,
    "global_head_dim": 72,
    "pooling_kernel_size": 3,
    "patch_size": 16,
    "position_embedding_size": 10240,
    "standardize": True,
}


def _seeing(**sizes: Any) -> dict[str, Any]:
    """A Gemma 4 whose text model differs from others in these."""
    return {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "model_type": "gemma4",
        "text_config": _GEMMA4 | sizes,
        "vision_config": _TOWER,
        "tie_word_embeddings": True,
    }


_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "head_dim": 128,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000.0,
    "use_sliding_window": False,
}
TARGETS: Mapping[str, Mapping[str, Any]] = {
    DEFAULT_MODEL: {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
        "rope_theta": 100000.0,
        "tie_word_embeddings": True,
    },
    "google/gemma-4-31B-it": _seeing(
        hidden_size=5376,
        intermediate_size=21504,
        num_attention_heads=32,
        num_key_value_heads=16,
        num_global_key_value_heads=4,
        layer_types=([_SLIDING] * 5 + [_FULL]) * 10,
    ),
    "google/gemma-4-26B-A4B-it": _seeing(
        hidden_size=2816,
        intermediate_size=2112,
        num_attention_heads=16,
        num_key_value_heads=8,
        num_global_key_value_heads=2,
        layer_types=([_SLIDING] * 5 + [_FULL]) * 5,
        enable_moe_block=True,
        num_experts=128,
        top_k_experts=8,
        moe_intermediate_size=704,
    ),
    "Qwen/Qwen3-4B": _QWEN3
    | {"hidden_size": 2560, "intermediate_size": 9728, "tie_word_embeddings": True},
    "Qwen/Qwen3-8B": _QWEN3
    | {"hidden_size": 4096, "intermediate_size": 12288, "tie_word_embeddings": False},
    "Qwen/Qwen3-Coder-30B-A3B-Instruct": _QWEN3
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "max_position_embeddings": 262144,
        "rope_theta": 10000000.0,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
    },
}


# The built-in file's table, which is its head. Its other weights are in few bits too, but so small
# that a GPU holds them as floats.
STORED: Mapping[str, Mapping[str, int]] = {DEFAULT_MODEL: {"model.embed_tokens.weight": 30_081_024}}


_SHARED = "vocab_size", "hidden_size", "max_position_embeddings"


def _drafter(target: str, taps: list[int], mask: int, **sizes: Any) -> dict[str, Any]:
    """What published drafters mostly have in common: five Qwen3 layers, eight key heads of 128."""
    text = TARGETS[target].get("text_config", TARGETS[target])
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        **{name: text[name] for name in _SHARED},
        "num_hidden_layers": 5,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "block_size": 16,
        "rope_theta": 1000000.0,
        "dflash_config": {"mask_token_id": mask, "target_layer_ids": taps},
        **sizes,
    }


_WINDOWED = {
    "layer_types": [_SLIDING] * 4 + [_FULL],
    "sliding_window": 2048,
    "use_sliding_window": True,
}
_WHOLE = {"layer_types": [_FULL] * 5, "use_sliding_window": False}
_QWEN3_TAPS, _QWEN3_MASK = [1, 9, 17, 25, 33], 151669
DRAFTERS: Mapping[str, Mapping[str, Any]] = {
    "z-lab/gemma-4-31B-it-DFlash": _drafter(
        "google/gemma-4-31B-it",
        [1, 12, 23, 35, 46, 57],
        4,
        intermediate_size=10752,
        num_attention_heads=64,
        **_WINDOWED,
    ),
    "z-lab/gemma-4-26B-A4B-it-DFlash": _drafter(
        "google/gemma-4-26B-A4B-it",
        [1, 6, 11, 17, 22, 27],
        4,
        intermediate_size=5632,
        num_attention_heads=32,
        **_WINDOWED,
    ),
    "z-lab/Qwen3-4B-DFlash-b16": _drafter(
        "Qwen/Qwen3-4B",
        _QWEN3_TAPS,
        _QWEN3_MASK,
        intermediate_size=9728,
        num_attention_heads=32,
        **_WHOLE,
    ),
    "z-lab/Qwen3-8B-DFlash-b16": _drafter(
        "Qwen/Qwen3-8B",
        _QWEN3_TAPS,
        _QWEN3_MASK,
        intermediate_size=12288,
        num_attention_heads=32,
        **_WHOLE,
    ),
    "z-lab/Qwen3-Coder-30B-A3B-DFlash": _drafter(
        "Qwen/Qwen3-Coder-30B-A3B-Instruct",
        [1, 12, 23, 34, 45],
        _QWEN3_MASK,
        num_hidden_layers=8,
        intermediate_size=6144,
        num_attention_heads=32,
        num_key_value_heads=4,
        use_sliding_window=False,
    ),
}
# told of like all others, but recommended to nobody who does not ask for them
FOR_CODE = ("Qwen/Qwen3-Coder-30B-A3B-Instruct",)
_PUBLISHED = "on mathematics and code, not measured by us; chat brings less"
# those whose steps on an H200 python -m benchmarks.plan_check compares with the predictions
CHECKED = ("google/gemma-4-31B-it", "google/gemma-4-26B-A4B-it")
ACCEPTED: Mapping[str, AcceptedLength] = {
    DEFAULT_MODEL: AcceptedLength(5.5, 15, "measured, greedy, mean over five tasks", True),
    "google/gemma-4-31B-it": AcceptedLength(8.6, 15, _PUBLISHED),
    "google/gemma-4-26B-A4B-it": AcceptedLength(7.8, 15, _PUBLISHED),
    "Qwen/Qwen3-4B": AcceptedLength(6.5, 15, _PUBLISHED),
    "Qwen/Qwen3-8B": AcceptedLength(6.5, 15, _PUBLISHED),
    "Qwen/Qwen3-Coder-30B-A3B-Instruct": AcceptedLength(8.1, 15, _PUBLISHED),
}


def find_pair(
    model: str, draft: str = "auto", vision: bool = True, mmproj: str | None = None
) -> Pair:
    """The model with the drafter it would run with, from files at hand and the tables above.

    Its tower for pictures is a part of it, unless `vision` is false; a GGUF model's is `mmproj`, or
    lies beside it.
    """
    target, stored = _target(model, vision, _mmproj_file(mmproj) if vision else None)
    if not vision and target.vision is not None:
        target = target.without_vision(LEFT_OUT)
    sight: tuple[str, ...] = () if vision else ("--no-vision",)
    if vision and mmproj is not None:
        sight = ("--mmproj", mmproj)
    usual = default_drafter(model)
    name = usual if draft == "auto" else None if draft in ("none", "ngram") else draft
    if name is None:
        return Pair(model, target, draft, stored=stored, sight=sight)
    drafter = _drafter_config(name)
    check_fit(drafter, target)
    accepted = ACCEPTED.get(model) if name == usual else None
    return Pair(model, target, draft, name, drafter, accepted, stored, sight)


def _mmproj_file(name: str | None) -> Path | None:
    """A file at hand, for plan asks no network."""
    path = None if name is None else _existing(name)
    if name is not None and path is None:
        raise ModelNotFoundError(f"There is no mmproj file {name[:200]!r}: name a .gguf file.")
    return path


def _target(model: str, vision: bool, mmproj: Path | None) -> tuple[ModelConfig, Mapping[str, int]]:
    """A target's config, and what its tensors take that are stored in few bits."""
    path = None if model in TARGETS else _existing(model)
    if mmproj is not None and (path is None or path.is_dir()):
        raise RequestError(
            f"{model[:200]!r} takes no mmproj file: only Gemma 4 in a .gguf file does. Leave "
            "--mmproj out."
        )
    if model in TARGETS:
        return ModelConfig.from_hf(TARGETS[model]), STORED.get(model, {})
    if path is None:
        raise ModelNotFoundError(
            f"The sizes of {model[:200]!r} are not known here, and plan asks no network: known are "
            f"{', '.join(TARGETS)}. The folder of any model (its config.json is enough) or a .gguf "
            "file works too."
        )
    if path.is_file() and path.suffix != ".gguf":
        raise ModelNotFoundError(f"{model} is a file but not a .gguf; name one, or a folder.")
    if path.is_dir():
        raw = read_target_config(path)
        with reading(f"The config of {path}"):
            if not read_quantization(raw):
                return ModelConfig.from_hf(raw), {}
    checkpoint = open_stored(path, BARE, vision, mmproj)
    source = checkpoint.source
    sizes = {name: source.quantized_bytes(name) for name in source.names()}
    return checkpoint.config, {name: size for name, size in sizes.items() if size is not None}


def _drafter_config(name: str) -> DrafterConfig:
    if name in DRAFTERS:
        return DrafterConfig.from_hf(DRAFTERS[name])
    path = _existing(name)
    if path is None or not path.is_dir():
        raise ModelNotFoundError(
            f"The sizes of the drafter {name[:200]!r} are not known here, and plan asks no "
            f"network: known are {', '.join(DRAFTERS)}. A drafter's folder works too, and so do "
            "auto, none and ngram."
        )
    return read_drafter_config(path)


def _existing(name: str) -> Path | None:
    path = Path(name).expanduser()
    try:
        return path if name and path.exists() else None
    except OSError:  # too long, or otherwise no name of a file
        return None
