"""`flashdraft models`: the models known by name, and whether they are on this machine."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from flashdraft.cli.arguments import Commands, add_json_argument
from flashdraft.cli.files import write_json
from flashdraft.models.sources import KnownModel, known_models


def add_command(commands: Commands) -> None:
    """Add `models` to the command line."""
    parser = commands.add_parser(
        "models",
        help="list the models known by name",
        description="List the models known by name. Others are named by Hub id, folder or GGUF.",
        allow_abbrev=False,
    )
    add_json_argument(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the table, or the same as JSON."""
    models = known_models()
    if arguments.json is not None:
        write_json(arguments.json, {"models": [dataclasses.asdict(model) for model in models]})
        return 0
    rows = [("MODEL", "CACHED", "DRAFTER", "DESCRIPTION")]
    rows += [(m.name, "yes" if m.cached else "no", _drafter(m), m.description) for m in models]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join(cells).rstrip())
    return 0


def _drafter(model: KnownModel) -> str:
    if model.drafter is None:
        return "n-gram lookup"
    return "included" if Path(model.drafter).is_absolute() else model.drafter
