"""The guarded reader: what stands in a file's place, JSON in bad faith, and words for it all."""

from __future__ import annotations

import json
import os
import socket
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from flashdraft.errors import (
    CapacityError,
    CheckpointError,
    FlashdraftError,
    printable,
    quoted,
)
from flashdraft.llm import LLM
from flashdraft.models.drafter.loading import load_drafter
from flashdraft.models.files.opening import (
    MAX_JSON_BYTES,
    MAX_JSON_DEPTH,
    open_model_file,
    read_json,
    reading,
)
from flashdraft.models.gguf.file import GGUFFile
from flashdraft.models.loading import open_checkpoint
from flashdraft.models.weights import GuardedTensors, Weights
from tests.tiny import make_tiny_checkpoint, make_tiny_drafter
from tests.zoo import Tensors

POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'4d7a' * 16}\nsize 98362432\n"


def put_pipe(path: Path) -> None:
    os.mkfifo(path)


def put_folder(path: Path) -> None:
    path.mkdir()


def put_endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def put_unreadable(path: Path) -> None:
    path.symlink_to("/proc/self/mem")  # a regular file whose first page is not there


def put_loop(path: Path) -> None:
    path.symlink_to(path.name)


def put_dangling(path: Path) -> None:
    path.symlink_to("nowhere")


def put_socket(path: Path) -> None:
    place = os.getcwd()
    os.chdir(path.parent)  # a socket's name is short
    try:
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(path.name)
    finally:
        os.chdir(place)


STAND_INS = [
    (put_pipe, "is a pipe; it must be a file"),
    (put_folder, "is a folder; it must be a file"),
    (put_endless, "is a device; it must be a file"),
    (put_unreadable, "cannot be read: "),
    (put_loop, "cannot be read: .*symbolic links"),
    (put_dangling, "is a link to 'nowhere', where there is nothing"),
    (put_socket, "cannot be read: "),
]


@pytest.mark.timeout(20)
@pytest.mark.parametrize(("put", "message"), STAND_INS)
@pytest.mark.parametrize(
    "name",
    ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
     "chat_template.jinja", "model.safetensors", "model.safetensors.index.json"],
)  # fmt: skip
def test_what_is_no_file_is_refused_at_once(
    tmp_path: Path, name: str, put: Any, message: str
) -> None:
    folder = make_tiny_checkpoint(tmp_path / "model")
    (folder / name).unlink(missing_ok=True)
    put(folder / name)
    with pytest.raises(CheckpointError, match=rf"{name} {message}"):
        LLM(str(folder), device="cpu")


@pytest.mark.timeout(20)
@pytest.mark.parametrize(("put", "message"), STAND_INS)
@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_nor_is_it_read_for_a_drafter(tmp_path: Path, name: str, put: Any, message: str) -> None:
    folder = make_tiny_drafter(tmp_path)
    (folder / name).unlink()
    put(folder / name)
    with pytest.raises(CheckpointError, match=rf"{name} {message}"):
        load_drafter(folder, None)


@pytest.mark.timeout(20)
@pytest.mark.parametrize(("put", "message"), STAND_INS)
def test_nor_as_a_gguf_file_or_as_a_shard(tmp_path: Path, put: Any, message: str) -> None:
    put(tmp_path / "m.gguf")
    with pytest.raises(CheckpointError, match=rf"m\.gguf {message}"):
        GGUFFile(tmp_path / "m.gguf")
    folder = make_tiny_checkpoint(tmp_path / "model")
    index = {"weight_map": {"a": "shard.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    put(folder / "shard.safetensors")
    with pytest.raises(CheckpointError, match=rf"shard\.safetensors {message}"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "model.safetensors", "generation_config.json"]
)
def test_a_pointer_of_git_lfs_is_called_one(tmp_path: Path, name: str) -> None:
    folder = make_tiny_checkpoint(tmp_path)
    (folder / name).write_text(POINTER)
    with pytest.raises(CheckpointError, match=rf"{name} is a Git LFS pointer.*`git lfs pull`"):
        LLM(str(folder), device="cpu")
    (tmp_path / "m.gguf").write_text(POINTER)
    with pytest.raises(CheckpointError, match=r"m\.gguf is a Git LFS pointer"):
        open_checkpoint(tmp_path / "m.gguf")


def test_a_file_may_be_too_large(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path)
    os.truncate(folder / "config.json", MAX_JSON_BYTES + 1)  # a hole takes no room
    with pytest.raises(CheckpointError, match=rf"config\.json has {MAX_JSON_BYTES + 1} bytes"):
        open_checkpoint(folder)
    os.truncate(folder / "config.json", 10)
    os.truncate(folder / "tokenizer.json", 2**40)
    with pytest.raises(CheckpointError, match=rf"tokenizer\.json has {2**40} bytes"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b'{"a": ' + b"[" * 10**6 + b"]" * 10**6 + b"}", f"deeper than {MAX_JSON_DEPTH}"),
        (b'{"a": ' + b"[" * 200 + b"]" * 200 + b"}", f"deeper than {MAX_JSON_DEPTH}"),
        (b'{"a": ' * 500 + b"0" + b"}" * 500, f"deeper than {MAX_JSON_DEPTH}"),
        (b'{"a": ' + b"1" * 5000 + b"}", "a number of 5000 digits"),
        (b'{"a": -1e999}', "the number '-1e999' is too large"),
        (b'{"a": 1, "a": 2}', "says 'a' twice"),
        (b'{"a": "\xff"}', "byte 7 is not UTF-8"),
        (b"\xff\xfe{\0}\0", "byte 0 is not UTF-8"),
        (b'{"a": [' + b"0," * 4_000_000 + b"0]}", "it holds about 400000. values"),
        (b'{"a": 1', "Expecting"),
        (b"", "Expecting value"),
    ],
)
def test_json_in_bad_faith(tmp_path: Path, text: bytes, message: str) -> None:
    (tmp_path / "config.json").write_bytes(text)
    with pytest.raises(CheckpointError, match=rf"config\.json is not valid JSON: .*{message}"):
        read_json(tmp_path / "config.json")


def test_json_as_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    nested: Any = 0
    for _ in range(MAX_JSON_DEPTH - 1):
        nested = [nested]
    content = {"a": nested, "model_max_length": 10**30, "limit": [0.0, float("inf")], "é": "ü"}
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(content, ensure_ascii=False).encode())
    assert read_json(path) == content


def test_opening_leaves_nothing_open(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    before = len(os.listdir("/proc/self/fd"))
    for path in (tmp_path / "pipe", tmp_path):
        with pytest.raises(CheckpointError):
            open_model_file(path)
    assert len(os.listdir("/proc/self/fd")) == before
    (tmp_path / "file").write_bytes(b"x")
    with open_model_file(tmp_path / "file") as stream:
        assert not os.get_inheritable(stream.fileno())


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (RecursionError(), CheckpointError, "M cannot be read: it is nested too deeply"),
        (OverflowError("too large"), CheckpointError, "M is not valid: too large"),
        (UnicodeDecodeError("utf-8", b"x", 0, 1, "bad"), CheckpointError, "is not valid: 'utf-8'"),
        (struct.error("short"), CheckpointError, "M cannot be read: short"),
        (KeyError("hidden_size"), CheckpointError, "M lacks the key 'hidden_size'"),
        (OSError(5, "Input/output error"), CheckpointError, "M cannot be read: Input/output error"),
        (OSError(12, "Cannot allocate memory"), CapacityError, "M asks for memory that is not"),
        (MemoryError(), CapacityError, "M asks for memory that is not there"),
        (RuntimeError("a\x1b[0m" + "b" * 999), CheckpointError, r"read: a\\x1b\[0mb+…\.$"),
        (
            RuntimeError("not enough memory: you tried to allocate 4000000000000 bytes."),
            CapacityError,
            r"M asks for memory of 4000\.0 GB that is not there",
        ),
    ],
)  # fmt: skip
def test_whatever_goes_wrong_has_words(
    error: Exception, kind: type[FlashdraftError], message: str
) -> None:
    with pytest.raises(kind, match=message) as found, reading("M"):
        raise error
    assert found.value.__cause__ is error


@pytest.mark.parametrize("error", [CheckpointError("ours"), AssertionError(), KeyboardInterrupt()])
def test_ours_and_our_mistakes_pass(error: BaseException) -> None:
    with pytest.raises(type(error)) as found, reading("M"):
        raise error
    assert found.value is error


class Greedy(Tensors):
    """A source whose tensors cannot be had."""

    def read(self, name: str) -> torch.Tensor:
        return torch.empty(2**50)  # as a checkpoint of that size would


def test_a_tensor_that_asks_for_too_much_is_named(tmp_path: Path) -> None:
    source = GuardedTensors(Greedy({"a.weight": torch.zeros(2, 3)}), tmp_path)
    message = r"tensor 'a\.weight' of shape \[2, 3\] asks for memory of 4503599\.6 GB"
    with pytest.raises(CapacityError, match=message):
        Weights(source).take("a.weight", (2, 3))


HOSTILE = "model.\x1b[31m\x07\u202e\n\ud800.weight"


def test_names_are_escaped_and_cut() -> None:
    assert quoted("a\x1b\u202e\n") == r"'a\x1b\u202e\n'"
    assert len(quoted("x" * 10**6)) < 200 and quoted("x" * 10**6).endswith("…")
    assert printable("a\nb\x1b[0m é") == "a\nb\\x1b[0m é"
    assert str(FlashdraftError("a \x9b b")) == "a \\x9b b"


def test_a_tensors_name_reaches_no_terminal_as_it_is(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path)
    name = HOSTILE.replace("\ud800", "")
    save_file({name: torch.zeros(1), "model.norm.weight": torch.zeros(1)}, tmp_path / "x")
    os.replace(tmp_path / "x", folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"\\x1b\[31m\\x07\\u202e\\n") as found:
        LLM(str(folder), device="cpu")
    assert str(found.value).isprintable()
    (folder / "config.json").write_text(json.dumps({"model_type": HOSTILE}))
    with pytest.raises(FlashdraftError) as found:
        LLM(str(folder), device="cpu")
    assert str(found.value).isprintable()
