"""Which class builds which family: the one table."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from flashdraft.kernels.interface import Kernels
from flashdraft.models.config.target import ModelConfig
from flashdraft.models.files.opening import reading
from flashdraft.models.gemma import GemmaTarget
from flashdraft.models.layers import Target
from flashdraft.models.llama import LlamaTarget
from flashdraft.models.weights import TensorSource, Weights

FAMILIES: dict[str, Callable[..., Target]] = {"llama": LlamaTarget, "gemma": GemmaTarget}


def build_target(
    config: ModelConfig,
    source: TensorSource,
    kernels: Kernels,
    tap_layers: Sequence[int] = (),
    on_read: Callable[[str], None] | None = None,
) -> Target:
    """Build a target from a checkpoint's tensors; `on_read` hears every tensor's name."""
    weights = Weights(source, on_read)
    with reading(weights):
        return FAMILIES[config.family](config, weights, kernels, tap_layers)
