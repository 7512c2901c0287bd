"""What may be typed after `flashdraft models`."""

from __future__ import annotations

from flashdraft.cli.arguments import add_json_argument
from flashdraft.cli.parser import Parser


def add_arguments(parser: Parser) -> None:
    """The flags of `models`."""
    parser.description = (
        "List the models known by name, and the formats that weights can be loaded "
        "from and made into. Other models are named by Hub id, folder or GGUF."
    )
    add_json_argument(parser)
