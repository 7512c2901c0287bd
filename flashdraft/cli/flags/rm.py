"""What may be typed after `flashdraft rm`."""

from __future__ import annotations

from flashdraft.cli.arguments import add_json_argument
from flashdraft.cli.parser import Parser


def add_arguments(parser: Parser) -> None:
    """The flags of `rm`."""
    parser.description = (
        "Remove models from the cache, by the names that `flashdraft list` has. Paths and "
        "patterns are refused."
    )
    parser.add_argument("names", metavar="NAME", nargs="+", help="a model, as `list` names it")
    add_json_argument(parser)
