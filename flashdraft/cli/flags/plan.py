"""What may be typed after `flashdraft plan`."""

from __future__ import annotations

from flashdraft.bench.plan.choices import DEFAULT_REQUESTS
from flashdraft.bench.plan.plan import DEFAULT_CONTEXT
from flashdraft.cli.arguments import add_cache_arguments, add_json_argument
from flashdraft.cli.parser import Parser


def add_arguments(parser: Parser) -> None:
    """The flags of `plan`."""
    parser.description = (
        "Before loading anything: memory of weights, drafter and cache, what fits on "
        "this machine or a named GPU and in which format, and the expected speed. Without MODEL: "
        "which of the known models fit, and the command that starts each. Asks no network."
    )
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="a known name, a folder or a GGUF file (default: all known ones, beside each other)",
    )
    parser.add_argument(
        "--draft",
        default="auto",
        metavar="DRAFTER",
        help="auto, none, ngram, a known drafter or a drafter's folder (default: %(default)s)",
    )
    parser.add_argument("--gpu", metavar="NAME", help="as in rtx5090 or h200 (default: this one)")
    parser.add_argument("--memory", type=float, metavar="GB", help="of another GPU, in 10^9 bytes")
    parser.add_argument("--bandwidth", type=float, metavar="TB/S", help="of its memory")
    parser.add_argument(
        "--context",
        type=int,
        metavar="N",
        help=f"prompt plus answer, in tokens (default: {DEFAULT_CONTEXT}, or what the model takes)",
    )
    parser.add_argument(
        "--concurrency",
        type=int,
        metavar="N",
        help=f"answers written at once (default: 1, and {DEFAULT_REQUESTS} without MODEL)",
    )
    parser.add_argument(
        "--cache-gb", type=float, metavar="GB", help="memory for keys and values, as serve takes it"
    )
    add_cache_arguments(parser)
    parser.add_argument(
        "--no-vision", action="store_true", help="without the part that sees pictures"
    )
    add_json_argument(parser)
