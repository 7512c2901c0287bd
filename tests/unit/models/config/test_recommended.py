"""Sampling that makers recommend, for models whose files say nothing of it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from flashdraft.chat.sampling import sampling_defaults
from flashdraft.core import SamplingParams
from flashdraft.models.config.recommended import RECOMMENDED, names_of, with_recommended

SMOLLM2 = {"do_sample": True, "temperature": 0.2, "top_p": 0.9}


@pytest.mark.parametrize(
    ("path", "described"),
    [
        ("SmolLM2-1.7B-Instruct.Q4_1.gguf", [None, None]),
        ("model.gguf", ["Smollm2 360M 8k Lc100K Mix1 Ep2", None]),
        ("cache/models--HuggingFaceTB--SmolLM2-360M-Instruct/snapshots/0a1b", [None]),
        ("some_folder", ["HuggingFaceTB/SmolLM2-1.7B"]),
    ],
)
def test_a_model_is_known_by_any_of_its_names(path: str, described: list[object]) -> None:
    assert with_recommended({}, names_of(Path(path), described)) == SMOLLM2


@pytest.mark.parametrize("name", ["SmolLM2-135M-Instruct.Q4_1.gguf", "Smollm2 135M 8k Lc100K"])
def test_the_default_model_is_greedy(name: str) -> None:
    assert sampling_defaults(with_recommended({}, [name])) == {"temperature": 0.0}


def test_what_the_files_say_is_left_alone() -> None:
    names = names_of(Path("SmolLM2.gguf"), [])
    for said in ({"top_k": 20}, {"do_sample": False}, {"temperature": 1.0, "eos_token_id": 2}):
        assert with_recommended(said, names) == said
    assert with_recommended({"eos_token_id": 2}, names) == {"eos_token_id": 2, **SMOLLM2}


@pytest.mark.parametrize(
    "name",
    ["open_llama_3b", "llama-30b", "TinyLlama-1.1B-3T", "embeddinggemma-300m", "gemma-3-4b-pt"]
    + ["Qwen3-8B-Base", "SmolLM2-135M-base", "a" * 10_000_000, "qwen3" * 1_000_000 + "x"],
)
def test_a_name_that_only_looks_like_one_gets_nothing(name: str) -> None:
    begin = time.process_time()
    found = with_recommended({}, [name])
    assert time.process_time() - begin < 0.1
    assert found == {} or name.startswith("qwen3qwen3")


@pytest.mark.parametrize(
    ("name", "temperature"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", 0.6),
        ("Meta-Llama-3-8B-Instruct", 0.6),
        ("google/gemma-4-31b-it", 1.0),
        ("Qwen/Qwen2.5-7B-Instruct", 0.7),
        ("Qwen3-30B-A3B", 0.6),
        ("DeepSeek-R1-Distill-Qwen-7B", 0.6),
        ("Mistral-Small-3.2-24B", 0.15),
    ],
)
def test_families_are_told_by_their_words(name: str, temperature: float) -> None:
    assert with_recommended({}, [name])["temperature"] == temperature


def test_an_unknown_model_gets_nothing() -> None:
    for names in ([], [None, 3], ["my-own-model"], names_of(Path("qwen3/tests/tiny"), [])):
        assert with_recommended({}, names) == {}


def test_every_recommendation_is_one_that_can_be_followed() -> None:
    for settings in RECOMMENDED.values():
        found = sampling_defaults(settings)
        SamplingParams(**found)
        assert 0 <= found["temperature"] <= 1
