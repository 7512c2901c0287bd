"""What may be typed after `flashdraft list`."""

from __future__ import annotations

from flashdraft.cli.arguments import add_json_argument
from flashdraft.cli.parser import Parser


def add_arguments(parser: Parser) -> None:
    """The flags of `list`."""
    parser.description = (
        "List the models on this machine that flashdraft fetched or used, and what they take. "
        "`flashdraft models` lists those that it knows by name."
    )
    add_json_argument(parser)
