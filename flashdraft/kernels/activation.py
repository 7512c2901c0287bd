"""Activation functions by name. No tensors, no torch."""

from __future__ import annotations

from enum import StrEnum


class Activation(StrEnum):
    """The gate's activation function in a gated MLP."""

    SILU = "silu"
    GELU_TANH = "gelu_tanh"
