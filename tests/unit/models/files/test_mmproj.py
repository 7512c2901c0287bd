"""Names of mmproj files, as they are found in folders and repositories."""

from __future__ import annotations

import pytest

from flashdraft.models.files.mmproj import beside, one_of_each

NAMES = [
    "gemma-4-31B-it-Q4_K_M.gguf",
    "mmproj-BF16.gguf",
    "gemma-4-31b-it-MMPROJ-f16.gguf",
    "sub/mmproj-F32.gguf",
    "mmproj.json",
    "README.md",
]


def test_those_in_the_models_own_folder() -> None:
    assert beside("q4.gguf", NAMES) == ["gemma-4-31b-it-MMPROJ-f16.gguf", "mmproj-BF16.gguf"]
    assert beside("sub/q4.gguf", NAMES) == ["sub/mmproj-F32.gguf"]
    assert beside("mmproj-BF16.gguf", NAMES) == beside("", NAMES) == []


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        (["mmproj-F32.gguf", "mmproj-F16.gguf", "mmproj-BF16.gguf"], ["mmproj-BF16.gguf"]),
        (["mmproj-Q8_0.gguf", "mmproj-F32.gguf"], ["mmproj-F32.gguf"]),
        (["mmproj-model-fp16.gguf", "mmproj-model-q8_0.gguf"], ["mmproj-model-fp16.gguf"]),
        (["x-F16-mmproj.gguf", "x-bf16-mmproj.gguf"], ["x-bf16-mmproj.gguf"]),
        (["mmproj-IQ4_XS.gguf", "mmproj-Q8_0.gguf"], ["mmproj-IQ4_XS.gguf"]),
        (["mmproj.gguf", "mmproj-f16.gguf"], ["mmproj-f16.gguf"]),
        (["b-mmproj-F16.gguf", "a-mmproj-BF16.gguf"], ["a-mmproj-BF16.gguf", "b-mmproj-F16.gguf"]),
        ([], []),
    ],
)
def test_one_of_each_tower_in_its_best_format(names: list[str], chosen: list[str]) -> None:
    assert one_of_each(names) == one_of_each(reversed(names)) == chosen
