"""What may be typed after `flashdraft synth`."""

from __future__ import annotations

from pathlib import Path

from flashdraft.cli.arguments import (
    add_device_arguments,
    add_json_argument,
    add_quantize_arguments,
)
from flashdraft.cli.parser import Parser
from flashdraft.train.data.settings import SynthSettings


def add_arguments(parser: Parser) -> None:
    """The flags of `synth`."""
    parser.description = (
        "Sample user messages from the target's own chat template: training prompts "
        "without a data set. A file that exists is continued."
    )
    parser.add_argument(
        "--model", required=True, metavar="TARGET", help="a known name, a Hub id, a folder or GGUF"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="a .jsonl file")
    parser.add_argument("--count", type=int, required=True, metavar="N", help="prompts in the end")
    parser.add_argument(
        "--seed",
        type=int,
        default=SynthSettings.seed,
        metavar="N",
        help="of the sampling (default: %(default)s)",
    )
    parser.add_argument(
        "--max-tokens",
        type=int,
        default=SynthSettings.max_tokens,
        metavar="N",
        help="longest message, in tokens (default: %(default)s)",
    )
    parser.add_argument(
        "--any-language", action="store_true", help="keep messages that are not mostly ASCII"
    )
    parser.add_argument(
        "--exclude",
        action="append",
        default=[],
        metavar="FILE",
        help="prompts (a test's) with which no message may share 13 words in a row; may be given "
        "several times",
    )
    parser.add_argument("--slots", type=int, metavar="N", help="messages written at once")
    add_device_arguments(parser)
    add_quantize_arguments(parser)
    add_json_argument(parser)
