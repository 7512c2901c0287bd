"""`flashdraft models`: the models known by name, and which families, formats and adapters load.

What is known of a model is known without a network; what loads is told by models/readable.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flashdraft.bench.plan.pairs import TARGETS
from flashdraft.bench.plan.sizes import BF16, count_target, weight_bytes
from flashdraft.cli.files import write_json
from flashdraft.kernels.kinds import QUANTIZE
from flashdraft.models.config.target import ModelConfig
from flashdraft.models.readable import (
    ADAPTERS,
    FAMILIES,
    FORMATS,
    REFUSED_ADAPTERS,
    REFUSED_FAMILIES,
    REFUSED_FORMATS,
)
from flashdraft.models.sources import (
    KnownModel,
    drafted_targets,
    known_models,
    readable_kinds,
)

_WIDTH = 100
_GB, _MB = 10**9, 10**6
_NONE = "-"


def run(arguments: argparse.Namespace) -> int:
    """Print the tables, or the same as JSON."""
    known = known_models()
    models = [_sized(model) for model in known]
    if arguments.json is not None:
        listed = [
            {**dataclasses.asdict(m), "is_estimate": m is not k}
            for k, m in zip(known, models, strict=True)
        ]
        write_json(arguments.json, {"models": listed, **_readable()})
        return 0
    rows = [("MODEL", "CACHED", "FORMAT", "SIZE", "DRAFTER")]
    rows += [
        (m.name, "yes" if m.cached else "no", m.format or "", "~" * (m is not k) + _size(m))
        + (_drafter(m),)
        for k, m in zip(known, models, strict=True)
    ]
    _print_table(rows)
    families = [("FAMILY", "MODEL_TYPE", "GGUF", "DRAFTERS KNOWN FOR", "LEFT OUT")]
    families += [
        (one.names, one.shown_types, one.gguf or "", short_names(one.names), one.unread)
        for one in FAMILIES
    ]
    _print_table(families)
    _print_table([("WEIGHTS", "KEPT ON A GPU AS", "BITS"), *(one[:3] for one in FORMATS)])
    _print_table([("ADAPTERS (--lora)", "MERGED"), *ADAPTERS])
    _print_words("Made", f"{', '.join(QUANTIZE)} out of floats, on a GPU (--quantize).")
    refused = (
        f"every other: families such as {', '.join(REFUSED_FAMILIES)}; weights such as "
        f"{', '.join(REFUSED_FORMATS)}; adapters such as {', '.join(REFUSED_ADAPTERS)}."
    )
    _print_words("Refused", refused)
    return 0


def short_names(family: str) -> str:
    """The models of a family whose drafters are known, without their publishers."""
    return ", ".join(name.rpartition("/")[2] for name in drafted_targets(family))


def _readable() -> dict[str, Any]:
    """The tables of what loads, for programs."""
    kinds = readable_kinds()
    families = [{**one._asdict(), "targets": drafted_targets(one.names)} for one in FAMILIES]
    return {
        "families": {"read": families, "refused": REFUSED_FAMILIES},
        "formats": {
            "gguf": list(kinds.gguf),
            "compressed_tensors": list(kinds.compressed_tensors),
            "quantize": [scheme.value for scheme in QUANTIZE],
            "refused": list(REFUSED_FORMATS),
            "kept": [row._asdict() for row in FORMATS],
        },
        "adapters": {
            "merged": [row._asdict() for row in ADAPTERS],
            "refused": list(REFUSED_ADAPTERS),
        },
    }


def _print_table(rows: Sequence[Sequence[str]]) -> None:
    """Columns that are as wide as they have to be, and an empty line."""
    told = [[cell.replace("`", "") or _NONE for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*told, strict=True)]
    for row in told:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join(cells).rstrip())
    print()


def _print_words(title: str, text: str) -> None:
    print(textwrap.fill(f"{title:8} {text}", _WIDTH, subsequent_indent=" " * 9))


def _sized(model: KnownModel) -> KnownModel:
    """With what the text model's weights take, where its files are not here to be looked at."""
    if model.num_bytes is not None or model.name not in TARGETS:
        return model
    size = count_target(ModelConfig.from_hf(TARGETS[model.name]))
    return dataclasses.replace(model, num_bytes=round(weight_bytes(size, BF16)))


def _size(model: KnownModel) -> str:
    if model.num_bytes is None:
        return ""
    if model.num_bytes < _GB:
        return f"{model.num_bytes / _MB:.0f} MB"
    return f"{model.num_bytes / _GB:.1f} GB"


def _drafter(model: KnownModel) -> str:
    if model.drafter is None:
        return "n-gram lookup"
    return "included" if Path(model.drafter).is_absolute() else model.drafter
