"""Trials of h200.py: a model cut short, constants of the kernels set for one run, a line a section.

A constant is set where it is defined and wherever it was imported from there; modules that are
imported later read it by themselves. What was computed from it as a module was imported stays.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

PACKAGE = "flashdraft.kernels"


@dataclass(frozen=True)
class Setting:
    """A constant of the kernels and its value for this run."""

    module: str
    name: str
    value: Any

    def __str__(self) -> str:
        return f"{self.module}.{self.name}={self.value!r}"

    def apply(self) -> None:
        """Before any kernel is compiled; a `tl.constexpr` stays one."""
        home = importlib.import_module(f"{PACKAGE}.{self.module}")
        old = getattr(home, self.name)
        value = type(old)(self.value) if _is_constexpr(old) else self.value
        setattr(home, self.name, value)
        for module, name in _importers(home.__name__, self.name):
            setattr(module, name, value)


def read_setting(text: str) -> Setting:
    """MODULE.NAME=VALUE, of a constant that exists and is of the value's type."""
    path, equals, literal = text.partition("=")
    module, dot, name = path.strip().rpartition(".")
    parts = [*module.split("."), name]
    if not (equals and dot and all(part.isidentifier() for part in parts)):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not MODULE.NAME=VALUE, as in cuda.overlap.MAX_ROWS=16"
        )
    try:
        home = importlib.import_module(f"{PACKAGE}.{module}")
    except ImportError as error:
        raise argparse.ArgumentTypeError(
            f"{PACKAGE}.{module} cannot be imported: {error}"
        ) from None
    if not name.isupper() or not hasattr(home, name):
        known = ", ".join(key for key in vars(home) if key.isupper()) or "none"
        raise argparse.ArgumentTypeError(f"{module} has no constant {name}; it has {known}")
    for origin, imported in _imports(home):
        if imported.name == name and origin.startswith(f"{PACKAGE}."):
            owner = origin.removeprefix(f"{PACKAGE}.")
            raise argparse.ArgumentTypeError(
                f"{module} has {name} from {owner}: set {owner}.{name}, which sets both"
            )
    try:
        value = ast.literal_eval(literal.strip())
    except (ValueError, SyntaxError):
        raise argparse.ArgumentTypeError(
            f"{literal!r} is not a Python literal: a number, a string in quotes, a tuple, …"
        ) from None
    old = getattr(home, name)
    old = old.value if _is_constexpr(old) else old
    if type(value) is not type(old):
        raise argparse.ArgumentTypeError(
            f"{module}.{name} is {old!r}, of type {type(old).__name__}; "
            f"{value!r} is of type {type(value).__name__}"
        )
    return Setting(module, name, value)


def _is_constexpr(value: object) -> bool:
    # without Triton, which is not everywhere, nothing is one
    return type(value).__name__ == "constexpr"


def _importers(origin: str, name: str) -> Iterator[tuple[ModuleType, str]]:
    """Loaded modules of the package that imported this constant, and their names for it.

    By their source: two constants of the same value may be the same object.
    """
    for key, module in list(sys.modules.items()):
        if key.startswith("flashdraft."):
            for found, imported in _imports(module):
                if (found, imported.name) == (origin, name):
                    yield module, imported.asname or imported.name


def _imports(module: ModuleType) -> Iterator[tuple[str, ast.alias]]:
    path = Path(module.__file__ or "")
    text = path.read_text(encoding="utf-8") if path.suffix == ".py" else ""  # not of C
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            yield from ((node.module, imported) for imported in node.names)


def describe_trial(num_layers: int | None, settings: Sequence[Setting]) -> str:
    """What sets this run apart from the real thing; empty for the real thing."""
    words = [] if num_layers is None else [f"the first {num_layers} layers only"]
    words += [f"{setting} set" for setting in settings]
    return f"a trial: {', '.join(words)}" if words else ""


def summarize(name: str, record: Mapping[str, Any], num_layers: int) -> str:
    """A section in one line; a layer's share is of the whole step, head and drafter included."""
    rows = record.get("load") or record.get("contexts") or {}
    parts = []
    for label, row in rows.items():
        found = row.get("median", row)
        part = f"{label if '=' in label else f'context {label}'}: {found['tok_s']:g} tok/s"
        if "step_ms" in found:
            share = 1e3 * found["step_ms"] / num_layers
            part += f", {found['step_ms']:g} ms a step, {share:.1f} µs a layer and step"
        parts.append(part)
    said = record.get("error", record["status"])
    return f"{name}: {'; '.join(parts) or said}"
