"""What may be typed after `flashdraft doctor`."""

from __future__ import annotations

from pathlib import Path

from flashdraft.bench.doctor.settings import Mode, Settings
from flashdraft.cli.arguments import (
    add_cache_arguments,
    add_device_arguments,
    add_json_argument,
    add_quantize_arguments,
    add_tree_argument,
)
from flashdraft.cli.parser import Parser
from flashdraft.models.sources import DEFAULT_MODEL


def add_arguments(parser: Parser) -> None:
    """The flags of `doctor`."""
    parser.description = (
        "Check the machine, the kernels, that drafted text is the plain text, and the "
        "accepted length; name what keeps it low. Exit status 0: healthy, 1: a problem, "
        "or too little time to judge."
    )
    shown = " (default: %(default)s)"
    parser.add_argument(
        "--model",
        default=DEFAULT_MODEL,
        metavar="NAME",
        help="a known name, a Hub id, a folder or a GGUF file" + shown,
    )
    parser.add_argument(
        "--draft",
        default=Settings.draft,
        metavar="DRAFTER",
        help="auto, none, ngram, or a drafter's folder or Hub id" + shown,
    )
    add_tree_argument(parser)
    add_device_arguments(parser)
    add_quantize_arguments(parser)
    add_cache_arguments(parser)
    parser.add_argument(
        "--thinking", action="store_true", help="ask with thinking, as you mean to use the model"
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=Mode.temperature,
        metavar="X",
        help="sample as you mean to; 0 is greedy" + shown,
    )
    parser.add_argument(
        "--template", type=Path, metavar="FILE", help="a chat template in place of the model's own"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=Settings.seconds,
        metavar="N",
        help="time for the checks once the model is loaded, and what is then under way" + shown,
    )
    parser.add_argument(
        "--verify-files",
        action="store_true",
        help="only read the pair's files and compare them with what was published; loads nothing",
    )
    add_json_argument(parser)
