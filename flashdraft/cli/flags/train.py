"""What may be typed after `flashdraft train`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from flashdraft.cli.arguments import (
    Flag,
    add_device_arguments,
    add_json_argument,
    add_quantize_arguments,
)
from flashdraft.cli.parser import Parser
from flashdraft.models.drafter.head_config import HEADS
from flashdraft.train.fit.schedule import TrainConfig


def _layer_list(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of layers like 1,8,14") from None


def _word_list(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


JOB_FLAGS = {
    "synth_count": Flag(int, "N", "prompts for the target to write where none are given"),
    "held_out": Flag(int, "N", "prompts kept out of training, to judge it"),
    "layers": Flag(int, "N", "the drafter's layers"),
    "block_size": Flag(int, "N", "the anchor and the slots of a block"),
    "taps": Flag(_layer_list, "N,N,…", "target layers to read, from 0"),
    "mask_token": Flag(int, "ID", "the token that stands for an empty slot"),
    "head_rank": Flag(int, "N", "columns of the head's tables"),
}


ANSWER_FLAGS = {
    "max_tokens": Flag(int, "N", "longest answer, in tokens"),
    "max_prompt_tokens": Flag(int, "N", "longer prompts are left out"),
    "greedy_share": Flag(float, "X", "share of greedy answers; the others are sampled"),
    "answers_per_prompt": Flag(int, "N", "answers to every prompt; all but the first are sampled"),
    "thinking": Flag(_word_list, "on,off", "an answer each with the template's thinking on, off"),
}


_TRAIN_FLAGS = {
    "rows": Flag(int, "N", "tokens of context in a batch"),
    "blocks": Flag(int, "N", "blocks in a batch"),
    "short_share": Flag(float, "X", "share of blocks cut to a random width"),
    "accumulation": Flag(int, "N", "batches in a step"),
    "weight_decay": Flag(float, "X", "weight decay of the matrices"),
    "clip": Flag(float, "X", "longest gradient"),
    "warmup_steps": Flag(int, "N", "steps of rising learning rate"),
    "decay_share": Flag(float, "X", "share of the run in which the learning rate falls"),
    "seed": Flag(int, "N", "decides weights, batches and held-out prompts"),
    "log_every": Flag(int, "N", "steps between rows of the log"),
    "evaluate_every": Flag(int, "N", "steps between held-out evaluations; 0 is at the end only"),
    "save_every": Flag(int, "N", "steps between states; 0 is at the end only"),
    "keep_last": Flag(int, "N", "states to keep"),
}


def add_arguments(parser: Parser) -> None:
    """The flags of `train`."""
    parser.description = (
        "Train a drafter for a target. Without --prompts and --answers the target "
        "writes its own prompts. Run the same command again to resume; under torchrun every "
        "process trains on its share of the batches."
    )
    parser.add_argument("target", metavar="TARGET", help="a known name, a Hub id, a folder or GGUF")
    parser.add_argument(
        "--out", required=True, type=Path, metavar="DIR", help="where everything is written"
    )
    _add_data_arguments(parser)
    _add_drafter_arguments(parser)
    _add_run_arguments(parser)
    add_device_arguments(parser, "of the target: auto is bfloat16 on a GPU and float32 on a CPU")
    add_quantize_arguments(parser)
    add_json_argument(parser)


def _add_data_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("data")
    for flag, metavar, text in (
        ("--prompts", "FILE", "prompts to answer: JSONL, JSON, Parquet, a folder, a Hub data set"),
        ("--answers", "DIR", "a folder of the target's answers, made before"),
        ("--exclude", "FILE", "prompts (a test's) that no training prompt may share 13 words with"),
    ):
        text += "; may be given several times"
        group.add_argument(flag, action="append", default=[], metavar=metavar, help=text)
    for name in ("synth_count", "held_out"):
        _add_flag(group, name, JOB_FLAGS[name])
    for name, described in ANSWER_FLAGS.items():
        _add_flag(group, name, described)


def _add_drafter_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("drafter")
    group.add_argument(
        "--init-from",
        metavar="DRAFTER",
        help="start from the weights of this drafter, or of a run's state (DIR/run/state-N)",
    )
    for name in ("layers", "block_size", "taps", "mask_token"):
        _add_flag(group, name, JOB_FLAGS[name])
    group.add_argument(
        "--head",
        choices=HEADS,
        help="add a head, which chooses each token by the one before it",
    )
    _add_flag(group, "head_rank", JOB_FLAGS["head_rank"])


def _add_run_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("training")
    length = group.add_mutually_exclusive_group()
    _add_flag(length, "epochs", Flag(float, "N", "passes over the answers"), TrainConfig.epochs)
    _add_flag(length, "minutes", Flag(float, "M", "end by the clock, the decay included"))
    _add_flag(length, "steps", Flag(int, "N", "end after so many steps"))
    highest = Flag(float, "X", "learning rate between warm-up and decay")
    _add_flag(group, "learning_rate", highest, TrainConfig.learning_rate, "--lr")
    for name, flag in _TRAIN_FLAGS.items():
        _add_flag(group, name, flag, getattr(TrainConfig, name))


def _add_flag(
    group: Any, name: str, flag: Flag, default: object = None, spelling: str | None = None
) -> None:
    """A flag that, unless it is given, leaves no trace: defaults are the settings' own."""
    shown = "" if default is None else f" (default: {default})"
    group.add_argument(
        spelling or "--" + name.replace("_", "-"),
        dest=name,
        type=flag.type,
        default=argparse.SUPPRESS,
        metavar=flag.metavar,
        help=flag.help + shown,
    )
