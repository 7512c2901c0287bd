"""SamplingParams: a bad value is refused by name, value and limit; every edge is let through."""

from __future__ import annotations

import re
from typing import Any

import pytest

from flashdraft.core import GenerationStats, GrammarSpec, SamplingParams, TokenEvent
from flashdraft.errors import FlashdraftError, RequestError

NAN, INF = float("nan"), float("inf")
NOT_NUMBERS = [NAN, INF, -INF, "1", None, True, [1.0]]

BAD: dict[str, tuple[str, list[Any]]] = {
    "max_tokens": ("at least 1", [0, -1, -(10**30), 1.0, NAN, INF, "5", True]),
    "n": ("from 1 to 1024", [0, -1, 1025, 1.0, NAN, "2", None, True]),
    "temperature": ("a finite number", NOT_NUMBERS),
    "top_p": ("above 0 and at most 1", [0.0, -0.1, 1.0001, 2, *NOT_NUMBERS]),
    "top_k": ("0 or -1 (off), or a positive integer", [-2, 1.5, NAN, INF, "3", None, True]),
    "min_p": ("between 0 and 1", [-0.01, 1.01, *NOT_NUMBERS]),
    "presence_penalty": ("a finite number", NOT_NUMBERS),
    "frequency_penalty": ("a finite number", NOT_NUMBERS),
    "min_tokens": ("between 0 and max_tokens (256)", [-1, 257, 10**30, 1.0, NAN, "1", None, True]),
    "seed": ("a 64-bit integer", [2**63, -(2**63) - 1, 10**400, 1.0, NAN, "7", True]),
    "stop": ("non-empty strings", [[""], "", ["a", ""], [5], [None], [b"x"], b"ab", None, 7]),
    "stop_token_ids": ("token ids", [[-1], [1.0], ["1"], [True], [None], "12", None, 5]),
    "logit_bias": (
        "numbers between",
        [
            {5: 1e308},
            {5: 1, 6: -1.1e6},
            {-1: 0.0},
            {"1": 0.0},
            {True: 0.0},
            {1.0: 0.0},
            {1: NAN},
            {1: INF},
            {1: "x"},
            {1: None},
            None,
            [1],
        ],
    ),
    "ignore_eos": ("True or False", ["no", 0, None]),
    "logprobs": ("between 0 and 20", [-1, 21, 10**30, 1.0, NAN, "1", True]),
    "prompt_logprobs": ("between 0 and 20", [-1, 21, 10**30, 1.0, NAN, "1", True]),
}
OUT_OF_RANGE: dict[str, tuple[str, list[Any]]] = {
    "temperature": ("between 0 (greedy) and 100", [-0.1, -1, 100.5, 1e308]),
    "repetition_penalty": ("between 0.01 and 100", [0.0, 0.009, 1e-300, -1.0, 101, 1e308]),
    "presence_penalty": ("between -100 and 100", [-100.5, 101, 1e308, -1e308]),
    "frequency_penalty": ("between -100 and 100", [-100.5, 101, 1e308, -1e308]),
}
GOOD: dict[str, list[Any]] = {
    "max_tokens": [1, 2**40, None],
    "n": [1],
    "temperature": [0, 0.0, -0.0, 1e-9, 1, 100, 100.0],
    "top_p": [1e-9, 0.5, 1, 1.0],
    "top_k": [0, 1, 10**9],
    "min_p": [0, 0.0, 0.5, 1, 1.0],
    "repetition_penalty": [0.01, 1, 100],
    "presence_penalty": [-100, 0, 100.0],
    "frequency_penalty": [-100, 0, 100.0],
    "min_tokens": [0, 1, 256],
    "seed": [None, 0, -1, 2**63 - 1, -(2**63)],
    "stop": [(), [], ["a"], "END", ("\n\n", "日本")],
    "stop_token_ids": [(), [0], (1, 2)],
    "logit_bias": [{}, {0: -100.0}, {5: 3, 7: 0.5}],
    "logprobs": [None, 0, 20],
    "prompt_logprobs": [None, 0, 20],
    "ignore_eos": [True, False],
}


def cases(table: dict[str, tuple[str, list[Any]]]) -> list[Any]:
    return [
        pytest.param(name, value, limit, id=f"{name}={value!r:.20}")
        for name, (limit, values) in table.items()
        for value in values
    ]


@pytest.mark.parametrize(("name", "value", "limit"), cases(BAD) + cases(OUT_OF_RANGE))
def test_a_bad_value_is_refused_with_its_limit(name: str, value: Any, limit: str) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value})
    message = str(caught.value)
    assert re.match(rf"{name} is .+; it must be .+\.$", message)
    assert limit in message
    shown = (value,) if isinstance(value, str) and name == "stop" else value
    assert repr(shown) in message


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in GOOD.items() for value in values]
)
def test_an_edge_value_is_taken_as_it_is(name: str, value: Any) -> None:
    expected = (value,) if isinstance(value, str) else value
    assert getattr(SamplingParams(**{name: value}), name) == expected


def test_min_tokens_may_reach_max_tokens_and_no_further() -> None:
    assert SamplingParams(max_tokens=3, min_tokens=3).min_tokens == 3
    with pytest.raises(RequestError, match=r"min_tokens is 4; .* max_tokens \(3\)"):
        SamplingParams(max_tokens=3, min_tokens=4)


def test_greedy_is_the_default_and_means_temperature_zero() -> None:
    assert SamplingParams().is_greedy
    assert SamplingParams(temperature=0).is_greedy
    assert not SamplingParams(temperature=1e-9).is_greedy


def test_params_are_fixed_once_made() -> None:
    params: Any = SamplingParams()
    with pytest.raises(AttributeError):
        params.max_tokens = 5


def test_one_tree_of_errors() -> None:
    with pytest.raises(FlashdraftError):
        SamplingParams(max_tokens=0)


def test_statistics_of_nothing_are_zero() -> None:
    stats = GenerationStats()
    assert (stats.mean_accepted_length, stats.tokens_per_s) == (0.0, 0.0)
    stats = GenerationStats(steps=4, decode_tokens=10, decode_s=2.0)
    assert (stats.mean_accepted_length, stats.tokens_per_s) == (2.5, 5.0)


@pytest.mark.parametrize(
    ("kind", "text", "reason"),
    [
        ("json", "{}", "kind is 'json'; it must be one of json_schema, json_object, regex"),
        (None, "{}", "kind is None"),
        ("regex", b"a", "text is b'a'; it must be a string"),
        ("regex", None, "text is None; it must be a string"),
        ("regex", "", "text of a regex grammar is ''; it must not be empty"),
        ("json_object", "{}", "text of a json_object grammar is '{}'; it must be empty"),
    ],
)
def test_a_bad_grammar_spec_is_refused(kind: Any, text: Any, reason: str) -> None:
    with pytest.raises(RequestError, match=re.escape(reason)):
        GrammarSpec(kind, text)


def test_a_grammar_spec_is_a_key() -> None:
    assert {GrammarSpec("regex", "a"): 1}[GrammarSpec("regex", "a")] == 1
    assert GrammarSpec("json_object").text == ""


def test_an_event_has_no_pieces_unless_they_are_given() -> None:
    assert TokenEvent("a", (1,), "x", (False,)).pieces == ()
