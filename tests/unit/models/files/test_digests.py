"""Digests: a damaged file is noticed, a checked one is read once, and notes are not trusted."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from flashdraft.models.files import digests
from flashdraft.models.files.digests import Digest, is_sound, published_digest, read_digest

CONTENT = bytes(range(256)) * 10
SHA256 = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "m.gguf"
    path.write_bytes(CONTENT)
    return path


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that were read for their digests."""
    found: list[Path] = []

    def note(path: Path, kind: str = digests.SHA256) -> Digest:
        found.append(path)
        return read_digest(path, kind)

    monkeypatch.setattr(digests, "read_digest", note)
    return found


def note_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.checked.json")


def check(path: Path) -> bool:
    return is_sound(path, SHA256, len(CONTENT))


def test_a_sound_file_is_read_once(file: Path, reads: list[Path]) -> None:
    assert check(file) and check(file) and check(file)
    assert reads == [file]


def test_another_size_is_not_read(file: Path, reads: list[Path]) -> None:
    file.write_bytes(CONTENT[1:])
    assert not check(file) and not check(file.with_name("absent")) and reads == []
    file.unlink()
    file.mkdir()
    assert not check(file) and reads == []


def test_a_flipped_bit_is_found_whatever_was_noted(file: Path, reads: list[Path]) -> None:
    assert check(file)
    state = file.stat()
    file.write_bytes(CONTENT[:-1] + b"\x00")
    os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns + 1))
    assert not check(file) and not check(file) and len(reads) == 3


@pytest.mark.parametrize("change", ["time", "inode", "digest"])
def test_each_part_of_the_identity_counts(file: Path, reads: list[Path], change: str) -> None:
    assert check(file)
    if change == "time":
        os.utime(file, ns=(1, 1))
    elif change == "inode":
        state = file.stat()
        file.rename(file.with_name("old"))  # keeps its inode from being given out again
        file.write_bytes(CONTENT)
        os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns))
    else:
        assert not is_sound(file, "0" * 64, len(CONTENT))
        assert reads == [file, file]
        return
    assert check(file) and reads == [file, file]


def fifo(path: Path) -> None:
    os.mkfifo(path)


HOSTILE: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.write_text(""),
    "damaged": lambda path: path.write_text('{"sha256": "'),
    "deep": lambda path: path.write_text("[" * 100_000),
    "huge": lambda path: path.write_text("0" * 10_000_000),
    "other": lambda path: path.write_text('{"sha256": true, "bytes": 1e999}'),
    "binary": lambda path: path.write_bytes(b"\xff\xfe\x00"),
    "folder": lambda path: path.mkdir(),
    "pipe": fifo,
    "endless": lambda path: path.symlink_to("/dev/zero"),
    "dangling": lambda path: path.symlink_to("nowhere"),
    "loop": lambda path: path.symlink_to(path),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_note_that_is_none_counts_for_nothing(file: Path, reads: list[Path], kind: str) -> None:
    HOSTILE[kind](note_of(file))
    assert check(file) and reads == [file]
    file.write_bytes(CONTENT[:-1] + b"\x00")
    assert not check(file)


def test_a_cache_that_cannot_be_written_is_read_each_time(
    file: Path, reads: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, text: str) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(digests, "write_whole", refuse)
    assert check(file) and check(file) and reads == [file, file]
    digests.remember_sound(file, SHA256)
    digests.remember_sound(file.with_name("absent"), SHA256)


def test_forgotten_and_remembered(file: Path, reads: list[Path]) -> None:
    digests.remember_sound(file, SHA256)
    assert check(file) and reads == []
    digests.forget(file)
    digests.forget(file)
    assert check(file) and reads == [file]


def test_digests_of_the_hubs_cache_and_of_its_local_folders(tmp_path: Path) -> None:
    text = tmp_path / "config.json"
    text.write_bytes(b"hello\n")
    git = "ce013625030ba8dba906f756967f9e9ca394464a"  # what `git hash-object` says
    assert read_digest(text, digests.GIT) == Digest("git", git)
    assert published_digest(text) is None
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for name in (git, SHA256, "not-a-digest"):
        (blobs / name).write_bytes(b"")
        (snapshot / name[:4]).symlink_to(Path("../../blobs") / name)
    assert published_digest(snapshot / git[:4]) == Digest("git", git)
    assert published_digest(snapshot / SHA256[:4]) == Digest("sha256", SHA256)
    assert published_digest(snapshot / "not-") is None
    notes = tmp_path / ".cache" / "huggingface" / "download"
    notes.mkdir(parents=True)
    (notes / "config.json.metadata").write_text(f"commit\n{git}\n17.5\n")
    assert published_digest(text) == Digest("git", git)
    (notes / "config.json.metadata").write_text("commit")
    assert published_digest(text) is None
