"""A model's tensors with a LoRA merged into them: base + scaling * B @ A, in float32.

What comes of it is rounded once, to what the kernels hold. Every tensor of the folder must find its
place in the model, else nothing is merged.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from flashdraft.errors import CheckpointError, UnsupportedModelError, quoted
from flashdraft.kernels.quantized import Matrix
from flashdraft.models.adapters.config import CONFIG_NAME, WEIGHTS_NAME, read_adapter_config
from flashdraft.models.files.opening import reading
from flashdraft.models.files.safetensors import SafetensorsFiles
from flashdraft.models.tables import plain_name
from flashdraft.models.weights import TensorSource

_PREFIX = "base_model.model."
# between a module's name and its tensor's, where peft wrapped the module
_WRAPPERS = (".modules_to_save.default", ".modules_to_save", ".base_layer")
_REMEDY = "Fetch the adapter again, or name the model that it was trained on."
_FLOATS = ("F64", "F32", "F16", "BF16")
_TABLES = ("embed_tokens", "embed_tokens_per_layer")  # of tokens
_SHARED = ("model.embed_tokens.weight", "lm_head.weight")


@dataclass
class _Change:
    """What becomes of one tensor: replaced, or with a product added, or with a bias added."""

    whole: str | None = None  # names in the adapter's file
    down: str | None = None  # A [rank, in]
    up: str | None = None  # B [out, rank]
    bias: str | None = None
    is_turned: bool = False  # of an embedding, whose product lies turned around
    module: str = ""  # as patterns of ranks name it


# by how a tensor's name ends: the place in a change, what it changes, whether it lies turned around
_ENDINGS = (
    (".lora_A.weight", "down", ".weight", False),
    (".lora_B.weight", "up", ".weight", False),
    (".lora_embedding_A", "down", ".weight", True),
    (".lora_embedding_B", "up", ".weight", True),
    (".lora_B.bias", "bias", ".bias", False),
)


class MergedTensors:
    """A TensorSource over another one, with an adapter merged in."""

    def __init__(self, source: TensorSource, folder: Path, is_tied: bool) -> None:
        with reading(folder / CONFIG_NAME):
            self._config = read_adapter_config(folder)
        path = folder / WEIGHTS_NAME
        if not path.is_file():
            raise CheckpointError(
                f"{folder} has no {WEIGHTS_NAME}; pickled adapters, which can run code when read, "
                "are not loaded. Save it again with a current peft."
            )
        with reading(path):
            self._adapter = SafetensorsFiles([path])
        self._source, self._path = source, path
        self._changes = _find_changes(self._adapter.names(), path)
        if not self._changes:
            raise CheckpointError(f"{path} holds no tensors: it changes nothing. {_REMEDY}")
        places = set(source.names())
        for name, change in self._changes.items():
            with reading(f"{path}: what it changes of {quoted(name)}"):
                self._check(name, change, places, is_tied)

    def names(self) -> Iterable[str]:
        return self._source.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source.shape(name)

    def quantized_bytes(self, name: str) -> int | None:
        return self._source.quantized_bytes(name)

    def read(self, name: str) -> Tensor:
        if name not in self._changes:
            return self._source.read(name)
        return self._merge(name, self._source.read(name))

    def read_matrix(self, name: str, device: torch.device | None = None) -> Matrix:
        if name not in self._changes:
            return self._source.read_matrix(name, device)
        matrix = self._source.read_matrix(name, device)
        assert isinstance(matrix, Tensor)  # checked as the adapter was opened
        return self._merge(name, matrix)

    def _merge(self, name: str, base: Tensor) -> Tensor:
        change = self._changes[name]
        with reading(f"{self._path}: what it changes of {quoted(name)}"):
            if change.whole is not None:
                base = self._values(change.whole, base)
            merged = base.float()
            scaling = self._config.scaling_of(change.module)
            if change.up is not None and change.down is not None:
                product = self._values(change.up, base) @ self._values(change.down, base)
                merged = merged + (product.T if change.is_turned else product) * scaling
            if change.bias is not None:
                merged = merged + self._values(change.bias, base) * scaling
            if not merged.isfinite().all() and base.isfinite().all():
                raise CheckpointError(
                    f"{self._path} makes values of {quoted(name)} that are not finite, its product "
                    f"multiplied with {scaling:g} (lora_alpha by the rank). {_REMEDY}"
                )
        return merged

    def _values(self, name: str, like: Tensor) -> Tensor:
        found = self._adapter.read(name).to(like.device, torch.float32)
        if not found.isfinite().all():
            raise CheckpointError(f"Tensor {quoted(name)} of {self._path} is not finite. {_REMEDY}")
        return found

    def _check(self, name: str, change: _Change, places: set[str], is_tied: bool) -> None:
        """Refuse what has no place in the model, or another shape, before anything is loaded."""
        if name not in places:
            raise UnsupportedModelError(
                f"{self._path} changes {quoted(name)}, which the model does not have. {_REMEDY}"
            )
        if is_tied and name in _SHARED:
            raise UnsupportedModelError(
                f"{self._path} changes {quoted(name)}, which the model uses both to read tokens "
                "and to choose them. Merge it with peft, which decides what becomes of the other, "
                "and name the result."
            )
        if self._source.quantized_bytes(name) is not None:
            raise UnsupportedModelError(
                f"{self._path} changes {quoted(name)}, which the model's files have in few bits: "
                "it would have to be rounded again. Name the model in bf16; on a GPU --quantize "
                "makes few bits of what is merged (in Python: quantize=…)."
            )
        shape = self._source.shape(name)
        if change.whole is not None:
            self._expect(change.whole, shape)
        if (change.up is None) != (change.down is None):
            raise CheckpointError(
                f"{self._path} has {quoted(change.up or change.down)} without the other of its "
                f"pair (A and B). {_REMEDY}"
            )
        if change.up is not None and len(shape) != 2:
            raise UnsupportedModelError(
                f"{self._path} adds a product to {quoted(name)}, which has shape {list(shape)}; "
                f"products are added to matrices alone. {_REMEDY}"
            )
        if change.up is not None and change.down is not None:
            rank = self._config.rank_of(change.module)
            outer, inner = reversed(shape) if change.is_turned else shape
            self._expect(change.up, (outer, rank))
            self._expect(change.down, (rank, inner))
        if change.bias is not None:
            self._expect(change.bias, shape)

    def _expect(self, name: str, shape: tuple[int, ...]) -> None:
        """Refuse a tensor that holds no floats, or has another shape."""
        if self._adapter.dtype(name) not in _FLOATS:
            raise CheckpointError(
                f"{self._path}: tensor {quoted(name)} is stored as {self._adapter.dtype(name)}; it "
                f"must be {' or '.join(_FLOATS)}. {_REMEDY}"
            )
        found = self._adapter.shape(name)
        if found != shape:
            raise CheckpointError(
                f"{self._path}: tensor {quoted(name)} has shape {list(found)}; {list(shape)} fits "
                f"the model and the config's rank. {_REMEDY}"
            )


def _find_changes(names: Iterable[str], path: Path) -> Mapping[str, _Change]:
    """What an adapter's tensors change, by the model's own names."""
    changes: dict[str, _Change] = {}
    for stored in names:
        name, place, is_turned, module = stored.removeprefix(_PREFIX), "whole", False, ""
        for ending, kind, changed, turned in _ENDINGS:
            if name.endswith(ending):
                module = name.removesuffix(ending)
                name, place, is_turned = module + changed, kind, turned
                break
        else:
            for wrapper in _WRAPPERS:
                name = name.replace(f"{wrapper}.", ".")
        plain = plain_name(name) if stored.startswith(_PREFIX) and ".lora_" not in name else None
        if plain is None:
            raise UnsupportedModelError(
                f"{path} has the tensor {quoted(stored)}; flashdraft does not know how to merge "
                "it: of LoRAs, products for linears and embeddings, biases and whole tensors of "
                "the text model are merged. Merge it with peft and name the result."
            )
        if place in ("down", "up") and is_turned != (plain.split(".")[-2] in _TABLES):
            raise UnsupportedModelError(
                f"{path} has the tensor {quoted(stored)}, of "
                f"{'an embedding' if is_turned else 'a linear'}, "
                f"for {quoted(plain)}, which is none. {_REMEDY}"
            )
        change = changes.setdefault(plain, _Change())
        if getattr(change, place) is not None:
            raise CheckpointError(f"{path} changes {quoted(plain)} twice. {_REMEDY}")
        setattr(change, place, stored)
        change.module = module or change.module
        change.is_turned |= is_turned
    return changes
