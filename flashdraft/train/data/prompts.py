"""Prompts to train on: read from files or the Hub, freed of overlaps and near-duplicates.

Files are .jsonl, .jsonl.gz, .jsonl.zst, .json, .parquet, or a folder of those. A row says
{"prompt": text}, {"turns": [text, …]} (the first is taken), {"messages": […]} (up to the first
answer) or {"instruction": text, "input": text}. Nothing here knows a model or a tokenizer.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib
import io
import json
import random
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from flashdraft.errors import TrainingError

SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".json", ".parquet")
OVERLAP_WORDS = 13  # the usual measure of contamination
SHINGLE_WORDS = 8
MIN_FRAMED, FRAME_SHARE = 10, 0.02  # texts that share 8 words in a row: more make them a frame
NUM_HASHES, ROWS_PER_BAND = 8, 4  # texts that share 9 of 10 shingles are found 9 times of 10
_WORD = re.compile(r"\w+")
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class Prompt:
    """A conversation that ends with the user's turn, and where it came from."""

    messages: tuple[Mapping[str, Any], ...]
    source: str

    @classmethod
    def of(cls, text: str, source: str = "") -> Prompt:
        """A single user turn."""
        return cls(({"role": "user", "content": text},), source)

    @property
    def text(self) -> str:
        """All turns as one text, for comparisons."""
        return "\n".join(str(message.get("content") or "") for message in self.messages)


def read_prompts(
    name: str | Path, limit: int | None = None, seed: int | None = None
) -> list[Prompt]:
    """The prompts of a file, a folder or a Hub data set; `limit` of them, drawn if `seed` is given.

    Every row must be usable: the first one that is not is an error that names its place.
    """
    path = Path(name)
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.name.endswith(SUFFIXES))
        if not files:
            raise TrainingError(f"{path} holds no prompts; expected {', '.join(SUFFIXES)}.")
        prompts = [prompt for file in files for prompt in _read_file(file)]
    elif path.exists():
        prompts = list(_read_file(path))
    elif _HUB_NAME.fullmatch(str(name)):
        prompts = list(_read_hub(str(name)))
    else:
        raise TrainingError(
            f"There is no file or folder {name}, and it is no Hub data set (owner/name) either."
        )
    if not prompts:
        raise TrainingError(f"{name} holds no prompts; give a file with at least one row.")
    if limit is not None and limit < len(prompts):
        if seed is not None:
            chosen = random.Random(seed).sample(range(len(prompts)), limit)
            return [prompts[index] for index in sorted(chosen)]
        return prompts[:limit]
    return prompts


def read_texts(names: Iterable[str | Path]) -> list[str]:
    """The texts of all prompts of several files, as `drop_overlapping` takes them."""
    return [prompt.text for name in names for prompt in read_prompts(name)]


def digest_of(prompts: Iterable[Prompt]) -> str:
    """sha256 of a list of prompts, order included."""
    found = hashlib.sha256()
    for prompt in prompts:
        row = [[dict(message) for message in prompt.messages], prompt.source]
        found.update(json.dumps(row, sort_keys=True).encode())
    return found.hexdigest()


def drop_overlapping(prompts: Sequence[Prompt], forbidden: Iterable[str]) -> list[Prompt]:
    """Only prompts that share no run of 13 words with a forbidden text (a test's, say)."""
    runs = ForbiddenRuns(forbidden)
    return [prompt for prompt in prompts if not runs.overlap(prompt.text)]


class ForbiddenRuns:
    """The 13-word runs of some texts. A text of fewer words forbids what has the same words.

    Words around the content that many of the texts share ("Please reason step by step …") are a
    frame: they are left out before runs are compared, on both sides.
    """

    def __init__(self, forbidden: Iterable[str]) -> None:
        texts = [_word_hashes(text) for text in forbidden]
        self._frames = _common_shingles(texts)
        self._runs, self._whole = set[int](), set[bytes]()
        for words in map(self._without_frame, texts):
            if len(words) < OVERLAP_WORDS:
                self._whole.add(words.tobytes())
            else:
                self._runs.update(_run_hashes(words, OVERLAP_WORDS).tolist())

    def overlap(self, text: str) -> bool:
        """Whether a text holds one of the runs."""
        words = self._without_frame(_word_hashes(text))
        if len(words) < OVERLAP_WORDS:
            return len(words) > 0 and words.tobytes() in self._whole
        return not self._runs.isdisjoint(_run_hashes(words, OVERLAP_WORDS).tolist())

    def _without_frame(self, words: NDArray[np.uint64]) -> NDArray[np.uint64]:
        if len(self._frames) == 0 or len(words) < SHINGLE_WORDS:
            return words
        kept = np.ones(len(words), dtype=bool)
        runs = _run_hashes(words, SHINGLE_WORDS)
        nearest = np.searchsorted(self._frames, runs).clip(max=len(self._frames) - 1)
        for start in np.flatnonzero(self._frames[nearest] == runs):
            kept[start : start + SHINGLE_WORDS] = False
        return words[kept]


def drop_near_duplicates(prompts: Sequence[Prompt]) -> list[Prompt]:
    """The first of every group of nearly equal prompts."""
    known = NearDuplicates()
    return [prompt for prompt in prompts if known.add(prompt.text)]


class NearDuplicates:
    """Remembers texts by MinHash over runs of 8 words; deterministic, constant time a text."""

    def __init__(self) -> None:
        generator = np.random.default_rng(8)
        odd = generator.integers(0, 2**63, NUM_HASHES, dtype=np.uint64) * np.uint64(2)
        self._multipliers = odd + np.uint64(1)
        self._known: set[tuple[int, bytes]] = set()

    def add(self, text: str) -> bool:
        """Remember a text; False if one much like it was known already."""
        words = _word_hashes(text)
        if len(words) == 0:  # no words at all: compare what there is
            words = np.asarray([zlib.crc32(text.encode(errors="surrogatepass"))], dtype=np.uint64)
        shingles = _run_hashes(words, min(SHINGLE_WORDS, len(words)))
        hashes = (shingles[:, None] * self._multipliers) >> np.uint64(16)
        least = hashes.min(axis=0)
        bands = [
            (place, least[place : place + ROWS_PER_BAND].tobytes())
            for place in range(0, NUM_HASHES, ROWS_PER_BAND)
        ]
        if any(band in self._known for band in bands):
            return False
        self._known.update(bands)
        return True


def _common_shingles(texts: Sequence[NDArray[np.uint64]]) -> NDArray[np.uint64]:
    """The 8-word runs that many of the texts have."""
    own = [
        np.unique(_run_hashes(words, SHINGLE_WORDS))
        for words in texts
        if len(words) >= SHINGLE_WORDS
    ]
    if not own:
        return np.zeros(0, dtype=np.uint64)
    found, counts = np.unique(np.concatenate(own), return_counts=True)
    return found[counts >= max(MIN_FRAMED, FRAME_SHARE * len(texts))]


def _word_hashes(text: str) -> NDArray[np.uint64]:
    words = _WORD.findall(text.lower())
    return np.fromiter((zlib.crc32(w.encode()) for w in words), np.uint64, len(words))


def _run_hashes(words: NDArray[np.uint64], length: int) -> NDArray[np.uint64]:
    """A hash of every run of `length` words."""
    powers = np.cumprod(np.full(length, 0x9E3779B97F4A7C15, dtype=np.uint64))
    mixed = words * np.uint64(0xBF58476D1CE4E5B9) ^ (words >> np.uint64(7))
    sums = (sliding_window_view(mixed, length) * powers).sum(axis=1, dtype=np.uint64)
    return sums ^ (sums >> np.uint64(29))


# -- reading -----------------------------------------------------------------------------------


def _read_file(path: Path) -> Iterator[Prompt]:
    source = path.name.split(".")[0]
    try:
        for place, row in _rows(path):
            yield _prompt(row, f"{path}, {place}", source)
    except UnicodeDecodeError as error:
        raise TrainingError(f"{path} is not valid UTF-8 text: {error}.") from None
    except TrainingError:
        raise
    except Exception as error:  # of many kinds: every reader's library has its own
        raise TrainingError(
            f"{path} cannot be read: {error}. Make or fetch the file again, or leave it out."
        ) from None


def _rows(path: Path) -> Iterator[tuple[str, Any]]:
    """Every row with its place in words."""
    if path.name.endswith(".parquet"):
        table = _optional("pyarrow.parquet", "pyarrow", path).read_table(path)
        for number, row in enumerate(table.to_pylist(), 1):
            yield f"row {number}", row
    elif path.name.endswith(".json"):
        content = _parse(path.read_text(encoding="utf-8"), str(path))
        if not isinstance(content, list):
            raise TrainingError(f"{path} holds no JSON list; put one object a prompt into a list.")
        for number, row in enumerate(content, 1):
            yield f"row {number}", row
    elif path.name.endswith(SUFFIXES):
        with _open_text(path) as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield f"line {number}", _parse(line, f"{path}, line {number}")
    else:
        raise TrainingError(f"{path} has an unknown ending; expected {', '.join(SUFFIXES)}.")


def _open_text(path: Path) -> io.TextIOBase:
    if path.name.endswith(".gz"):
        return gzip.open(path, "rt", encoding="utf-8")
    if path.name.endswith(".zst"):
        opener: io.TextIOBase = _optional("zstandard", "zstandard", path).open(
            path, "rt", encoding="utf-8"
        )
        return opener
    return path.open(encoding="utf-8")


def _read_hub(name: str) -> Iterator[Prompt]:
    datasets = _optional("datasets", "datasets", name)
    try:
        rows = datasets.load_dataset(name, split="train")
    except Exception as error:  # of many kinds: no such name, no network, no permission
        raise TrainingError(
            f"The data set {name} cannot be had from the Hub ({error}); check its name, or "
            "download it and give the file."
        ) from None
    for number, row in enumerate(rows, 1):
        yield _prompt(row, f"{name}, row {number}", name)


def _optional(module: str, package: str, what: object) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise TrainingError(
            f"Reading {what} needs the package {package}: pip install {package}. Plain .jsonl and "
            ".jsonl.gz need nothing."
        ) from None


def _parse(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise TrainingError(f"{place} is not valid JSON: {error}.") from None
    except RecursionError:
        raise TrainingError(
            f"{place} is nested too deeply to be read; a row needs no more than messages in a list."
        ) from None


def _prompt(row: Any, place: str, source: str) -> Prompt:
    messages = _messages(row) if isinstance(row, Mapping) else None
    if not messages or not all(map(_is_message, messages)) or messages[-1]["role"] != "user":
        keys = (
            f"has the keys {sorted(map(str, row))}" if isinstance(row, Mapping) else "is no object"
        )
        raise TrainingError(
            f"{place} {keys}; it needs a non-empty 'prompt', 'turns', 'messages' or 'instruction'."
        )
    return Prompt(tuple(messages), str(row.get("source") or source))


def _messages(row: Mapping[str, Any]) -> list[Mapping[str, Any]] | None:
    prompt, turns, messages = row.get("prompt"), row.get("turns"), row.get("messages")
    if isinstance(prompt, list):
        messages = prompt
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    if isinstance(messages, list):
        return _before_answer(messages)
    if isinstance(turns, list) and turns:
        return [{"role": "user", "content": turns[0]}]
    if isinstance(row.get("instruction"), str):
        parts = [row["instruction"], row.get("input")]
        text = "\n\n".join(part for part in parts if isinstance(part, str) and part.strip())
        return [{"role": "user", "content": text}]
    return None


def _before_answer(messages: Sequence[Any]) -> list[Mapping[str, Any]]:
    """The turns before the first answer, which the target did not write."""
    kept: list[Mapping[str, Any]] = []
    for message in messages:
        if not isinstance(message, Mapping) or message.get("role") == "assistant":
            break
        kept.append({"role": message.get("role"), "content": message.get("content")})
    return kept


def _is_message(message: Mapping[str, Any]) -> bool:
    role, content = message.get("role"), message.get("content")
    return isinstance(role, str) and isinstance(content, str) and bool(content.strip())
