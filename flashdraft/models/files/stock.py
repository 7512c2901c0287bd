"""What of our models is on this machine, and how it is removed: by name, never by path.

Ours are packaged models and exports in FLASHDRAFT_HOME, and of the Hub's cache what flashdraft
fetched or used, or knows by name; what others keep there is left alone. It fetches nothing.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from flashdraft.errors import FlashdraftError, RequestError, did_you_mean, printable, quoted
from flashdraft.models.files import digests, locks
from flashdraft.models.files.hub_cache import HubFolder, Use, hub_folders
from flashdraft.models.files.packaged import PackagedModel, cache_folder

PACKAGE, HUB, EXPORT = "package", "hub", "export"
_LISTED = "`flashdraft list` has the names"


@dataclass(frozen=True)
class CachedModel:
    """A row of `flashdraft list`. Times are seconds since 1970."""

    name: str
    source: str  # "package", "hub" or "export"
    path: Path  # its folder or file
    num_bytes: int
    is_whole: bool  # False: a fetch waits to be continued
    fetched: float | None = None
    used: float | None = None


def cached_models(packaged: Mapping[str, PackagedModel], known: Iterable[str]) -> list[CachedModel]:
    """All of them, sorted by kind and name; `known` are Hub ids that count whoever fetched them."""
    return [*_packaged(packaged), *_of_hub(known), *_exported()]


def _packaged(packaged: Mapping[str, PackagedModel]) -> Iterator[CachedModel]:
    for name, model in packaged.items():
        with suppress(OSError):
            state = model.path.stat()
            is_whole = state.st_size == model.num_bytes
            yield CachedModel(
                name, PACKAGE, model.path, state.st_size, is_whole, fetched=state.st_mtime
            )


def _of_hub(known: Iterable[str]) -> Iterator[CachedModel]:
    uses = {use.name: use for folder in hub_folders() for use in folder.uses()}
    for name in sorted({*uses, *known}):
        use = uses.get(name, Use(name, None, None))
        repository, _, file = name.partition(":")
        folder = HubFolder(repository)
        with suppress(OSError):
            is_whole = folder.find(file) is not None
            if is_whole or (name in uses and folder.has_content()):
                size = folder.num_bytes(name, file)
                yield CachedModel(name, HUB, folder.path, size, is_whole, use.fetched, use.used)


def _exported() -> Iterator[CachedModel]:
    for folder in sorted((cache_folder() / "exported").glob("*-float32")):
        with suppress(OSError):
            files = [path for path in folder.iterdir() if path.is_file()]
            size = sum(path.lstat().st_size for path in files)
            is_whole = (folder / "exported_from.json").is_file()
            made = folder.stat().st_mtime
            yield CachedModel(folder.name, EXPORT, folder, size, is_whole, fetched=made)


# -- removal -----------------------------------------------------------------------------------


def find_cached(name: str, models: Iterable[CachedModel]) -> CachedModel:
    """The model of this very name; RequestError says why there is none."""
    named = {model.name: model for model in models}
    if name in named:
        return named[name]
    if any(sign in name for sign in "*?[]{}"):
        raise RequestError(
            f"{quoted(name)} is a pattern; one whole name at a time is removed, nothing was. "
            f"{_LISTED}."
        )
    is_path = name.startswith(("/", ".", "~")) or "\\" in name or ".." in Path(name).parts
    if is_path or name.count("/") > 1 or not name.strip():
        raise RequestError(
            f"{quoted(name)} is no model's name; models of our cache are removed by name, and "
            f"nothing by its path. {_LISTED}."
        )
    files = [one for one in named if one.startswith(f"{name}:")]
    if files:
        raise RequestError(
            f"Of {quoted(name)} single files are here, which are removed by their names: "
            f"{', '.join(map(printable, files))}. {_LISTED}."
        )
    folder = HubFolder(name.partition(":")[0])
    if "/" in name and folder.path.is_dir():
        raise RequestError(
            f"{quoted(name)} is in the Hub's cache, but flashdraft neither fetched nor used it; "
            "whatever fetched it may need it. `hf cache rm` removes it."
        )
    raise RequestError(
        f"There is no {quoted(name)} in the cache; {_LISTED}.{did_you_mean(name, named)}"
    )


def remove_cached(
    models: Iterable[CachedModel], packaged: Mapping[str, PackagedModel]
) -> list[tuple[str, int]]:
    """Remove models, all of them or, where one is a link or is being fetched, none.

    What was removed, files before the repositories that they are of, with the bytes freed.
    """
    chosen = sorted(dict.fromkeys(models), key=lambda model: ":" not in model.name)
    for model in chosen:
        if model.path.is_symlink():
            raise RequestError(
                f"{model.name} is a link, {model.path}, to {model.path.resolve()}, which is no "
                "place of ours; nothing was removed. Remove the link by hand if it is yours."
            )
    removed: list[tuple[str, int]] = []
    with ExitStack() as stack:
        ours: set[Path] = set()
        for model in chosen:
            with _in_words(model, removed):
                _hold(model, packaged, ours, stack)
        for model in chosen:
            with _in_words(model, removed):
                removed.append((model.name, _remove(model)))
    return removed


def _hold(
    model: CachedModel, packaged: Mapping[str, PackagedModel], ours: set[Path], stack: ExitStack
) -> None:
    """Take the lock of a model, unless it is among ours; RequestError if another process has it."""
    if model.source == EXPORT:
        return
    lock, others = _lock(model, packaged), []
    if model.source == HUB:  # the client has a lock for each file
        others = [path for path in lock.parent.glob("*.lock") if path != lock]
    is_free = lock in ours or stack.enter_context(locks.held_if_free(lock))
    if not is_free or any(map(locks.is_held, others)):
        raise RequestError(
            f"{model.name} is being fetched by another process; nothing was removed. Wait until it "
            "has ended, or end it first."
        )
    ours.add(lock)


def _lock(model: CachedModel, packaged: Mapping[str, PackagedModel]) -> Path:
    if model.source == PACKAGE:
        return packaged[model.name].lock
    return HubFolder(model.name.partition(":")[0]).lock


def _remove(model: CachedModel) -> int:
    """Remove a model that nobody else is at; what was freed, in bytes."""
    if model.source == HUB:
        repository, _, file = model.name.partition(":")
        return HubFolder(repository).remove(model.name, file)
    if model.source == PACKAGE:
        digests.forget(model.path)
        model.path.unlink()
    else:
        shutil.rmtree(model.path)
    return model.num_bytes


@contextmanager
def _in_words(model: CachedModel, removed: Iterable[tuple[str, int]]) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        before = ", ".join(name for name, _ in removed)
        raise FlashdraftError(
            f"{model.name} cannot be removed from {model.path}: {error.strerror or error}. See to "
            "whom its files belong." + (f" Removed before it: {before}." if before else "")
        ) from None
