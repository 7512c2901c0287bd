"""A target and its drafter, from names to weights a backend holds. It runs nothing."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from flashdraft.kernels.interface import Kernels
from flashdraft.models.drafter.loading import load_drafter
from flashdraft.models.drafter.model import Drafter, PackedDrafter
from flashdraft.models.files.opening import reading
from flashdraft.models.layers import Target
from flashdraft.models.loading import Checkpoint, loading_progress, open_checkpoint
from flashdraft.models.registry import build_target
from flashdraft.models.sources import default_drafter, resolve_source


@dataclass(frozen=True)
class OpenPair:
    """The files of a pair, found and opened; the target's weights are not read yet."""

    path: Path  # of the target
    checkpoint: Checkpoint
    drafter_name: str | None = None
    drafter: Drafter | None = None

    def with_drafter(self, name: str) -> OpenPair:
        """The same target with this drafter, whose weights are read."""
        drafter = load_drafter(resolve_source(name).path, self.checkpoint.config)
        return replace(self, drafter_name=name, drafter=drafter)

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


def open_target(model: str) -> OpenPair:
    """A target alone."""
    path = resolve_source(model).path
    return OpenPair(path, open_checkpoint(path))


def find_drafter(model: str, draft: str | None) -> str | None:
    """The name of the drafter that `draft` asks for; None where that is n-grams or nothing."""
    name = default_drafter(model) if draft == "auto" else draft
    return None if name == "ngram" else name
