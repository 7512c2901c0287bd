"""The flashdraft command: `flashdraft COMMAND …`. It parses, dispatches and reports.

A command's flags stand in `flags`, what it does in `commands`; either is loaded when it is needed,
so that help and mistakes wait for no model. Nothing else in the package prints.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TextIO

from flashdraft.cli.parser import Parser, in_flags, later
from flashdraft.core import VERSION
from flashdraft.errors import FlashdraftError
from flashdraft.status_line import STATUS

__all__ = ["build_parser", "main"]

COMMANDS = {
    "generate": "answer one prompt",
    "chat": "talk to a model, or ask it once",
    "serve": "serve a model over HTTP",
    "connect": "print or write the settings of common clients",
    "models": "list the models known by name, and the formats of weights",
    "pull": "fetch a model and its drafter",
    "list": "list the models on this machine",
    "rm": "remove models from this machine",
    "bench": "measure plain against drafted decoding",
    "plan": "what fits on a GPU, and how fast it should be",
    "doctor": "check a target and its drafter on this machine",
    "train": "train a drafter for a target",
    "synth": "let a model write prompts to train on",
    "export": "write a drafter in another layout, or check one",
    "completion": "print what lets a shell complete all this",
}
OTHER_NAMES = {"chat": ["run"]}
SLOW = {"generate", "chat", "serve", "bench", "doctor", "train", "synth"}  # they load torch
EXIT_ERROR = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells have it
EXIT_PIPE_CLOSED = 141  # 128 + SIGPIPE


def build_parser() -> Parser:
    """The parser of the whole command line; every command leaves what runs it in `run`."""
    parser = Parser(
        prog="flashdraft",
        description="Answers from a large language model, several times faster, same output. For "
        "Linux, on an NVIDIA GPU or a CPU. Not yet: a Mac, and models only partly on the GPU.",
    )
    parser.add_argument("--version", action="version", version=f"flashdraft {VERSION}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, text in COMMANDS.items():
        command = commands.add_parser(name, help=text, aliases=OTHER_NAMES.get(name, []))
        command.declare = partial(_declare, name)
        command.is_slow = name in SLOW
        command.set_defaults(run=later(f"flashdraft.cli.commands.{name}"))
    for one in (parser, *commands.choices.values()):
        one.commands, one.root = commands.choices, parser
    return parser


def _declare(name: str, parser: Parser) -> None:
    importlib.import_module(f"flashdraft.cli.flags.{name}").add_arguments(parser)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return the exit code."""
    _replace_what_cannot_be_encoded()
    flags: dict[str, str] = {}
    with _visible_warnings():
        try:
            arguments = build_parser().parse_args(argv)
            flags = arguments.flags
            code: int = arguments.run(arguments)
            sys.stdout.flush()
            return code
        except FlashdraftError as error:
            STATUS.clear()
            print(f"flashdraft: error: {in_flags(error, flags)}", file=sys.stderr)
            return EXIT_ERROR
        except KeyboardInterrupt:
            return EXIT_INTERRUPTED
        except BrokenPipeError:
            _abandon_stdout()
            return EXIT_PIPE_CLOSED
        finally:
            STATUS.clear()


class _BelowStatus(logging.StreamHandler[TextIO]):
    """Writes lines; what is being loaded is taken away before."""

    def emit(self, record: logging.LogRecord) -> None:
        STATUS.clear()
        super().emit(record)


@contextmanager
def _visible_warnings() -> Iterator[None]:
    """Show what the library logs, from warnings upwards, on stderr."""
    handler = _BelowStatus(sys.stderr)
    handler.setLevel(logging.WARNING)
    handler.setFormatter(logging.Formatter("flashdraft: %(message)s"))
    logger = logging.getLogger("flashdraft")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def _replace_what_cannot_be_encoded() -> None:
    """An answer may hold any character; a terminal with a small alphabet must not end it."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


def _abandon_stdout() -> None:
    """The reader has gone: let the interpreter's last flush go nowhere instead of failing."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
