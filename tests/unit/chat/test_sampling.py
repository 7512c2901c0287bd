"""What a request gets where it says nothing."""

from __future__ import annotations

from typing import Any

import pytest

from flashdraft.chat.sampling import answer_limit


@pytest.mark.parametrize(
    ("generation_config", "max_context", "expected"),
    [
        ({}, 8192, 1024),
        ({}, 2048, 1024),  # the context itself may leave less
        ({}, 131072, 16384),
        ({"max_new_tokens": 300}, 8192, 300),
        ({"max_new_tokens": 0}, 8192, 1024),
        ({"max_new_tokens": True}, 8192, 1024),
        ({"max_new_tokens": "many"}, 8192, 1024),
    ],
)
def test_an_answer_has_a_limit_that_fits_the_model(
    generation_config: dict[str, Any], max_context: int, expected: int
) -> None:
    assert answer_limit(generation_config, max_context) == expected
