"""`flashdraft train`: a drafter for a target, from the target alone or from one's own prompts.

Every stage writes into --out; the same command again goes on where an interrupted one stopped.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import sys
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from flashdraft.cli.arguments import (
    Commands,
    Flag,
    add_device_arguments,
    add_json_argument,
    add_quantize_arguments,
)
from flashdraft.cli.display import LiveLine, Screen
from flashdraft.cli.files import STDOUT, check_writable, write_json
from flashdraft.errors import RequestError
from flashdraft.interrupts import terminate_as_interrupt
from flashdraft.train.data.regenerate import AnswerSettings
from flashdraft.train.fit.schedule import TrainConfig


def _layer_list(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of layers like 1,8,14") from None


def _word_list(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


_JOB_FLAGS = {
    "synth_count": Flag(int, "N", "prompts for the target to write where none are given"),
    "held_out": Flag(int, "N", "prompts kept out of training, to judge it"),
    "layers": Flag(int, "N", "the drafter's layers"),
    "block_size": Flag(int, "N", "the anchor and the slots of a block"),
    "taps": Flag(_layer_list, "N,N,…", "target layers to read, from 0"),
    "mask_token": Flag(int, "ID", "the token that stands for an empty slot"),
}
_ANSWER_FLAGS = {
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


def add_command(commands: Commands) -> None:
    """Add `train` to the command line."""
    parser = commands.add_parser(
        "train",
        help="train a drafter for a target",
        description="Train a drafter for a target. Without --prompts and --answers the target "
        "writes its own prompts. Run the same command again to resume; under torchrun every "
        "process trains on its share of the batches.",
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
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Train, and say what came of it."""
    _refuse_unused(arguments)
    if arguments.json not in (None, STDOUT):
        file = Path(arguments.json)
        if file.parent != arguments.out or arguments.out.is_dir():  # else it is made later
            check_writable(file)
    # loaded here: no other command needs the trainer
    pipeline = importlib.import_module("flashdraft.train.pipeline")
    job = importlib.import_module("flashdraft.train.job").TrainingJob(
        target=arguments.target,
        out=arguments.out,
        prompts=tuple(arguments.prompts),
        answers=tuple(arguments.answers),
        exclude=tuple(arguments.exclude),
        init_from=arguments.init_from,
        device=arguments.device,
        dtype=arguments.dtype,
        quantize=arguments.quantize,
        quantize_head=arguments.quantize_head,
        train=TrainConfig(**_given(arguments, TrainConfig.__dataclass_fields__)),
        **_given(arguments, _JOB_FLAGS),
        answering=AnswerSettings(**_given(arguments, _ANSWER_FLAGS)),
    )
    screen = Screen.detect()
    view = ProgressView(screen)
    with terminate_as_interrupt(), _visible_stages(), closing(view):
        result: dict[str, Any] = pipeline.train_drafter(job, note=screen.note, report=view.show)
    if not result:  # another process of the same run says it
        return 0
    if arguments.json is not None:
        write_json(arguments.json, result)
        return 0
    print(f"drafter   {result['drafter']}")
    for source, value in (result["held_out"].get("by_source") or {}).items():
        print(f"accepted length, held out   {value:.2f}   {source or '(no source)'}")
    return 0


def _refuse_unused(arguments: argparse.Namespace) -> None:
    """A flag that would change nothing was given in error."""
    if arguments.answers:
        given, reason = _given(arguments, ("synth_count", *_ANSWER_FLAGS)), "--answers"
    elif arguments.prompts:
        given, reason = _given(arguments, ("synth_count",)), "--prompts"
    else:
        return
    if given:
        named = ", ".join("--" + name.replace("_", "-") for name in given)
        raise RequestError(f"{named} would not be used with {reason}; leave one of them out.")


class ProgressView:
    """The run as one line on a terminal, as a line for every row elsewhere."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._line = LiveLine(screen, below_answer=False)
        self._accepted = ""

    def show(self, row: dict[str, Any]) -> None:
        """Show a row of the log."""
        if "accepted_length" in row:
            self._accepted = f" · accepted length {row['accepted_length']:.3f}"
            text = f"step {row['step']}{self._accepted}"
        else:
            text = describe_row(row) + self._accepted
        if self._screen.err_is_terminal:
            self._line.show(text)
        else:
            self._screen.note(text)

    def close(self) -> None:
        """Take the line away."""
        self._line.clear()


def describe_row(row: dict[str, Any]) -> str:
    """A row of the log in words."""
    total = "" if row["steps"] is None else f"/{row['steps']}"
    left = round(row["remaining_s"])
    first = row["slot_accuracy"][0] if row["slot_accuracy"] else 0.0
    return (
        f"step {row['step']}{total} · epoch {row['epoch']:.2f} · loss {row['loss']:.4f} · "
        f"first slot {first:.1%} · lr {row['learning_rate']:.2e} · "
        f"{row['tokens_per_s'] / 1000:.1f}k tok/s · {left // 60}:{left % 60:02d} left"
    )


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
        _add_flag(group, name, _JOB_FLAGS[name])
    for name, described in _ANSWER_FLAGS.items():
        _add_flag(group, name, described)


def _add_drafter_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("drafter")
    group.add_argument(
        "--init-from",
        metavar="DRAFTER",
        help="start from the weights of this drafter, or of a run's state (DIR/run/state-N)",
    )
    for name in ("layers", "block_size", "taps", "mask_token"):
        _add_flag(group, name, _JOB_FLAGS[name])


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


def _given(arguments: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
    """Those of the flags that were given."""
    return {name: getattr(arguments, name) for name in names if hasattr(arguments, name)}


@contextmanager
def _visible_stages() -> Iterator[None]:
    """Show what the stages log of their progress; warnings are shown anyway."""
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(lambda record: record.levelno < logging.WARNING)
    logger = logging.getLogger("flashdraft.train")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(before)
        logger.removeHandler(handler)
