"""How a model's makers would sample it, for models whose files say nothing of it. One table.

The settings are those of the makers' own pages and examples. The default model's alone are ours: in
four bits its likeliest words are too close together for any temperature (docs/LOG.md).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

SAMPLING_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")

# what a name has, without signs between its letters and digits, and what is recommended
RECOMMENDED: dict[str, dict[str, float]] = {
    "smollm2135m": {"do_sample": False},
    "smollm2": {"temperature": 0.2, "top_p": 0.9},
    "smollm3": {"temperature": 0.6, "top_p": 0.95},
    "gemma[34]": {"temperature": 1.0, "top_p": 0.95, "top_k": 64},
    "qwen3.*instruct": {"temperature": 0.7, "top_p": 0.8, "top_k": 20},
    "qwen3": {"temperature": 0.6, "top_p": 0.95, "top_k": 20},
    "qwen2": {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05},
    "llama3": {"temperature": 0.6, "top_p": 0.9},
    "deepseekr1": {"temperature": 0.6, "top_p": 0.95},
    "mistralsmall": {"temperature": 0.15},
}


def with_recommended(
    generation_config: Mapping[str, Any], names: Iterable[object]
) -> dict[str, Any]:
    """A generation_config that has sampling settings, where the model's names are known.

    What the model's own files say is left alone, be it a single setting.
    """
    says_something = generation_config.get("do_sample") is not None or any(
        generation_config.get(key) is not None for key in SAMPLING_KEYS
    )
    found = None if says_something else _look_up(names)
    return {**generation_config, **({"do_sample": True, **found} if found else {})}


def names_of(path: Path, described: Iterable[object]) -> list[object]:
    """A model's names: what its files say, its folder or file, and its folder in a Hub's cache."""
    cached = [part for part in path.parts if part.startswith("models--")]
    return [*described, path.stem if path.suffix == ".gguf" else path.name, *cached]


def _look_up(names: Iterable[object]) -> dict[str, float] | None:
    plain = [re.sub(r"[^a-z0-9]", "", name.lower()) for name in names if isinstance(name, str)]
    for pattern, settings in RECOMMENDED.items():
        if any(re.search(pattern, name) for name in plain):
            return settings
    return None
