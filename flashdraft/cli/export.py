"""`flashdraft export DRAFTER --out DIR`: a drafter in the layout that another engine loads."""

from __future__ import annotations

import argparse
from pathlib import Path

from flashdraft.cli.arguments import Commands, add_json_argument
from flashdraft.cli.files import write_json
from flashdraft.train.export import LAYOUTS, export, read_provenance


def add_command(commands: Commands) -> None:
    """Add `export` to the command line."""
    parser = commands.add_parser(
        "export",
        help="write a drafter in another layout",
        description="Write a drafter in z-lab's layout (vLLM, SGLang, the dflash package) or in "
        "speculators' (vLLM), with its provenance beside it.",
        allow_abbrev=False,
    )
    parser.add_argument("drafter", metavar="DRAFTER", help="a drafter's folder or Hub id")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="a new folder")
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
    add_json_argument(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write the drafter."""
    folder = export(arguments.drafter, arguments.out, arguments.layout, arguments.model)
    if arguments.json is not None:
        content = {
            "folder": str(folder),
            "layout": arguments.layout,
            "files": sorted(path.name for path in folder.iterdir()),
            "provenance": read_provenance(folder),
        }
        write_json(arguments.json, content)
    else:
        print(f"wrote {folder} in {arguments.layout} layout")
    return 0
