"""A drafter as others load it, and where it came from.

`export` writes a checkpoint in z-lab's layout (the native one) or in speculators'. Provenance is a
file `flashdraft.json` beside every checkpoint: who made it, from what, how, and how good it was.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from flashdraft.core import VERSION
from flashdraft.errors import CheckpointError, RequestError
from flashdraft.files import write_whole
from flashdraft.kernels.kinds import AS_STORED, WeightOptions
from flashdraft.models.drafter.config import LAYOUTS
from flashdraft.models.drafter.loading import load_drafter, save_drafter, save_speculators
from flashdraft.models.files.opening import read_json
from flashdraft.models.loading import open_checkpoint
from flashdraft.models.sources import resolve_source

PROVENANCE = "flashdraft.json"
_VERSIONED = ("torch", "transformers", "triton", "safetensors", "numpy")


def export(
    drafter: str | Path,
    out: str | Path,
    layout: str = "zlab",
    target: str | None = None,
    formats: WeightOptions = AS_STORED,
) -> Path:
    """Write a drafter (of either layout) into the folder `out`, with its provenance; return it.

    Tensors keep their values and dtype. The target's name is needed for speculators' layout; where
    it is given, the drafter is checked against it, and so are the `formats` that the target's
    weights will be held in against those that it was trained on.
    """
    if layout not in LAYOUTS:
        raise RequestError(f"layout is {layout!r}; it must be {' or '.join(LAYOUTS)}.")
    source, folder = resolve_source(str(drafter)).path, Path(out)
    if (folder / "config.json").exists():
        raise RequestError(f"{folder} already holds a checkpoint; name another folder.")
    if folder.exists() and not folder.is_dir():
        raise RequestError(f"{folder} is a file; name a folder.")
    if layout == "speculators" and target is None:
        raise RequestError("speculators' layout names the target; give it with --model.")
    record = read_provenance(source) or {"drafter": Path(drafter).name}
    if target is not None:
        _check_formats(record, formats)
    elif any(formats):
        raise RequestError(
            f"{formats.flags()} says how the target is held, and no target is named; give it with "
            "--model, or leave that out."
        )
    checkpoint = None if target is None else open_checkpoint(resolve_source(target).path)
    loaded = load_drafter(source, None if checkpoint is None else checkpoint.config)
    dtype = loaded.fc.weight.dtype
    try:
        if layout == "zlab":
            save_drafter(loaded, folder, dtype)
        else:
            assert checkpoint is not None and target is not None
            save_speculators(
                loaded,
                folder,
                checkpoint.config,
                target_name=target,
                target_architectures=checkpoint.raw_config.get("architectures") or [],
                dtype=dtype,
            )
        asked = {"layout": layout, "target": target and Path(target).name, **formats._asdict()}
        exported = {**asked, **_maker()}
        write_provenance(folder, {**record, "exported": exported})
    except (OSError, SafetensorError) as error:
        for part in folder.glob("*.part"):
            part.unlink(missing_ok=True)
        reason = getattr(error, "strerror", None) or str(error)
        raise RequestError(
            f"{folder} cannot be written: {reason}. Make room, remove what is in it, and run the "
            "same command again, or name another --out."
        ) from None
    return folder


def _check_formats(record: Mapping[str, Any], formats: WeightOptions) -> None:
    """Refuse to hand a drafter to a target in other bits.

    A record without formats is of a time when targets were as stored; one without a target, of
    another maker, who says nothing of it.
    """
    found = record.get("target")
    if not isinstance(found, Mapping):
        return
    try:
        trained = WeightOptions(**{name: found.get(name) for name in WeightOptions._fields})
        trained.schemes()  # or a RequestError
    except (RequestError, TypeError) as error:
        raise CheckpointError(f"The provenance is damaged: {error} Delete it to go on.") from None
    # a head that was not asked for has the format that follows from the rest
    asked = formats._replace(quantize_head=formats.quantize_head or trained.quantize_head)
    if (asked if formats.quantize else formats) != trained:
        given = trained.flags() or "neither --quantize nor --quantize-head"
        raise RequestError(
            f"The drafter was trained on {found.get('name')} with its weights "
            f"{trained.describe()}; exported for weights {formats.describe()} it would be accepted "
            f"less often. Give {given}, leave --model out (zlab's layout names no target), or "
            "train a drafter on that format."
        )


def provenance(
    *,
    target: Mapping[str, Any],
    data: Sequence[Mapping[str, Any]],
    recipe: Mapping[str, Any],
    held_out: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """What stands beside a trained drafter.

    `target` names it with its fingerprint, `data` has a digest and sizes per set of answers,
    `recipe` every setting of the run, `held_out` the results on answers it never saw.
    """
    return {
        **_maker(),
        "target": dict(target),
        "data": [dict(one) for one in data],
        "recipe": dict(recipe),
        "held_out": None if held_out is None else dict(held_out),
    }


def write_provenance(folder: str | Path, record: Mapping[str, Any]) -> None:
    """Put the record beside a checkpoint."""
    path = Path(folder) / PROVENANCE
    write_whole(path, json.dumps(record, indent=2) + "\n")


def read_provenance(folder: str | Path) -> dict[str, Any] | None:
    """The record beside a checkpoint; None where there is none."""
    path = Path(folder) / PROVENANCE
    if not path.is_file():
        return None
    try:
        return read_json(path)
    except CheckpointError as error:
        raise CheckpointError(f"The provenance is damaged: {error} Delete it to go on.") from None


def _maker() -> dict[str, Any]:
    """Who made something: when, with which code, on what, by which command."""
    return {
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "versions": {"python": platform.python_version(), **_versions()},
        "hardware": _hardware(),
        "argv": [_shown(argument) for argument in sys.argv],
    }


def _shown(argument: str) -> str:
    """An argument without the folders of the machine it was given on."""
    return Path(argument).name if os.path.isabs(argument) else argument


def _versions() -> dict[str, str]:
    found = {"flashdraft": VERSION}  # not the metadata's: a checkout may have none, or an old one
    for name in _VERSIONED:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _hardware() -> str:
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        return ", ".join(names)
    return f"{platform.machine()} CPU, {os.cpu_count()} cores"


def _commit() -> str | None:
    """The commit of the code, where it runs from a checkout; "+" marks uncommitted changes."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None
