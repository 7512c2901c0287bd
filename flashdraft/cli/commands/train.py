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

from flashdraft.cli.arguments import weight_options
from flashdraft.cli.display import LiveLine, Screen
from flashdraft.cli.files import STDOUT, check_writable, write_json
from flashdraft.cli.flags.train import ANSWER_FLAGS, JOB_FLAGS
from flashdraft.errors import RequestError
from flashdraft.interrupts import terminate_as_interrupt
from flashdraft.train.data.settings import AnswerSettings
from flashdraft.train.fit.schedule import TrainConfig


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
        head=arguments.head,
        device=arguments.device,
        dtype=arguments.dtype,
        weights=weight_options(arguments),
        train=TrainConfig(**_given(arguments, TrainConfig.__dataclass_fields__)),
        **_given(arguments, JOB_FLAGS),
        answering=AnswerSettings(**_given(arguments, ANSWER_FLAGS)),
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
        given, reason = _given(arguments, ("synth_count", *ANSWER_FLAGS)), "--answers"
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
