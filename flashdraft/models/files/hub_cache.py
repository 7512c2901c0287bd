"""A model's folder in the cache of the Hub's client: what is there, and how files get into it.

The layout is the client's, so that other programs find what we fetch, and we what they fetched:
`blobs` has the contents by digest, `snapshots/COMMIT` links by file name, `refs/main` the commit.
Ours are the unfinished blobs, which are continued, and a note of what flashdraft used when. There
is no network here.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from huggingface_hub import constants

from flashdraft.files import put_in_place, write_whole
from flashdraft.models.files.digests import Digest
from flashdraft.models.files.safetensors import INDEX_NAME, SINGLE_NAME
from flashdraft.models.files.split import part_names

FILES = ["*.json", "*.jinja", "*.safetensors", "tokenizer.model"]  # of a model's repository
_WEIGHTS = ".safetensors"
_PREFIX = "models--"
_NOTE = "flashdraft.json"
_PART = ".flashdraft.incomplete"  # the client counts *.incomplete among what may be removed
_COMMIT = re.compile(r"[0-9a-f]{40}")
_BLOB = re.compile(r"(unchecked-)?[0-9a-f]{40,64}")
_MAX_NOTE_BYTES = 100_000


class HubFile(NamedTuple):
    """A file of a repository, as the Hub lists it."""

    name: str
    num_bytes: int
    digest: Digest | None


class Use(NamedTuple):
    """When flashdraft fetched a model and when it last used it, in seconds since 1970."""

    name: str
    fetched: float | None  # None: not by us, or not to its end
    used: float | None
    blobs: tuple[str, ...] = ()  # of one file, whose fetch began: no link shows them yet


@dataclass(frozen=True)
class HubFolder:
    """The folder of one repository; it need not be there."""

    repository: str

    @property
    def root(self) -> Path:
        """The cache that it is in."""
        return Path(constants.HF_HUB_CACHE).expanduser()

    @property
    def path(self) -> Path:
        """The folder itself."""
        return self.root / (_PREFIX + self.repository.replace("/", "--"))

    @property
    def lock(self) -> Path:
        """Held by whoever of us fetches or removes it."""
        return self.locks / "flashdraft.lock"

    @property
    def locks(self) -> Path:
        """Where the client has a lock for each file that it fetches."""
        return self.root / ".locks" / self.path.name

    def find(self, file: str = "") -> Path | None:
        """The snapshot, or one file of it, where all of it is there."""
        folder = self._snapshot()
        if folder is None:
            return None
        if file:
            parts = [folder / name for name in part_names(file)]
            return parts[0] if all(one.is_file() for one in parts) else None
        weights = local_weights(folder)
        is_whole = bool(weights) and (folder / "config.json").is_file()
        return folder if is_whole and all(one.is_file() for one in weights) else None

    def _snapshot(self) -> Path | None:
        with suppress(OSError, UnicodeDecodeError):
            commit = (self.path / "refs" / constants.DEFAULT_REVISION).read_text().strip()
            if _COMMIT.fullmatch(commit):
                folder = self.path / "snapshots" / commit
                return folder if folder.is_dir() else None
        return None

    def blob(self, commit: str, file: HubFile) -> Path:
        """Where a file's content is kept."""
        if file.digest is not None:
            return self.path / "blobs" / file.digest.value
        place = hashlib.sha1(f"{commit}/{file.name}".encode(), usedforsecurity=False)
        return self.path / "blobs" / f"unchecked-{place.hexdigest()}"

    def part(self, commit: str, file: HubFile) -> Path:
        """Where it is until it is whole."""
        blob = self.blob(commit, file)
        return blob.with_name(blob.name + _PART)

    def has(self, commit: str, file: HubFile) -> bool:
        """Whether a file is there, in its full size."""
        blob = self.blob(commit, file)
        is_kept = blob.is_file() and blob.stat().st_size == file.num_bytes
        return is_kept or self.is_linked(commit, file)

    def place(self, commit: str, file: HubFile) -> Path:
        """Where the snapshot shows it."""
        return self.path / "snapshots" / commit / file.name

    def is_linked(self, commit: str, file: HubFile) -> bool:
        """Whether the snapshot shows it, in its full size."""
        link = self.place(commit, file)
        return link.is_file() and link.stat().st_size == file.num_bytes

    def num_here(self, commit: str, file: HubFile) -> int:
        """How many bytes of it are there."""
        if self.has(commit, file):
            return file.num_bytes
        with suppress(OSError):
            return min(self.part(commit, file).stat().st_size, file.num_bytes)
        return 0

    def keep(self, commit: str, file: HubFile) -> None:
        """Give a part that is whole its name."""
        put_in_place(self.part(commit, file), self.blob(commit, file))

    def link(self, commit: str, file: HubFile) -> None:
        """Have the snapshot show a file whose content is there."""
        if self.is_linked(commit, file):
            return
        link = self.place(commit, file)
        link.parent.mkdir(parents=True, exist_ok=True)
        made = link.with_name(f".{link.name}.{os.getpid()}.link")  # the lock keeps others out
        made.unlink(missing_ok=True)
        made.symlink_to(os.path.relpath(self.blob(commit, file), link.parent))
        put_in_place(made, link)

    def shows(self, commit: str, files: Collection[HubFile]) -> bool:
        """Whether a commit is the one that is found, with all these files."""
        is_found = self._snapshot() == self.path / "snapshots" / commit
        return is_found and all(self.is_linked(commit, file) for file in files)

    def show(self, commit: str, files: Collection[HubFile]) -> None:
        """Make a commit, whose files are all there, the one that is found."""
        for file in files:
            self.link(commit, file)
        ref = self.path / "refs" / constants.DEFAULT_REVISION
        ref.parent.mkdir(parents=True, exist_ok=True)
        write_whole(ref, commit)

    def num_bytes(self, name: str, file: str = "") -> int:
        """What it takes on the disk; links count for nothing."""
        if file:
            return sum(path.stat().st_size for path in self.contents(name, file))
        return sum(
            path.lstat().st_size
            for path in self.path.rglob("*")
            if path.is_file() and not path.is_symlink()
        )

    def contents(self, name: str, file: str) -> set[Path]:
        """What one file's links show and what its fetches began, as far as it lies in here."""
        blobs = (self.path / "blobs").resolve()
        begun = (blob for use in self.uses() if use.name == name for blob in use.blobs)
        found = {path.resolve() for path in self.links(file)}
        found.update(path for blob in begun for path in blobs.glob(f"{blob}*"))  # and parts of it
        return {path for path in found if path.parent == blobs and path.is_file()}

    def links(self, file: str = "") -> list[Path]:
        """A file in every snapshot, with its other parts, or all files."""
        snapshots = sorted((self.path / "snapshots").glob("*"))
        if file:
            names = part_names(file)
            return [one / name for one in snapshots for name in names if (one / name).is_symlink()]
        return [path for one in snapshots for path in one.rglob("*") if not path.is_dir()]

    def has_content(self) -> bool:
        """Whether anything of it came, whole or not."""
        return any((self.path / "blobs").glob("*"))

    def remove(self, name: str, file: str = "") -> int:
        """Remove it all, or one file where other things are there too; what was freed, in bytes."""
        if not self.path.is_dir():  # it went with the last of its files
            return 0
        freed = self._remove_file(name, file) if file else self.num_bytes(name)
        if not file or not self._is_needed():
            with suppress(OSError):
                (self.path / "refs" / constants.DEFAULT_REVISION).unlink()  # no one finds half
            shutil.rmtree(self.path)
        return freed

    def _remove_file(self, name: str, file: str) -> int:
        """Remove one file, but no content that others show too."""
        links = self.links(file)
        needed = {path.resolve() for path in self.links() if path not in links}
        for use in self.uses():
            if use.name != name and ":" in use.name:
                needed |= self.contents(use.name, use.name.partition(":")[2])
        contents = self.contents(name, file) - needed
        freed = sum(path.stat().st_size for path in contents)
        for path in [*links, *contents]:
            path.unlink()
        self.forget_use(name)
        return freed

    def _is_needed(self) -> bool:
        """Whether anything is in it."""
        return bool(self.links() or self.uses()) or self.has_content()

    # -- what flashdraft used ------------------------------------------------------------------

    def uses(self) -> list[Use]:
        """What is noted."""
        try:
            note = self.path / _NOTE
            if note.stat().st_size > _MAX_NOTE_BYTES:
                return []
            content = json.loads(note.read_text(encoding="utf-8"))
            return [
                Use(
                    name,
                    _time(times.get("fetched")),
                    _time(times.get("used")),
                    _blobs(times.get("blobs")),
                )
                for name, times in content["models"].items()
                if name.partition(":")[0] == self.repository
                and ".." not in Path(name.partition(":")[2]).parts
                and ":/" not in name
            ]
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return []

    def note_use(
        self, name: str, is_fetched: bool = False, is_used: bool = True, begun: Iterable[str] = ()
    ) -> None:
        """Note that a model of this repository is used, is fetched whole, or which blobs begin."""
        now = time.time()
        uses = {use.name: use for use in self.uses()}
        old = uses.get(name, Use(name, None, None))
        blobs = tuple(dict.fromkeys([*old.blobs, *begun]))
        if is_fetched:  # what an earlier version's fetch left stays noted
            blobs = tuple(blob for blob in blobs if (self.path / "blobs" / (blob + _PART)).exists())
        fetched, used = now if is_fetched else old.fetched, now if is_used else old.used
        uses[name] = Use(name, fetched, used, blobs)
        self._write_uses(uses.values())

    def forget_use(self, name: str) -> None:
        """Take a model out of the note."""
        self._write_uses([use for use in self.uses() if use.name != name])

    def _write_uses(self, uses: Collection[Use]) -> None:
        models = {
            use.name: {"fetched": use.fetched, "used": use.used}
            | ({"blobs": use.blobs} if use.blobs else {})
            for use in uses
        }
        with suppress(OSError):  # a cache that cannot be written is used all the same
            write_whole(self.path / _NOTE, json.dumps({"models": models}) + "\n")


def hub_folders() -> Iterator[HubFolder]:
    """The models' folders in the cache that flashdraft has used."""
    for note in sorted(Path(constants.HF_HUB_CACHE).expanduser().glob(f"{_PREFIX}*/{_NOTE}")):
        owner, _, name = note.parent.name.removeprefix(_PREFIX).partition("--")
        yield HubFolder(f"{owner}/{name}" if name else owner)


def is_commit(text: object) -> bool:
    """Whether this is the name of a commit."""
    return isinstance(text, str) and _COMMIT.fullmatch(text) is not None


def settings_files(names: Collection[str]) -> list[str]:
    """Of a repository's files those that a model needs beside its weights."""
    return [
        name
        for name in names
        if "/" not in name
        and not name.endswith(_WEIGHTS)
        and any(fnmatch.fnmatch(name, pattern) for pattern in FILES)
    ]


def weight_files(names: Collection[str], index: str | None) -> list[str]:
    """Of a folder's files those that hold the weights, by the index's text where there is one."""
    if index is not None:
        return sorted(set(re.findall(r'"([^"/\\]+\.safetensors)"', index)))
    if SINGLE_NAME in names:
        return [SINGLE_NAME]
    return sorted(name for name in names if name.endswith(_WEIGHTS) and "/" not in name)


def local_weights(folder: Path) -> list[Path]:
    """The files of a snapshot's weights, whether they are there or not."""
    index, text = folder / INDEX_NAME, None
    if index.is_file():
        text = index.read_text(encoding="utf-8", errors="replace")
    return [folder / name for name in weight_files([p.name for p in folder.iterdir()], text)]


def _time(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _blobs(value: object) -> tuple[str, ...]:
    """Names of blobs, as a note has them; nothing that leads elsewhere."""
    names = value if isinstance(value, list) else []
    return tuple(name for name in names if isinstance(name, str) and _BLOB.fullmatch(name))
