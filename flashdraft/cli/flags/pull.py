"""What may be typed after `flashdraft pull`."""

from __future__ import annotations

from flashdraft.cli.arguments import add_json_argument
from flashdraft.cli.parser import Parser


def add_arguments(parser: Parser) -> None:
    """The flags of `pull`."""
    parser.description = (
        "Fetch a model and its drafter, for later use. An interrupted fetch goes on where it "
        "ended; the disk's room is looked at first. For a gated model accept its licence on its "
        "page at the Hugging Face Hub, and set HF_TOKEN to a token of that account."
    )
    parser.add_argument(
        "model", metavar="MODEL", help="a known name, or a Hub id: org/name, org/name:file.gguf"
    )
    parser.add_argument(
        "--draft",
        default="auto",
        metavar="DRAFTER",
        help="auto (the known one), none, or a drafter's Hub id (default: %(default)s)",
    )
    parser.add_argument(
        "--no-vision",
        action="store_true",
        help="leave the mmproj file out, which a GGUF model sees pictures with",
    )
    add_json_argument(parser)
