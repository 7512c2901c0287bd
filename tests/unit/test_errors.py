"""What messages show of values from outside: escaped, cut, and never written out whole."""

from __future__ import annotations

import time
from typing import Any

import pytest

from flashdraft.errors import FlashdraftError, quoted, shortened


@pytest.mark.parametrize("value", [None, True, 5, 1.5, "qwen3", [1, "a"], {"a": None}])
def test_a_short_value_is_shown_as_python_writes_it(value: Any) -> None:
    assert quoted(value) == repr(value)


@pytest.mark.parametrize(
    "value",
    [
        "x" * 10**7,
        "\x1b" * 10**6,
        [[0] * 10**6] * 10**6,
        dict.fromkeys(range(1000), "x" * 1000),
        10**10_000,  # more digits than Python writes
        [-(10**10_000)],
    ],
    ids=["text", "escapes", "lists", "object", "number", "number in a list"],
)
def test_a_long_value_is_cut_without_being_written(value: Any) -> None:
    begin = time.perf_counter()
    assert len(quoted(value)) <= 161
    assert time.perf_counter() - begin < 0.1


def test_no_character_commands_a_terminal() -> None:
    assert "\x1b" not in quoted("\x1b[2J") and "\x1b" not in quoted({"\x1b": "\x1b"})
    assert "\x1b" not in str(FlashdraftError(shortened("\x1b[2J")))
