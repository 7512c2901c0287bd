"""`flashdraft list`: our models on this machine, what they take, and when they were used."""

from __future__ import annotations

import argparse
from datetime import UTC, datetime
from pathlib import Path

from flashdraft.cli.files import write_json
from flashdraft.errors import printable
from flashdraft.models.files.meter import in_words
from flashdraft.models.files.stock import CachedModel
from flashdraft.models.sources import default_drafter, drafter_targets, list_cached


def run(arguments: argparse.Namespace) -> int:
    """Print the table, or the same as JSON."""
    models = list_cached()
    total = sum(model.num_bytes for model in models)
    if arguments.json is not None:
        listed = [_as_json(model) for model in models]
        write_json(arguments.json, {"models": listed, "num_bytes": total})
        return 0
    if not models:
        print("No models are here yet; `flashdraft pull MODEL` fetches one.")
        return 0
    rows = [("MODEL", "SIZE", "STATE", "FETCHED", "USED", "DRAFTER")]
    rows += [
        (
            printable(model.name),
            in_words(model.num_bytes),
            "whole" if model.is_whole else "unfinished",
            _day(model.fetched),
            _day(model.used),
            _drafter(model.name),
        )
        for model in models
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join(cells).rstrip())
    print(f"\n{len(models)} {'model' if len(models) == 1 else 'models'}, {in_words(total)}")
    return 0


def _as_json(model: CachedModel) -> dict[str, object]:
    return {
        "name": model.name,
        "source": model.source,
        "path": str(model.path),
        "num_bytes": model.num_bytes,
        "is_whole": model.is_whole,
        "fetched": _moment(model.fetched),
        "used": _moment(model.used),
        "drafter": default_drafter(model.name),
        "drafts_for": drafter_targets(model.name),
    }


def _moment(seconds: float | None) -> str | None:
    return (
        None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat("T", "seconds")
    )


def _day(seconds: float | None) -> str:
    return "-" if seconds is None else f"{datetime.fromtimestamp(seconds):%Y-%m-%d %H:%M}"


def _drafter(name: str) -> str:
    """The drafter of a target, or the target of a drafter."""
    targets, drafter = drafter_targets(name), default_drafter(name)
    if targets:
        return f"drafts for {', '.join(targets)}"
    if drafter is None:
        return "-"
    return "included" if Path(drafter).is_absolute() else drafter
