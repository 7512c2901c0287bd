"""What may be typed after `flashdraft export`."""

from __future__ import annotations

from pathlib import Path

from flashdraft.cli.arguments import add_activations_argument, add_json_argument
from flashdraft.cli.parser import OneOf, Parser
from flashdraft.kernels.kinds import QUANTIZE
from flashdraft.models.drafter.config import LAYOUTS


def add_arguments(parser: Parser) -> None:
    """The flags of `export`."""
    parser.description = (
        "Write a drafter in z-lab's layout (vLLM, SGLang, the dflash package) or in "
        "speculators' (vLLM), with its provenance beside it. With --check nothing is written: the "
        "folder is held against the rules that vLLM and SGLang apply; exit status 1 if it fails."
    )
    parser.add_argument("drafter", metavar="DRAFTER", help="a drafter's folder or Hub id")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--out", type=Path, metavar="DIR", help="a new folder")
    where.add_argument(
        "--check", action="store_true", help="say whether vLLM and SGLang would load DRAFTER"
    )
    parser.add_argument(
        "--layout",
        choices=LAYOUTS,
        default=LAYOUTS[0],
        help="which layout to write (default: %(default)s)",
    )
    parser.add_argument(
        "--model",
        metavar="TARGET",
        help="the drafter's target: checked against it; speculators' layout names it",
    )
    for flag, what in (("--quantize", "weights"), ("--quantize-head", "head")):
        parser.add_argument(
            flag,
            type=OneOf(flag, QUANTIZE),
            metavar="SCHEME",
            help=f"what the target's {what} will be held in, as in training: one of "
            f"{', '.join(QUANTIZE)}",
        )
    add_activations_argument(parser)
    add_json_argument(parser)
