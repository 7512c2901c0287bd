"""The values of a GGUF file's tensors: floats, or blocks taken apart where they are used."""

from __future__ import annotations

import torch
from torch import Tensor

from flashdraft.kernels.quantized import Matrix
from flashdraft.models.gguf.blocks import unpack_blocks
from flashdraft.models.gguf.file import GGUFFile

_FLOAT_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def read_tensor(file: GGUFFile, name: str) -> Tensor:
    """The tensor's values: float32, or float16/bfloat16 where it is stored so."""
    tensor = file.tensors[name]
    if tensor.format.is_float:
        return read_blocks(file, name).view(_FLOAT_DTYPES[tensor.format.name])
    rows = read_blocks(file, name).unsqueeze(0)  # a matrix, even of a single dimension
    return unpack_blocks(rows, tensor.format.name).dequantize().view(tensor.shape)


def read_matrix(file: GGUFFile, name: str, device: torch.device | None = None) -> Matrix:
    """A tensor on `device`; a quantised one of two or more dimensions stays so."""
    tensor = file.tensors[name]
    if file.quantized_bytes(name) is None:
        return read_tensor(file, name).to(device)
    # the bytes travel, and are taken apart where they arrive
    return unpack_blocks(read_blocks(file, name).to(device), tensor.format.name)


def read_blocks(file: GGUFFile, name: str) -> Tensor:
    """The tensor as it is stored: uint8 [..., bytes of a row]."""
    tensor = file.tensors[name]
    raw = torch.frombuffer(
        tensor.data, dtype=torch.uint8, count=tensor.num_bytes, offset=tensor.start
    )
    return raw.view(*tensor.shape[:-1], -1)
