"""What may be typed after `flashdraft generate`."""

from __future__ import annotations

import argparse
from pathlib import Path

from flashdraft.cli.arguments import (
    add_json_argument,
    add_model_arguments,
    add_picture_arguments,
    add_sampling_arguments,
    check_mmproj,
)
from flashdraft.cli.input import require_prompt
from flashdraft.cli.parser import Parser
from flashdraft.models.sources import require_name


def add_arguments(parser: Parser) -> None:
    """The flags of `generate`."""
    parser.description = "Answer one prompt. The answer goes to stdout, statistics to stderr."
    parser.check = _check
    parser.add_argument(
        "prompt",
        nargs="?",
        metavar="PROMPT",
        help="the prompt; what is piped in goes before it, or is the prompt",
    )
    parser.add_argument(
        "--raw", action="store_true", help="continue the prompt as it is, without chat template"
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="write the answer to FILE; of an answer with code for such a FILE, the code alone",
    )
    add_json_argument(parser)
    parser.add_argument(
        "--compare",
        action="store_true",
        help="answer plainly, then drafted; print both speeds and whether the tokens are identical",
    )
    add_picture_arguments(parser, "the prompt")
    add_sampling_arguments(parser)
    add_model_arguments(parser)


def _check(arguments: argparse.Namespace) -> None:
    """Before anything is loaded: whether there is something to answer, and a model to do it."""
    require_prompt(arguments.prompt, "flashdraft generate")
    require_name(arguments.model)
    check_mmproj(arguments)
