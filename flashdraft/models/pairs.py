"""A target and its drafter, from names to weights a backend holds. It runs nothing."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from flashdraft.kernels.interface import Kernels
from flashdraft.models.adapters.config import require_adapter
from flashdraft.models.drafter.loading import load_drafter
from flashdraft.models.drafter.model import Drafter, PackedDrafter
from flashdraft.models.files.opening import reading
from flashdraft.models.layers import Target
from flashdraft.models.loading import Checkpoint, loading_progress, open_checkpoint
from flashdraft.models.registry import build_target
from flashdraft.models.sources import default_drafter, require_mmproj, resolve_sources


class PairSources(NamedTuple):
    """Where the files of a pair are."""

    target: Path
    drafter: Path | None
    mmproj: Path | None  # that was named


@dataclass(frozen=True)
class OpenPair:
    """The files of a pair, found and opened; the target's weights are not read yet."""

    path: Path  # of the target
    checkpoint: Checkpoint
    drafter_name: str | None = None
    drafter_path: Path | None = None
    drafter: Drafter | None = None

    def with_drafter(self) -> OpenPair:
        """The same pair, with the weights of its drafter, if it has one."""
        if self.drafter_path is None:
            return self
        return replace(self, drafter=load_drafter(self.drafter_path, self.checkpoint.config))

    def build(self, kernels: Kernels, label: str) -> tuple[Target, PackedDrafter | None]:
        """Both models in the backend's own format; `label` names the target in the progress."""
        checkpoint = self.checkpoint
        taps = self.drafter.config.tap_layers if self.drafter is not None else ()
        with loading_progress(checkpoint.source, label) as on_read:
            target = build_target(checkpoint.config, checkpoint.source, kernels, taps, on_read)
        if self.drafter is None:
            return target, None
        with reading(f"The drafter {self.drafter_name}"):
            return target, PackedDrafter(self.drafter, kernels)


def open_pair(
    model: str,
    drafter: str | None,
    vision: bool = True,
    mmproj: str | None = None,
    lora: str | None = None,
) -> OpenPair:
    """A target and, where one is named, its drafter; what is missing of either is fetched.

    The target has its tower for pictures, if `vision` asks for it and flashdraft can run it: of a
    GGUF model `mmproj` names it, or it lies beside the model's file. `lora` is the folder of an
    adapter, which is merged into it.
    """
    adapter = None if lora is None else require_adapter(lora)
    sources = find_sources(model, drafter, vision, mmproj)
    path, tower = sources.target, sources.mmproj
    return OpenPair(path, open_checkpoint(path, vision, tower, adapter), drafter, sources.drafter)


def find_sources(
    model: str, drafter: str | None, vision: bool = True, mmproj: str | None = None
) -> PairSources:
    """Where a pair's files are, and the mmproj file if one is named; fetched where missing."""
    asked = (drafter, mmproj if vision else None)
    if asked[1] is not None:
        require_mmproj(asked[1])
    names = [name for name in asked if name is not None]
    target, *others = resolve_sources(model, *names, with_mmproj=vision and mmproj is None)
    found = iter(others)
    return PairSources(target.path, *(None if name is None else next(found).path for name in asked))


def find_drafter(model: str, draft: str | None) -> str | None:
    """The name of the drafter that `draft` asks for; None where that is n-grams or nothing."""
    name = default_drafter(model) if draft == "auto" else draft
    return None if name == "ngram" else name
