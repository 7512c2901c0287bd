"""GGUF files as Hugging Face checkpoints: tensors by their names there, rows in their order there.

Names are names.py's, bytes and block formats values.py's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashdraft.kernels.quantized import Matrix, Quantized
from flashdraft.models.gguf.config import whole_number
from flashdraft.models.gguf.names import NORM_OFFSETS, PATCHES, GGUFTable, TowerTable
from flashdraft.models.gguf.values import read_matrix, read_tensor


class GGUFTensors(GGUFTable):
    """A TensorSource over a GGUF file, under Hugging Face names and in Hugging Face row order."""

    def read(self, name: str) -> Tensor:
        tensor, order = read_tensor(self.file, self.stored[name]), self._row_order(name)
        if self.architecture in NORM_OFFSETS and name.endswith("norm.weight"):
            return tensor.float() - NORM_OFFSETS[self.architecture]
        return tensor if order is None else tensor[order]

    def read_matrix(self, name: str, device: torch.device | None = None) -> Matrix:
        matrix, order = read_matrix(self.file, self.stored[name], device), self._row_order(name)
        if order is None:
            return matrix
        return matrix.rows(order) if isinstance(matrix, Quantized) else matrix[order]

    def _row_order(self, name: str) -> Tensor | None:
        """llama.cpp pairs a head's rotary rows as (0, 1), (2, 3), …; the Hub's form has halves."""
        if self.architecture != "llama" or ".self_attn." not in name:
            return None
        key = {"q": "attention.head_count", "k": "attention.head_count_kv"}.get(
            name.partition("_proj.")[0][-1:]
        )
        if key is None:
            return None
        num_heads = whole_number(self.file, key)
        return torch.arange(self.shape(name)[0]).view(num_heads, -1, 2).transpose(1, 2).flatten()


class TowerTensors(TowerTable):
    """A TensorSource over a tower's file, under Hugging Face names; floats, however stored."""

    def read(self, name: str) -> Tensor:
        stored = self.stored[name]
        tensor = read_tensor(self.file, stored)
        if stored != PATCHES:
            return tensor.view(self.shape(name))
        # a patch lies by colour, row and column; the Hub's form has the colour last
        return tensor.permute(0, 2, 3, 1).reshape(self.shape(name))

    def read_matrix(self, name: str, device: torch.device | None = None) -> Matrix:
        return self.read(name).to(device)
