"""Flags become settings: defaults from their one place, and only given flags override."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
from typing import Any

import pytest

from flashdraft.cli import build_parser, main
from flashdraft.cli.arguments import model_sampling, sampling_params
from flashdraft.cli.commands.serve import _llm_arguments
from flashdraft.core import SamplingParams
from flashdraft.llm import LLM

EVERY_SAMPLING_FLAG: dict[str, Any] = {
    "max_tokens": 7,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 11,
    "min_p": 0.05,
    "repetition_penalty": 1.2,
    "presence_penalty": 0.3,
    "frequency_penalty": -0.4,
    "seed": 42,
}


def parse(*argv: str) -> argparse.Namespace:
    return build_parser().parse_args(argv)


@pytest.mark.parametrize("command", [("generate", "hello"), ("chat",)])
def test_model_defaults_are_those_of_llm(command: tuple[str, ...]) -> None:
    arguments = parse(*command)
    parameters = inspect.signature(LLM).parameters
    names = ("model", "draft", "verify", "tree", "device", "dtype", "max_context", "cache_gb")
    for name in (*names, "quantize", "quantize_head"):
        assert getattr(arguments, name) == parameters[name].default


def test_generate_is_greedy_by_default() -> None:
    assert sampling_params(parse("generate", "hello")) == SamplingParams()


def test_every_sampling_flag_reaches_its_field() -> None:
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in EVERY_SAMPLING_FLAG.items()]
    flags += ["--stop", "a", "--stop", "b c", "--ignore-eos"]
    params = sampling_params(parse("generate", "hello", *flags))
    assert params == SamplingParams(**EVERY_SAMPLING_FLAG, stop=["a", "b c"], ignore_eos=True)


def test_only_given_flags_override_the_models_settings() -> None:
    base = model_sampling({"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20})
    assert base == SamplingParams(temperature=0.7, top_p=0.8, top_k=20)
    given = sampling_params(parse("chat", "--top-p", "0.5", "--seed", "1"), base)
    assert given == dataclasses.replace(base, top_p=0.5, seed=1)
    # a flag that says the default of the field still overrides the model
    assert sampling_params(parse("chat", "--temperature", "0"), base).is_greedy


@pytest.mark.parametrize("config", [{}, {"top_k": 20}, {"do_sample": False, "temperature": 0.7}])
def test_a_model_that_says_nothing_or_no_is_greedy(config: dict[str, object]) -> None:
    assert model_sampling(config).is_greedy


def test_a_temperature_is_enough_as_for_the_server() -> None:
    assert model_sampling({"temperature": 0.7}) == SamplingParams(temperature=0.7)


def test_do_sample_without_temperature_means_one() -> None:
    assert model_sampling({"do_sample": True, "top_k": None}) == SamplingParams(temperature=1.0)


def test_an_unusable_setting_is_named_and_passed_over(caplog: pytest.LogCaptureFixture) -> None:
    assert model_sampling({"do_sample": True, "top_p": 3}) == SamplingParams(temperature=1.0)
    assert "generation_config" in caplog.text and "top_p" in caplog.text


def test_tree_takes_auto_off_or_a_number(capsys: pytest.CaptureFixture[str]) -> None:
    told = {None: [], "auto": ["--tree", "auto"], "off": ["--tree=off"], 31: ["--tree", "31"]}
    for value, flags in told.items():
        for command in (("generate", "x"), ("chat",), ("serve",), ("bench",), ("doctor",)):
            assert parse(*command, *flags).tree == value
    assert main(["chat", "--tree", "big"]) == 2
    assert "--tree is 'big'; it must be one of auto, off, or a number." in capsys.readouterr().err


def test_verify_takes_auto_or_a_number(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse("chat", "--verify", "auto").verify == "auto"
    assert parse("chat", "--verify", "4").verify == 4
    with pytest.raises(SystemExit) as exit_:
        parse("chat", "--verify", "some")
    assert exit_.value.code == 2
    assert "neither 'auto' nor a number" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [(), ("bake",), ("pull",), ("generate", "x", "--temp", "1")])
def test_wrong_usage_exits_with_2(argv: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(argv)
    assert exit_.value.code == 2


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("generate", "x", "--temperature", "nan"), "--temperature is nan"),
        (("generate", "x", "--max-tokens", "0"), "--max-tokens is 0"),
        (("chat", "--top-p", "2"), "--top-p is 2.0"),
        (("generate", "x", "--model", "no-such-model"), "There is no model 'no-such-model'"),
        (("generate", "x", "--dtype", "float7"), "--dtype is 'float7'"),
        (("generate", "x", "--verify", "-1"), "--verify is -1"),
        (("generate", "x", "--tree", "99"), "--tree is 99; it must be off or 'auto' or an"),
        (
            ("generate", "x", "--tree", "9", "--verify", "3"),
            "--tree is 9, but a fixed verify length (3)",
        ),
        (("serve", "--tree", "0"), "--tree is 0"),
        (("chat", "--draft", "ngram", "--tree", "9"), "--tree is 9, but no drafter"),
        (("serve", "--draft", "none", "--tree", "auto"), "--tree is 'auto', but no drafter"),
        (("doctor", "--draft", "ngram", "--tree", "9"), "--tree is 9, but no drafter"),
        (("generate", "x", "--raw", "--system", "y"), "--system needs the chat template"),
        (("generate", "x", "--compare", "--json"), "drop --json"),
        (("generate", "x", "-o", "same.json", "--json", "same.json"), "give them two files"),
        (("generate", "x", "--compare", "--draft", "none"), "nothing to compare"),
        (("generate", "  "), "The prompt is empty"),
    ],
)
def test_an_error_is_one_line_and_exit_code_2(
    argv: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("flashdraft: error: ") and message in captured.err
    assert captured.err.count("\n") == 1 and captured.out == ""


def test_an_output_that_cannot_be_written_is_refused_before_the_model_loads(
    tmp_path: object, capsys: pytest.CaptureFixture[str]
) -> None:
    for flag in ("-o", "--json"):
        argv = ("generate", "x", "--model", "org/none", flag, f"{tmp_path}/none/x.html")
        assert main(argv) == 2
        assert "there is no folder" in capsys.readouterr().err


def test_serve_hands_every_model_flag_to_the_engine() -> None:
    flags = {"quantize": "int4", "quantize_head": "fp8", "kv_dtype": "fp8", "cache_gb": 2.5}
    flags |= {"kv_keys": "rebuilt", "mmproj": "mmproj-BF16.gguf"}
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    arguments = parse("serve", *(word.replace("_", "-") for word in words))
    handed = _llm_arguments(arguments, "m")
    assert {name: handed[name] for name in flags} == flags
    assert handed["vision"] and not _llm_arguments(parse("serve", "--no-vision"), "m")["vision"]
    assert set(handed) == set(inspect.signature(LLM).parameters) - {"exact"}
