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

# the words and numbers of a name, one after another; the first that fits counts
RECOMMENDED: dict[str, dict[str, float]] = {
    "smollm 2 135 m": {"do_sample": False},
    "smollm 2": {"temperature": 0.2, "top_p": 0.9},
    "smollm 3": {"temperature": 0.6, "top_p": 0.95},
    "gemma 3": {"temperature": 1.0, "top_p": 0.95, "top_k": 64},
    "gemma 4": {"temperature": 1.0, "top_p": 0.95, "top_k": 64},
    "qwen 3": {"temperature": 0.6, "top_p": 0.95, "top_k": 20},
    "qwen 2": {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05},
    "llama 3": {"temperature": 0.6, "top_p": 0.9},
    "deepseek r 1": {"temperature": 0.6, "top_p": 0.95},
    "mistral small": {"temperature": 0.15},
}
_NOT_TRAINED_TO_ANSWER = ("base", "pt")
_SIZES = ("b", "m", "t")  # behind a number: open_llama_3b is no Llama 3
_MAX_NAME = 200  # characters that are looked at


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
    known = [_words(name[:_MAX_NAME]) for name in names if isinstance(name, str)]
    if any(word in _NOT_TRAINED_TO_ANSWER for words in known for word in words):
        return None
    for family, settings in RECOMMENDED.items():
        if any(_has(words, family.split()) for words in known):
            return settings
    return None


def _words(name: str) -> list[str]:
    return re.findall(r"[a-z]+|[0-9]+", name.lower())


def _has(words: list[str], family: list[str]) -> bool:
    """Whether the family's words stand in a name, and do not go on as a size."""
    for place in range(len(words) - len(family) + 1):
        end = place + len(family)
        is_size = family[-1].isdecimal() and words[end : end + 1] and words[end] in _SIZES
        if words[place:end] == family and not is_size:
            return True
    return False
