"""What may be typed after `flashdraft chat`."""

from __future__ import annotations

import argparse

from flashdraft.cli.arguments import (
    add_model_arguments,
    add_model_name,
    add_picture_arguments,
    add_sampling_arguments,
    check_mmproj,
    take_model_name,
)
from flashdraft.cli.parser import Parser
from flashdraft.models.sources import require_name


def add_arguments(parser: Parser) -> None:
    """The flags of `chat`."""
    parser.description = (
        "Talk to a model. /help lists what else can be typed; Ctrl-D leaves. With PROMPT it is "
        "answered once. `flashdraft run` is the same command."
    )
    parser.check = _check
    add_model_name(parser)
    parser.add_argument(
        "prompt",
        nargs="*",
        metavar="PROMPT",
        help="answer this and leave; what is piped in goes before it",
    )
    add_picture_arguments(parser, "the first question")
    add_sampling_arguments(parser)
    add_model_arguments(parser)


def _check(arguments: argparse.Namespace) -> None:
    """Before anything is loaded: whether what is named is there."""
    require_name(take_model_name(arguments))
    check_mmproj(arguments)
