"""JSON whose numbers stay as they were written."""

from __future__ import annotations

import copy
import json
import math
from decimal import Decimal
from typing import Any

import pytest

from flashdraft.text.exact_json import (
    ExactNumber,
    Inserts,
    NegativeZero,
    Written,
    exact,
    read,
    repeated,
    write,
)

NUMBERS = [
    *("0", "-0", "1.50", "1E5", "1e400", "-1e-400", "-0.0", "0.1", "1.0", "1e-7", "5"),
    *("9007199254740993", "340282366920938463463374607431768211455", "-123456789012345678"),
    *("0.1000000000000000055511151231257827", "123456789.123456789123456789"),
]


@pytest.mark.parametrize("number", NUMBERS)
def test_a_number_is_written_as_it_was_read(number: str) -> None:
    text = f'{{"é": [{number}, {{"b": {number}}}], "c": "{number}"}}'
    assert write(read(text)) == text
    assert write(read(text.encode("utf-16"))) == text
    assert write(copy.deepcopy(read(text))) == text
    assert exact(read(number)) == Decimal(number)


@pytest.mark.parametrize("number", NUMBERS)
def test_to_everybody_else_it_is_the_number_of_the_standard_reader(number: str) -> None:
    assert read(number) == json.loads(number)


def test_what_is_no_number_of_json_is_not_written() -> None:
    for text in ("NaN", "[Infinity, 1.50]", "-Infinity"):
        with pytest.raises(ValueError, match="JSON"):
            write(read(text))
    assert exact(True) is exact("1") is exact(float("nan")) is None


def test_written_parts_are_taken_over_as_they_are() -> None:
    inserts = Inserts()
    parts = {"a": Written("1.50"), "b": [Written('{"c": 1e400}'), repeated(read("-0"))]}
    text = json.dumps(parts, default=inserts)
    assert inserts.fill(text) == '{"a": 1.50, "b": [{"c": 1e400}, -0]}'
    with pytest.raises(TypeError):
        json.dumps({"a": object()}, default=inserts)


ODD = ["1.50", "1e400", "-1E+5", "-0", "0.10", "1.0e-7", "123456789012345678901234567890.5"]


@pytest.mark.parametrize("text", ODD)
def test_odd_numbers_are_written_as_read(text: str) -> None:
    number = read(text)
    assert isinstance(number, ExactNumber | NegativeZero) and number == float(text)
    assert (str(number), repr(number), f"{number}") == (text,) * 3
    assert write({"a": [number]}) == f'{{"a": [{text}]}}'


@pytest.mark.parametrize("text", ["1.5", "0", "-7", "12345678901234567890", "1e+16", "1e-07"])
def test_numbers_that_python_writes_alike_are_its_own(text: str) -> None:
    assert type(read(text)) in (int, float) and write(read(text)) == text


def test_an_integer_that_python_refuses() -> None:
    digits = "7" * 5000
    assert math.isinf(read(digits)) and write(read(digits)) == digits


VALUE = {"b": [1, {"é": None, "deep": []}], "a": {}, "t": 'x"\n', "yes": True, "number": 2.5}


@pytest.mark.parametrize("style", [{}, {"indent": 2}, {"indent": "\t"}, {"indent": 0}])
@pytest.mark.parametrize("more", [{}, {"sort_keys": True}, {"separators": (",", ":")}])
@pytest.mark.parametrize("ensure_ascii", [True, False])
def test_the_rest_is_what_the_library_writes(
    style: dict[str, Any], more: dict[str, Any], ensure_ascii: bool
) -> None:
    options = {**style, **more, "ensure_ascii": ensure_ascii}
    library = json.dumps({**VALUE, "odd": 77.25}, **options)
    assert write({**VALUE, "odd": 77.25}, **options) == library
    ours = write({**VALUE, "odd": read("77.250")}, **options)
    assert ours == library.replace("77.25", "77.250")


def test_keys_that_are_no_text() -> None:
    keys = {2: 0, None: 0, True: 0, 1.5: 0}
    odd = read("1.50")
    assert write([keys, odd]) == json.dumps([keys, 9]).replace("9", "1.50")
    with pytest.raises(TypeError, match="keys must be"):
        write({(1, 2): odd})
