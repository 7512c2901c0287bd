"""`flashdraft doctor --verify-files`: whether a pair's files are what was published. Loads nothing.

Files that were fetched from the Hub, and packaged ones, have a known digest and are read whole. Of
others only the headers can be judged; their digests are told, to be compared by hand. No network
is needed for what is on this machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from flashdraft.bench.doctor.report import OK, PROBLEM, WARNING, FileCheck, Finding, Report
from flashdraft.bench.doctor.settings import Settings
from flashdraft.errors import CheckpointError, FlashdraftError, printable
from flashdraft.models.drafter.opening import read_drafter_config
from flashdraft.models.files import digests, hub_cache
from flashdraft.models.files.safetensors import open_safetensors
from flashdraft.models.files.split import part_names
from flashdraft.models.loading import open_checkpoint
from flashdraft.models.sources import default_drafter, packaged_model, resolve_source

_AREA = "files"
_MB = 10**6


@dataclass(frozen=True)
class _Model:
    """One of the pair, on this machine."""

    role: str  # "target" or "drafter"
    name: str  # as the user has it
    path: Path
    packaged_sha256: str | None = None

    @property
    def files(self) -> list[Path]:
        """What is read of it: the kinds of files that a model is fetched with."""
        if not self.path.is_dir():
            return [self.path.with_name(name) for name in part_names(self.path.name)]
        found = {path for pattern in hub_cache.FILES for path in self.path.glob(pattern)}
        return sorted(path for path in found if path.is_file())


def verify_files(settings: Settings, on_progress: Callable[[str], None]) -> Report:
    """Read every file of the pair and compare it with what it should be."""
    begin = time.monotonic()
    report = Report(settings, files=[])
    assert report.files is not None
    for model in _models(settings):
        if model.role == "drafter":
            report.drafter = model.name
        checks = []
        for path in model.files:
            on_progress(f"reading {printable(path.name)}")
            checks.append(_check(model, path))
        report.files += checks
        report.findings += _judge(model, checks)
    report.seconds = time.monotonic() - begin
    return report


def _models(settings: Settings) -> Iterator[_Model]:
    packaged = packaged_model(settings.model)
    # what is there is taken as it is: to resolve its name would fetch a damaged one anew
    is_there = packaged is not None and packaged.path.is_file()
    path = packaged.path if packaged and is_there else resolve_source(settings.model).path
    yield _Model("target", settings.model, path, packaged.sha256 if packaged else None)
    drafter = default_drafter(settings.model) if settings.draft == "auto" else settings.draft
    if drafter is not None and drafter not in ("none", "ngram"):
        yield _Model("drafter", drafter, resolve_source(drafter).path)


def _check(model: _Model, path: Path) -> FileCheck:
    expected = digests.published_digest(path)
    if model.packaged_sha256 is not None:
        expected = digests.Digest(digests.SHA256, model.packaged_sha256)
    try:
        found = digests.read_digest(path, digests.SHA256 if expected is None else expected.kind)
        size = path.stat().st_size
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}.") from None
    is_sound = None if expected is None else found == expected
    if model.packaged_sha256 is not None and not is_sound:
        digests.forget(path)  # that it was sound once counts no more: its next use fetches it
    name = printable(path.name)
    return FileCheck(model.role, name, size, str(found), expected and str(expected), is_sound)


def _judge(model: _Model, checks: list[FileCheck]) -> Iterator[Finding]:
    """What was found, in words: the damaged ones, the sound ones, and those nobody knows."""
    for path, check in zip(model.files, checks, strict=True):
        if check.is_sound is False:
            text = f"{check.file} is damaged: it has {check.digest}, published was {check.expected}"
            yield Finding(_AREA, PROBLEM, f"{model.role}: {text}", _remedy(model, path))
    sound = [check for check in checks if check.is_sound]
    if sound:
        size = sum(check.num_bytes for check in sound) / _MB
        files = "1 file" if len(sound) == 1 else f"{len(sound)} files"
        yield Finding(_AREA, OK, f"{model.role}: {files}, {size:,.1f} MB, are as published")
    for check in checks:
        if check.is_sound is None:
            text = f"{check.file}: no digest is known to compare with; it has {check.digest}"
            yield Finding(_AREA, OK, f"{model.role}: {text}")
    yield _judge_headers(model)


def _judge_headers(model: _Model) -> Finding:
    """Whether headers, sizes and offsets agree: a file that was cut short does not pass."""
    try:
        if model.role == "drafter":
            read_drafter_config(model.path)
            count = len(list(open_safetensors(model.path).names()))
        else:
            count = len(list(open_checkpoint(model.path).source.names()))
    except CheckpointError as error:
        return Finding(_AREA, PROBLEM, f"{model.role}: {error}", "fetch it again")
    except FlashdraftError as error:
        return Finding(_AREA, WARNING, f"{model.role}: its headers cannot be judged: {error}")
    return Finding(_AREA, OK, f"{model.role}: headers and sizes agree, {count} tensors")


def _remedy(model: _Model, path: Path) -> str:
    if model.packaged_sha256 is not None:
        return "it is fetched anew at its next use, by `flashdraft generate` say"
    target = path.resolve()
    if target.parent.name == "blobs":
        return f"delete {target}: it is fetched anew at its next use"
    return "fetch it again, into another folder"
