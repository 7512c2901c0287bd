"""What a run measures of its steps, summed on the device until the log asks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashdraft.train.fit.step import StepReport


class Meter:
    """Sums on the device between two rows of the log."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, int] = {}

    def add(self, report: StepReport) -> None:
        self._add("loss", report.loss)
        self._add("correct", report.slot_correct)
        self._add("count", report.slot_count)

    def add_norm(self, norm: Tensor) -> None:
        self._add("norm", norm)

    def read(self) -> dict[str, Any]:
        """The means since the last call; waits for the device."""
        loss, norm = (float(self._sums[name]) / self._counts[name] for name in ("loss", "norm"))
        accuracy = self._sums["correct"] / self._sums["count"].clamp_min(1)
        self._sums, self._counts = {}, {}
        return {
            "loss": loss,
            "gradient_norm": norm,
            "slot_accuracy": [round(share, 4) for share in accuracy.tolist()],
        }

    def _add(self, name: str, value: Tensor) -> None:
        value = value.detach().to(torch.float64 if value.device.type == "cpu" else torch.float32)
        self._sums[name] = self._sums[name] + value if name in self._sums else value.clone()
        self._counts[name] = self._counts.get(name, 0) + 1
