"""`flashdraft models`: the models known by name, and the formats that weights may be in.

What is known of a model is known without a network; the formats are the readers' own tables.
"""

from __future__ import annotations

import argparse
import dataclasses
import textwrap
from pathlib import Path

from flashdraft.bench.plan.pairs import TARGETS
from flashdraft.bench.plan.sizes import BF16, count_target, weight_bytes
from flashdraft.cli.files import write_json
from flashdraft.kernels.kinds import QUANTIZE
from flashdraft.models.config.target import ModelConfig
from flashdraft.models.readable import READABLE, REFUSED
from flashdraft.models.sources import KnownModel, known_models, readable_kinds

_WIDTH = 100
_GB, _MB = 10**9, 10**6


def run(arguments: argparse.Namespace) -> int:
    """Print the table and the formats, or the same as JSON."""
    known, kinds = known_models(), readable_kinds()
    models = [_sized(model) for model in known]
    if arguments.json is not None:
        formats = {
            "gguf": list(kinds.gguf),
            "compressed_tensors": list(kinds.compressed_tensors),
            "quantize": [scheme.value for scheme in QUANTIZE],
            "refused": list(REFUSED),
            "kept": [row._asdict() for row in READABLE],
        }
        listed = [
            {**dataclasses.asdict(m), "is_estimate": m is not k}
            for k, m in zip(known, models, strict=True)
        ]
        write_json(arguments.json, {"models": listed, "formats": formats})
        return 0
    rows = [("MODEL", "CACHED", "FORMAT", "SIZE", "DRAFTER", "DESCRIPTION")]
    rows += [
        (
            m.name,
            "yes" if m.cached else "no",
            m.format or "-",
            "~" * (m is not k) + _size(m),
            _drafter(m),
            m.description,
        )
        for k, m in zip(known, models, strict=True)
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join(cells).rstrip())
    print()
    _print_formats("Loaded", f"safetensors in floats, {kinds.text} in {', '.join(kinds.gguf)}.")
    for one in READABLE:
        print(f"         {one.names}: {one.kept}, {one.bits} bits a weight on a GPU")
    schemes = ", ".join(QUANTIZE)
    _print_formats("Made", f"{schemes} out of floats, on a GPU (--quantize, --quantize-head).")
    _print_formats("Refused", f"every other: {', '.join(REFUSED)} and more.")
    return 0


def _print_formats(title: str, text: str) -> None:
    print(textwrap.fill(f"{title:8} {text}", _WIDTH, subsequent_indent=" " * 9))


def _sized(model: KnownModel) -> KnownModel:
    """With what the text model's weights take, where its files are not here to be looked at."""
    if model.num_bytes is not None or model.name not in TARGETS:
        return model
    size = count_target(ModelConfig.from_hf(TARGETS[model.name]))
    return dataclasses.replace(model, num_bytes=round(weight_bytes(size, BF16)))


def _size(model: KnownModel) -> str:
    if model.num_bytes is None:
        return "-"
    if model.num_bytes < _GB:
        return f"{model.num_bytes / _MB:.0f} MB"
    return f"{model.num_bytes / _GB:.1f} GB"


def _drafter(model: KnownModel) -> str:
    if model.drafter is None:
        return "n-gram lookup"
    return "included" if Path(model.drafter).is_absolute() else model.drafter
