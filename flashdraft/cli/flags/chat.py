"""What may be typed after `flashdraft chat`."""

from __future__ import annotations

from flashdraft.cli.arguments import add_model_arguments, add_sampling_arguments
from flashdraft.cli.parser import Parser


def add_arguments(parser: Parser) -> None:
    """The flags of `chat`."""
    parser.description = "Talk to a model. /help lists what else can be typed; Ctrl-D leaves."
    add_sampling_arguments(parser)
    add_model_arguments(parser)
