"""How deep a value nests, told without recursion."""

from __future__ import annotations

from typing import Any

import pytest

from flashdraft.chat.schema.reading import is_deeper_than


def nested(depth: int) -> Any:
    """Objects and lists in turn, around a number."""
    value: Any = 1
    for number in range(depth):
        value = [value, 2] if number % 2 else {"a": 0, "b": value}
    return value


@pytest.mark.parametrize("depth", [0, 1, 2, 7])
def test_the_depth_is_that_of_the_innermost_value(depth: int) -> None:
    assert is_deeper_than(nested(depth), depth)
    assert not is_deeper_than(nested(depth), depth + 1)


def test_more_levels_than_the_interpreter_can_recurse() -> None:
    assert is_deeper_than(nested(100_000), 64)


def test_strings_are_no_containers() -> None:
    assert not is_deeper_than(["abc"], 2)
