"""The one way a checkpoint's files are opened, and the one place where what goes wrong gets words.

A checkpoint is not trusted: its files may be devices, endless, nested without end or made to fail
in a library. Files here are regular ones within a size; JSON is UTF-8 within a depth and a number
of values; and inside `reading` every error becomes one of ours. It knows no model and no format.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import re
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from safetensors import SafetensorError

from flashdraft.errors import CapacityError, CheckpointError, FlashdraftError, quoted, shortened
from flashdraft.models.config.values import InvalidConfigError

MiB = 2**20
MAX_JSON_BYTES = 64 * MiB  # the largest published index has 15
MAX_JSON_VALUES = 4_000_000  # the largest published tokenizer has half of that
MAX_JSON_DEPTH = 64
_MAX_DIGITS = 40  # transformers writes 10^30 for "no limit"
# beside weights, what is read of a folder, and how large it may be
_FILE_BYTES = {
    "config.json": MAX_JSON_BYTES,
    "generation_config.json": MAX_JSON_BYTES,
    "model.safetensors.index.json": MAX_JSON_BYTES,
    "tokenizer_config.json": MAX_JSON_BYTES,
    "special_tokens_map.json": MAX_JSON_BYTES,
    "chat_template.json": MAX_JSON_BYTES,
    "chat_template.jinja": 16 * MiB,
    "tokenizer.json": 256 * MiB,  # the largest published one has 34
}
_POINTER = b"version https://git-lfs.github.com/spec/"
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


@contextmanager
def reading(what: object) -> Iterator[None]:
    """Turn whatever goes wrong inside, while `what` is read, into an error of ours.

    An AssertionError is our own mistake and passes, and so does what is no error (Ctrl-C).
    """
    try:
        yield
    except InvalidConfigError as error:
        raise CheckpointError(f"{what} is not valid: {error.reason}") from error
    except FlashdraftError:
        raise
    except MemoryError as error:
        raise _no_room(what, error) from error
    except RecursionError as error:
        raise CheckpointError(f"{what} cannot be read: it is nested too deeply.") from error
    except KeyError as error:
        raise CheckpointError(f"{what} lacks the key {shortened(error)}.") from error
    except OSError as error:
        if error.errno == errno.ENOMEM:
            raise _no_room(what, error) from error
        raise CheckpointError(f"{what} cannot be read: {error.strerror or error}.") from error
    except (AttributeError, TypeError, ValueError, ArithmeticError, LookupError) as error:
        raise CheckpointError(f"{what} is not valid: {shortened(error)}.") from error
    except (RuntimeError, SafetensorError, BufferError, struct.error) as error:
        # torch says so in words on a CPU, and by the error's class on a GPU
        if "memory" in str(error) or type(error).__name__ == "OutOfMemoryError":
            raise _no_room(what, error) from error
        raise CheckpointError(f"{what} cannot be read: {shortened(error)}.") from error


def _no_room(what: object, error: BaseException) -> CapacityError:
    asked = re.search(r"allocate (\d+) bytes", str(error))
    size = f" of {int(asked[1]) / 10**9:.1f} GB" if asked else ""
    return CapacityError(
        f"{what} asks for memory{size} that is not there. End other programs or use a smaller "
        "model; if this one is small, its files are damaged: fetch them again."
    )


def open_model_file(path: Path, max_bytes: int | None = None) -> BinaryIO:
    """Open a regular file of at most so many bytes; anything else is a CheckpointError.

    Raises FileNotFoundError as `open` does: what a missing file means is the caller's to say.
    """
    try:
        # without O_NONBLOCK, opening a pipe waits for somebody to write to it
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        if path.is_symlink():
            raise CheckpointError(
                f"{path} is a link to {quoted(os.readlink(path))}, where there is nothing. Fetch "
                "the checkpoint again."
            ) from None
        raise
    except (OSError, ValueError) as error:  # a socket, a loop of links, no permission
        raise CheckpointError(f"{path} cannot be read: {error}.") from None
    try:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):
            kind = _KINDS.get(stat.S_IFMT(found.st_mode), "no regular file")
            raise CheckpointError(f"{path} is {kind}; it must be a file. Fetch it again.")
        if max_bytes is not None and found.st_size > max_bytes:
            raise CheckpointError(
                f"{path} has {found.st_size} bytes; a file of this kind may have {max_bytes}. "
                "Fetch it again."
            )
        if os.pread(handle, len(_POINTER), 0) == _POINTER:
            raise CheckpointError(
                f"{path} is a Git LFS pointer, not the file itself: run `git lfs pull` in its "
                "folder, or download it with `hf download`."
            )
    except OSError as error:
        os.close(handle)
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from None
    except BaseException:
        os.close(handle)
        raise
    return os.fdopen(handle, "rb")


def map_model_file(path: Path) -> mmap.mmap:
    """A regular file in memory: private pages that may be written, the file stays untouched."""
    with open_model_file(path) as stream:
        if os.fstat(stream.fileno()).st_size == 0:
            raise CheckpointError(
                f"{path} is empty: its download was cut short. Fetch it again, or name another "
                "file."
            )
        return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)


def read_model_bytes(path: Path, max_bytes: int = MAX_JSON_BYTES) -> bytes:
    """The content of a regular file. Raises FileNotFoundError as `open` does."""
    with open_model_file(path, max_bytes) as stream:
        content = stream.read(max_bytes + 1)
    if len(content) > max_bytes:  # it grew
        raise CheckpointError(f"{path} has more than the {max_bytes} bytes that it may have.")
    return content


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; a missing or invalid file is a CheckpointError."""
    try:
        content = parse_json(read_model_bytes(path), path)
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent} has no {path.name}: not a model folder.") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}.") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds no JSON object.")
    return content


def parse_json(data: bytes, source: object) -> Any:
    """The value of a JSON document in UTF-8; `source` is for messages."""

    def invalid(reason: str) -> CheckpointError:
        return CheckpointError(f"{source} is not valid JSON: {reason}. Fetch it again.")

    num_values = sum(map(data.count, (b",", b"[", b"{")))
    if num_values > MAX_JSON_VALUES:
        raise invalid(f"it holds about {num_values} values, {MAX_JSON_VALUES} are allowed")

    def whole(digits: str) -> int:
        if len(digits) > _MAX_DIGITS:
            raise invalid(f"it holds a number of {len(digits)} digits")
        return int(digits)

    def real(text: str) -> float:
        value = float(text)
        if abs(value) == float("inf"):
            raise invalid(f"the number {quoted(text)} is too large")
        return value

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise invalid(f"it says {quoted(key)} twice")
            found[key] = value
        return found

    try:
        value = json.loads(
            data.decode("utf-8-sig"), parse_int=whole, parse_float=real, object_pairs_hook=unique
        )
    except UnicodeDecodeError as error:
        raise invalid(f"byte {error.start} is not UTF-8") from None
    except RecursionError:
        raise invalid(f"it is nested deeper than {MAX_JSON_DEPTH} levels") from None
    except ValueError as error:
        raise invalid(str(error)) from None
    if isinstance(value, dict | list) and _is_deeper(value, MAX_JSON_DEPTH):
        raise invalid(f"it is nested deeper than {MAX_JSON_DEPTH} levels")
    return value


def check_model_files(folder: Path) -> None:
    """Refuse a folder where something else stands in the place of a file that is read."""
    for name, max_bytes in _FILE_BYTES.items():
        try:
            open_model_file(folder / name, max_bytes).close()
        except FileNotFoundError:
            continue


def _is_deeper(value: Any, num_levels: int) -> bool:
    """Whether a value is nested deeper, found without a recursion of our own."""
    level = [value]
    for _ in range(num_levels + 1):
        inner = (one.values() if isinstance(one, dict) else one for one in level)
        level = [child for one in inner for child in one if isinstance(child, dict | list)]
        if not level:
            return False
    return True
