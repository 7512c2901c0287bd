"""`flashdraft pull MODEL`: fetch a model and its drafter, and say where they are.

How far it is goes to stderr, from where the files are fetched; serve, chat and generate fetch in
the same way what they miss.
"""

from __future__ import annotations

import argparse
import sys

from flashdraft.cli.files import write_json
from flashdraft.interrupts import terminate_as_interrupt
from flashdraft.models.sources import default_drafter, pull


def run(arguments: argparse.Namespace) -> int:
    """Fetch what is missing."""
    with terminate_as_interrupt():
        sources = pull(arguments.model, arguments.draft, not arguments.no_vision)
    if arguments.draft == "auto" and default_drafter(arguments.model) is None:
        note = f"No drafter is known for {arguments.model}; what followed earlier is looked up."
        print(note, file=sys.stderr)
    if arguments.json is not None:
        listed = [
            {"name": one.name, "role": role, "origin": one.origin, "path": str(one.path)}
            for one, role in zip(sources, ("target", "drafter"), strict=False)
        ]
        write_json(arguments.json, {"models": listed})
        return 0
    for source in sources:
        print(source.path if source.name == str(source.path) else f"{source.name}  {source.path}")
    return 0
