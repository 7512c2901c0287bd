"""What a checkpoint holds, without its values: names, shapes, and what is stored in few bits.

Every table here can stand over another: the text model's own names, a layer's experts as one
tensor, errors that name the file. No torch: loading.py has the same with values to read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol

from flashdraft.errors import CheckpointError, quoted
from flashdraft.models.files.opening import reading

_TEXT_PREFIXES = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
)
# experts and what chooses them have the same names in every family
_EXPERTS_PLACES = (
    (".moe.experts.", ".experts."),
    (".mlp.experts.", ".experts."),
    (".mlp.gate.", ".router.proj."),
)
_OTHER_MODALITIES = re.compile(
    r"(model\.)?(vision_tower|vision_model|audio_tower|multi_modal_projector|embed_vision|embed_audio)\."
)
_TOWER = re.compile(r"(model\.)?((vision_tower|embed_vision)\..+)")
_NOT_OF_TOWER = "embed_vision.embedding."  # a table of tokens that nothing reads
_EXPERT = re.compile(r"(.+\.experts)\.([0-9]+)\.(gate|up|down)_proj\.weight")
STACKED = ".experts.gate_proj"  # of all experts
_MAX_DIGITS = 9  # of an expert's number


class TensorTable(Protocol):
    """Names and shapes of a checkpoint's tensors."""

    def names(self) -> Iterable[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def quantized_bytes(self, name: str) -> int | None:
        """What a weight that is stored in few bits takes; None for floats."""
        ...


class RenamedTable:
    """Some tensors of another table, under other names."""

    def __init__(self, source: TensorTable, stored: dict[str, str]) -> None:
        self._source = source
        self._stored = stored

    def names(self) -> Iterable[str]:
        return self._stored.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source.shape(self._stored[name])

    def quantized_bytes(self, name: str) -> int | None:
        return self._source.quantized_bytes(self._stored[name])


class JoinedTable:
    """All tensors of two tables; no name is in both."""

    def __init__(self, first: TensorTable, second: TensorTable) -> None:
        self._tables: Mapping[str, TensorTable] = {
            name: table for table in (first, second) for name in table.names()
        }

    def names(self) -> Iterable[str]:
        return self._tables.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tables[name].shape(name)

    def quantized_bytes(self, name: str) -> int | None:
        return self._tables[name].quantized_bytes(name)


class FusedTable:
    """Joins `experts.<id>.{gate,up,down}_proj.weight` into `gate_up_proj` and `down_proj`.

    gate_up_proj is [experts, 2 * intermediate, hidden], gate first; down_proj [experts, hidden,
    intermediate].
    """

    def __init__(self, source: TensorTable, matches: Iterable[re.Match[str]]) -> None:
        self._source = source
        parts: dict[str, dict[tuple[int, str], str]] = {}
        for match in matches:
            if len(match[2]) > _MAX_DIGITS:
                raise CheckpointError(
                    f"Tensor {quoted(match[0])} is of an expert whose number has {len(match[2])} "
                    "digits. Fetch the checkpoint again."
                )
            parts.setdefault(match[1], {})[int(match[2]), match[3]] = match[0]
        self._fused: dict[str, list[list[str]]] = {}  # fused name -> per expert, the parts to stack
        for prefix, found in parts.items():
            # of so few parts some are missing if a number is larger, and the first is named
            count = min(max(expert for expert, _ in found), len(found)) + 1
            for fused, kinds in (("gate_up_proj", ("gate", "up")), ("down_proj", ("down",))):
                self._fused[f"{prefix}.{fused}"] = [
                    [_expert_part(prefix, found, expert, kind) for kind in kinds]
                    for expert in range(count)
                ]
        joined = {part for rows in self._fused.values() for row in rows for part in row}
        self._plain = [name for name in source.names() if name not in joined]

    def names(self) -> Iterable[str]:
        return [*self._plain, *self._fused]

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._fused:
            return self._source.shape(name)
        experts = self._fused[name]
        first = self._source.shape(experts[0][0])
        for part in (part for parts in experts for part in parts):
            if self._source.shape(part) != first:
                raise CheckpointError(
                    f"Tensor {quoted(part)} has shape {list(self._source.shape(part))}, "
                    f"{quoted(experts[0][0])} has {list(first)}; the experts of a layer must agree."
                )
        return (len(experts), first[0] * len(experts[0]), *first[1:])

    def quantized_bytes(self, name: str) -> int | None:
        parts = [part for parts in self._fused.get(name, [[name]]) for part in parts]
        sizes = [self._source.quantized_bytes(part) for part in parts]
        found = [size for size in sizes if size is not None]
        return sum(found) if len(found) == len(sizes) else None


class StackedTable:
    """Joins `experts.gate_proj` and `up_proj`, each of all experts, into `gate_up_proj`."""

    def __init__(self, source: TensorTable) -> None:
        self._source = source
        gates = [name for name in source.names() if name.endswith(STACKED)]
        prefixes = [name.removesuffix(STACKED) for name in gates]
        self._stacks = {
            f"{prefix}.experts.gate_up_proj": (f"{prefix}{STACKED}", f"{prefix}.experts.up_proj")
            for prefix in prefixes
        }
        joined = {part for parts in self._stacks.values() for part in parts}
        self._plain = [name for name in source.names() if name not in joined]

    def names(self) -> Iterable[str]:
        return [*self._plain, *self._stacks]

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._stacks:
            return self._source.shape(name)
        gate, up = (self._source.shape(part) for part in self._stacks[name])
        if gate != up:
            raise CheckpointError(
                f"Tensors {', '.join(map(quoted, self._stacks[name]))} have the shapes "
                f"{list(gate)} and {list(up)}; they must agree."
            )
        return (gate[0], 2 * gate[1], *gate[2:])

    def quantized_bytes(self, name: str) -> int | None:
        parts = self._stacks.get(name, (name,))
        sizes = [self._source.quantized_bytes(part) for part in parts]
        found = [size for size in sizes if size is not None]
        return sum(found) if len(found) == len(sizes) else None


class GuardedTable:
    """A checkpoint's tensors; what goes wrong with one names the file and the tensor."""

    def __init__(self, source: TensorTable, path: Path) -> None:
        self._source = source
        self._path = path

    def names(self) -> Iterable[str]:
        return self._source.names()

    def shape(self, name: str) -> tuple[int, ...]:
        with reading(f"{self._path}: tensor {quoted(name)}"):
            return self._source.shape(name)

    def quantized_bytes(self, name: str) -> int | None:
        with reading(self._described(name)):
            return self._source.quantized_bytes(name)

    def _described(self, name: str) -> str:
        return f"{self._path}: tensor {quoted(name)} of shape {list(self.shape(name))}"


def plain_names(table: TensorTable, with_tower: bool = False) -> dict[str, str]:
    """The model's tensors: their plain names, and those that they are stored under.

    The text model's; with them, if asked for, the vision tower's.
    """
    stored: dict[str, str] = {}
    for name in table.names():
        plain = (_tower_name(name) if with_tower else None) or plain_name(name)
        if plain is None:
            continue
        if plain in stored:
            raise CheckpointError(
                f"Tensors {quoted(stored[plain])} and {quoted(name)} are the same one."
            )
        stored[plain] = name
    return stored


def has_tower(names: Iterable[str]) -> bool:
    """Whether tensors of a vision tower are among a checkpoint's."""
    return any(map(_tower_name, names))


def experts_among(names: Iterable[str]) -> list[re.Match[str]]:
    """Those of the names that belong to a single expert."""
    return [match for name in names if (match := _EXPERT.fullmatch(name))]


def _tower_name(name: str) -> str | None:
    """The plain name of a stored tensor of a vision tower or of its projection."""
    match = _TOWER.fullmatch(name)
    if match is None or match[2].startswith(_NOT_OF_TOWER):
        return None
    return f"model.{match[2]}"


def plain_name(name: str) -> str | None:
    """The text model's name for a stored tensor; None for one that is not part of it."""
    if _OTHER_MODALITIES.match(name) or name.endswith(".rotary_emb.inv_freq"):
        return None
    for prefix, plain in _TEXT_PREFIXES:
        if name.startswith(prefix):
            name = plain + name.removeprefix(prefix)
    for stored, plain in _EXPERTS_PLACES:
        name = name.replace(stored, plain)
    return name


def _expert_part(prefix: str, found: dict[tuple[int, str], str], expert: int, kind: str) -> str:
    if (expert, kind) not in found:
        raise CheckpointError(
            f"The checkpoint has no tensor {quoted(f'{prefix}.{expert}.{kind}_proj.weight')}, "
            "though it has those of a later expert or of another projection."
        )
    return found[expert, kind]
