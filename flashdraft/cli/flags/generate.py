"""What may be typed after `flashdraft generate`."""

from __future__ import annotations

from pathlib import Path

from flashdraft.cli.arguments import add_json_argument, add_model_arguments, add_sampling_arguments
from flashdraft.cli.parser import Parser


def add_arguments(parser: Parser) -> None:
    """The flags of `generate`."""
    parser.description = "Answer one prompt. The answer goes to stdout, statistics to stderr."
    parser.add_argument("prompt", metavar="PROMPT", help='the prompt; "-" reads stdin')
    parser.add_argument(
        "--raw", action="store_true", help="continue the prompt as it is, without chat template"
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="write the answer to FILE; if it is one code block and FILE is code, the block alone",
    )
    add_json_argument(parser)
    parser.add_argument(
        "--compare",
        action="store_true",
        help="answer plainly, then drafted; print both speeds and whether the tokens are identical",
    )
    add_sampling_arguments(parser)
    add_model_arguments(parser)
