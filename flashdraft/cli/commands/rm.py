"""`flashdraft rm NAME`: remove models of our cache; nothing is removed by its path."""

from __future__ import annotations

import argparse

from flashdraft.cli.files import write_json
from flashdraft.errors import printable
from flashdraft.models.files.meter import in_words
from flashdraft.models.sources import remove_models


def run(arguments: argparse.Namespace) -> int:
    """Remove them, and say what was freed."""
    removed = remove_models(arguments.names)
    total = sum(num_bytes for _, num_bytes in removed)
    if arguments.json is not None:
        listed = [{"name": name, "num_bytes": num_bytes} for name, num_bytes in removed]
        write_json(arguments.json, {"removed": listed, "num_bytes": total})
        return 0
    for name, num_bytes in removed:
        print(f"Removed {printable(name)}: {in_words(num_bytes)} freed.")
    return 0
