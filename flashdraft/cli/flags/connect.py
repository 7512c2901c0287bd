"""What may be typed after `flashdraft connect`."""

from __future__ import annotations

from flashdraft.cli.arguments import KEY_VARIABLE
from flashdraft.cli.clients import CLIENTS, DEFAULT_URL
from flashdraft.cli.parser import Parser


def add_arguments(parser: Parser) -> None:
    """The flags of `connect`."""
    parser.description = (
        "Print the settings that point a client at a running server, or write them "
        "where the client looks."
    )
    parser.add_argument(
        "--client", choices=CLIENTS, metavar="NAME", help=f"one of {', '.join(CLIENTS)}; else all"
    )
    parser.add_argument(
        "--url",
        default=DEFAULT_URL,
        metavar="URL",
        help="the server's address (default: %(default)s)",
    )
    parser.add_argument(
        "--api-key",
        metavar="KEY",
        help=f"the server's key (default: {KEY_VARIABLE} in the environment)",
    )
    parser.add_argument(
        "--model", metavar="NAME", help="the model's name; else the server is asked"
    )
    parser.add_argument(
        "--write",
        nargs="?",
        const="",
        metavar="PATH",
        help="write the settings of --client to PATH, by default where it looks in this folder",
    )
