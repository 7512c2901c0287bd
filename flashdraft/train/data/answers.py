"""Answers on disk and in memory: token ids of prompts with what the target wrote to them.

A folder holds shards `answers-00000.safetensors`, each complete or not there. It knows neither
models nor tokenizers: who writes shards is answer_writer.py, who learns from them fit/batches.py.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor

from flashdraft.errors import TrainingError
from flashdraft.kernels.kinds import WeightOptions
from flashdraft.models.sources import resolve_source
from flashdraft.models.tokenizer import Tokenizer

FORMAT_VERSION = "1"
SHARD_GLOB = "answers-*.safetensors"
COLUMNS = {  # per example, beside the tokens
    "prompt_lengths": torch.int32,
    "answer_lengths": torch.int32,
    "prompt_index": torch.int32,  # row in the list of prompts
    "variant": torch.int32,  # which of this prompt's answers
    "source": torch.int32,  # index into the metadata's list of sources
    "temperature": torch.float32,  # 0 = greedy
    "ended": torch.uint8,  # 1 = by the target's own stop token
}


Ids = Sequence[int] | NDArray[np.int32]
# what tokenizers split in different ways: words, figures, code, accents, other scripts
_PROBE = "The  quick foxes' 1234567.89 {\n\treturn x_1 != 0;\n}\r\n Zoë façade ελληνικά 漢字かな 🙂"


class Answer(NamedTuple):
    """One example: a prompt, and what the target wrote (with its stop token, if it ended)."""

    prompt_ids: Ids
    answer_ids: Ids
    prompt_index: int = 0
    variant: int = 0
    source: str = ""
    temperature: float = 0.0
    ended: bool = True


class Author(NamedTuple):
    """Who wrote answers, as far as their shard says it: older ones say less."""

    name: str | None = None
    fingerprint: str | None = None
    vocab_size: int | None = None
    tokenizer: str | None = None  # a digest
    formats: WeightOptions | None = None


@dataclass(frozen=True)
class AnswerSet:
    """Examples in memory, flat: prompt and answer of every example end to end."""

    tokens: Tensor  # [num_tokens] int32
    starts: Tensor  # [num_examples + 1] int64: example i owns tokens starts[i] : starts[i + 1]
    prompt_lengths: Tensor  # [num_examples] int64
    source_index: Tensor  # [num_examples] int64, into source_names
    source_names: tuple[str, ...]
    temperatures: Tensor  # [num_examples] float32; 0 = greedy
    ended: Tensor  # [num_examples] bool: by a stop token, not cut
    max_tokens: int | None = None  # the limit of all answers; None = not known, or several
    authors: frozenset[Author] = frozenset()  # the targets that wrote them

    @classmethod
    def read(cls, folders: str | Path | Iterable[str | Path]) -> AnswerSet:
        """Everything in one or several folders of answers."""
        many = [folders] if isinstance(folders, str | Path) else list(folders)
        shards = [shard for folder in many for shard in _shards_of(Path(folder))]
        contents = [read_shard(shard) for shard in shards]
        names = sorted({name for _, meta in contents for name in meta["sources"]})
        place = {name: i for i, name in enumerate(names)}
        columns: dict[str, list[Tensor]] = {name: [] for name in ("tokens", *COLUMNS)}
        for tensors, meta in contents:
            own = torch.tensor([place[name] for name in meta["sources"]], dtype=torch.int64)
            tensors["source"] = own[tensors["source"].long()]
            for name, parts in columns.items():
                parts.append(tensors[name])
        joined = {name: torch.cat(parts) for name, parts in columns.items()}
        prompt_lengths = joined["prompt_lengths"].long()
        return cls(
            tokens=joined["tokens"],
            starts=_starts(prompt_lengths + joined["answer_lengths"].long()),
            prompt_lengths=prompt_lengths,
            source_index=joined["source"],
            source_names=tuple(names),
            temperatures=joined["temperature"],
            ended=joined["ended"].bool(),
            max_tokens=_common_limit([meta["identity"] for _, meta in contents]),
            authors=frozenset(meta["author"] for _, meta in contents),
        )

    @classmethod
    def from_answers(cls, answers: Sequence[Answer]) -> AnswerSet:
        """A set of examples that need no disk."""
        names = sorted({answer.source for answer in answers})
        flat = [token for a in answers for token in (*a.prompt_ids, *a.answer_ids)]
        lengths = [len(a.prompt_ids) + len(a.answer_ids) for a in answers]
        return cls(
            tokens=torch.tensor(flat, dtype=torch.int32),
            starts=_starts(torch.tensor(lengths, dtype=torch.int64)),
            prompt_lengths=torch.tensor([len(a.prompt_ids) for a in answers], dtype=torch.int64),
            source_index=torch.tensor([names.index(a.source) for a in answers], dtype=torch.int64),
            source_names=tuple(names),
            temperatures=torch.tensor([a.temperature for a in answers], dtype=torch.float32),
            ended=torch.tensor([a.ended for a in answers], dtype=torch.bool),
        )

    def __len__(self) -> int:
        return len(self.prompt_lengths)

    @property
    def answer_lengths(self) -> Tensor:
        """[num_examples] int64."""
        return self.starts.diff() - self.prompt_lengths

    @property
    def num_answer_tokens(self) -> int:
        return int(self.answer_lengths.sum())

    @property
    def greedy(self) -> Tensor:
        """[num_examples] bool: answers that are the target's greedy continuation."""
        return self.temperatures == 0.0

    def example(self, index: int) -> tuple[Tensor, Tensor]:
        """Prompt and answer of one example, as views of `tokens`."""
        begin, end = int(self.starts[index]), int(self.starts[index + 1])
        middle = begin + int(self.prompt_lengths[index])
        return self.tokens[begin:middle], self.tokens[middle:end]

    def source(self, index: int) -> str:
        """Where an example's prompt came from."""
        return self.source_names[int(self.source_index[index])]

    def select(self, indices: Tensor | Sequence[int]) -> AnswerSet:
        """Some of the examples, in the given order; a bool mask selects too."""
        chosen = torch.as_tensor(indices)
        chosen = chosen.nonzero().squeeze(1) if chosen.dtype == torch.bool else chosen.long()
        lengths = self.starts.diff()[chosen]
        starts = _starts(lengths)
        # where each kept token stands now: its example's old start plus its place in the example
        shift = torch.repeat_interleave(self.starts[chosen] - starts[:-1], lengths)
        return AnswerSet(
            tokens=self.tokens[torch.arange(int(starts[-1])) + shift],
            starts=starts,
            prompt_lengths=self.prompt_lengths[chosen],
            source_index=self.source_index[chosen],
            source_names=self.source_names,
            temperatures=self.temperatures[chosen],
            ended=self.ended[chosen],
            max_tokens=self.max_tokens,
            authors=self.authors,
        )

    def split(self, held_out: int, seed: int) -> tuple[AnswerSet, AnswerSet]:
        """(train, held out): no prompt is in both, and every source gives its share.

        `held_out` counts prompts; each gives one example, its greedy answer where there is one.
        """
        groups = self._examples_by_prompt()
        if not 0 <= held_out < max(1, len(groups)):
            raise TrainingError(
                f"{held_out} prompts are to be held out of {len(groups)} different ones; hold out "
                f"at most {max(0, len(groups) - 1)}, or generate more answers."
            )
        by_source: dict[int, list[list[int]]] = {}
        for examples in groups:
            by_source.setdefault(int(self.source_index[examples[0]]), []).append(examples)
        sources = sorted(by_source)
        shares = _fair_shares([len(by_source[source]) for source in sources], held_out)
        random = np.random.default_rng(seed)
        kept_out: list[int] = []
        train = torch.ones(len(self), dtype=torch.bool)
        for source, share in zip(sources, shares, strict=True):
            chosen = random.permutation(len(by_source[source]))[:share]
            for examples in (by_source[source][i] for i in sorted(chosen.tolist())):
                train[examples] = False
                kept_out.append(min(examples, key=lambda i: (float(self.temperatures[i]), i)))
        return self.select(train), self.select(kept_out)

    def digest(self) -> str:
        """sha256 of the contents, for provenance."""
        found = hashlib.sha256()
        for tensor in (self.tokens, self.starts, self.prompt_lengths):
            found.update(np.ascontiguousarray(tensor.numpy()).tobytes())
        return found.hexdigest()

    def _examples_by_prompt(self) -> list[list[int]]:
        groups: dict[bytes, list[int]] = {}
        tokens = self.tokens.numpy()
        begins, lengths = self.starts.tolist(), self.prompt_lengths.tolist()
        for i, length in enumerate(lengths):
            prompt = tokens[begins[i] : begins[i] + length].tobytes()
            groups.setdefault(prompt, []).append(i)
        return list(groups.values())


def _starts(lengths: Tensor) -> Tensor:
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


def _common_limit(identities: Iterable[str]) -> int | None:
    """The max_tokens under which answers of these identities were written, where it is one."""
    limits = {json.loads(identity).get("max_tokens") for identity in set(identities)}
    return limits.pop() if len(limits) == 1 else None


def _fair_shares(sizes: Sequence[int], total: int) -> list[int]:
    """`total` in parts proportional to `sizes`, the largest remainders rounded up."""
    exact = [total * size / max(1, sum(sizes)) for size in sizes]
    shares = [int(part) for part in exact]
    by_remainder = sorted(range(len(sizes)), key=lambda i: shares[i] - exact[i])
    for i in by_remainder[: total - sum(shares)]:
        shares[i] += 1
    return shares


def _shards_of(folder: Path) -> list[Path]:
    shards = sorted(folder.glob(SHARD_GLOB))
    if not shards:
        raise TrainingError(
            f"{folder} holds no answers ({SHARD_GLOB}); generate them first, or name the folder "
            "they are in."
        )
    return shards


def read_shard(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors (tokens as int32) and the metadata of a shard, checked."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT_VERSION:
                raise TrainingError(
                    f"{path} has format {metadata.get('format')!r}; this version reads "
                    f"{FORMAT_VERSION!r}. Generate the answers again."
                )
            tensors = {name: file.get_tensor(name) for name in ("tokens", *COLUMNS)}
            sources = json.loads(metadata["sources"])
            identity = metadata["identity"]
            author = _author(metadata)
    except (SafetensorError, OSError, KeyError, ValueError, TypeError) as error:
        raise TrainingError(
            f"{path} cannot be read ({error}); delete it, and its answers are generated again."
        ) from None
    tensors["tokens"] = tensors["tokens"].to(torch.int32)
    lengths = tensors["prompt_lengths"].long() + tensors["answer_lengths"].long()
    if int(lengths.sum()) != len(tensors["tokens"]):
        raise TrainingError(
            f"{path} has {len(tensors['tokens'])} tokens where its lengths say "
            f"{int(lengths.sum())}; delete it, and its answers are generated again."
        )
    return tensors, {"sources": sources, "identity": identity, "author": author}


def _author(metadata: Mapping[str, str]) -> Author:
    identity = json.loads(metadata["identity"])
    vocab_size = metadata.get("vocab_size")
    return Author(
        identity.get("target"),
        identity.get("fingerprint"),
        None if vocab_size is None else int(vocab_size),
        metadata.get("tokenizer"),
        None if "formats" not in metadata else WeightOptions(*json.loads(metadata["formats"])),
    )


def fingerprint(model: str) -> str:
    """sha256 over samples of a checkpoint's files: tells targets apart without reading it all."""
    path = resolve_source(model).path
    files = [path]
    if path.is_dir():  # a run's state has its own names
        files = sorted([*path.glob("*.safetensors"), *path.glob("config.json")])
        files += path.glob("state.json")
    found = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        found.update(f"{file.name} {size}".encode())
        with file.open("rb") as stream:
            for place in range(0, size, max(1 << 16, size // 64)):
                stream.seek(place)
                found.update(stream.read(1 << 12))
    return found.hexdigest()


def tokenizer_digest(tokenizer: Tokenizer) -> str:
    """What a tokenizer makes of one text: the same for one model's files of whatever format."""
    return hashlib.sha256(str(tokenizer.encode(_PROBE)).encode()).hexdigest()[:16]
