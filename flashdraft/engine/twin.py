"""Steps without values: all that a step's code looks at, but for what tensors hold.

`describe` writes an object down, with whatever it consists of; `imagine` makes of that a twin whose
tensors have sizes, strides and types alone, on torch's device "meta". A twin can be put through its
steps in another process, which costs no memory of a GPU and changes nothing here.
"""

from __future__ import annotations

import importlib
import io
import pickle
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

_OURS = "flashdraft"
_KNOWN = {_OURS, "torch", "numpy", "builtins", "collections", "functools", "pathlib", "copyreg"}
_KNOWN |= {"operator", "itertools", "types", "_operator", "_codecs", "enum", "random", "triton"}
_HANDLES = (torch.cuda.Stream, torch.cuda.Event, torch.cuda.CUDAGraph, torch.Generator)


def describe(found: Any) -> bytes:
    """An object without values. What comes from elsewhere is not there, or is what it extends."""
    words = io.BytesIO()
    _Describer(words, protocol=pickle.HIGHEST_PROTOCOL).dump(found)
    return words.getvalue()


def imagine(described: bytes) -> Any:
    """The twin of what this process, or the one that started it, has described."""
    return pickle.loads(described)


class _Describer(pickle.Pickler):
    """Writes down what there is, and not what it holds."""

    def reducer_override(self, found: Any) -> Any:
        if isinstance(found, Tensor):
            place = found.storage_offset()
            return _hollow, (tuple(found.shape), found.stride(), found.dtype, place)
        if isinstance(found, torch.device):
            return torch.device, ("meta",)
        if isinstance(found, ModuleType):
            name = found.__name__
            return (importlib.import_module, (name,)) if _is_found(name) else (_nothing, ())
        if isinstance(found, _HANDLES):
            return _nothing, ()
        if isinstance(found, type) or callable(found) and hasattr(found, "__qualname__"):
            return NotImplemented if _is_known(found) else (_nothing, ())
        return NotImplemented if _is_known(type(found)) else _as_extended(found)


def _is_known(found: Any) -> bool:
    """Whether another process finds a class or a function where this one has it."""
    return _is_found(getattr(found, "__module__", None) or "builtins")


def _is_found(module: str) -> bool:
    return module.partition(".")[0] in _KNOWN


def _as_extended(found: Any) -> Any:
    """An object of somebody's class, as the nearest class of ours that it extends."""
    ours = next((one for one in type(found).__mro__ if one.__module__.startswith(_OURS)), None)
    if ours is None:
        return _nothing, ()
    return ours.__new__, (ours,), vars(found)


def _hollow(
    shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, place: int
) -> Tensor:
    # where it lies within its memory tells kernels how it is aligned
    reach = sum(step * (size - 1) for size, step in zip(shape, stride, strict=True))
    whole = torch.empty(place + max(reach, 0) + 1, dtype=dtype, device="meta")
    return whole.as_strided(shape, stride, place)


def _nothing() -> None:
    return None
