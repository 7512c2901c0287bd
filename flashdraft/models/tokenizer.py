"""Text to token ids and back, also token by token; and what a chat template needs to know.

A tokenizer comes from a folder's tokenizer.json or from a GGUF file. Templates are rendered by the
chat package; nothing here imports transformers.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from flashdraft.errors import CheckpointError, RequestError
from flashdraft.models.gguf_file import GGUFFile
from flashdraft.models.gguf_tokenizer import build_gguf_tokenizer
from flashdraft.models.loading import read_json

logger = logging.getLogger(__name__)

_REPLACEMENT = "\ufffd"
_MAX_SPLIT_TOKENS = 3  # a character is at most 4 bytes, so at most 3 tokens can wait for its end


class Tokenizer:
    """A model's tokenizer: `encode`, `decode`, its special tokens and its chat template."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        chat_template: str | None = None,
    ) -> None:
        self._backend = backend
        self.special_tokens = dict(special_tokens or {})  # "bos_token" -> "<s>", for templates
        self.chat_template = chat_template
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        self.special_ids = frozenset(
            index for index, token in backend.get_added_tokens_decoder().items() if token.special
        )
        self.byte_ids = frozenset(
            index
            for byte in range(256)
            if (index := backend.token_to_id(f"<0x{byte:02X}>")) is not None
        )

    @classmethod
    def from_checkpoint(cls, path: Path) -> Tokenizer | None:
        """The tokenizer of a folder or a GGUF file; None where it has none."""
        return _from_gguf(path) if path.suffix == ".gguf" else _from_folder(path)

    @property
    def bos_token(self) -> str | None:
        return self.special_tokens.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        return self.special_tokens.get("eos_token")

    @property
    def bos_id(self) -> int | None:
        return None if self.bos_token is None else self.token_id(self.bos_token)

    @property
    def eos_id(self) -> int | None:
        return None if self.eos_token is None else self.token_id(self.eos_token)

    @cached_property
    def longest_token(self) -> int:
        """Characters of the longest token, as the vocabulary spells it."""
        return max(map(len, self._backend.get_vocab()), default=1)

    def token_id(self, token: str) -> int | None:
        """The id of a token by its exact spelling in the vocabulary."""
        return self._backend.token_to_id(token)

    def encode(self, text: str, add_special: bool = False) -> list[int]:
        """Token ids of a text; `add_special` adds what the model expects around raw text (BOS)."""
        try:
            return self._backend.encode(text, add_special_tokens=add_special).ids
        except (TypeError, UnicodeEncodeError):  # how the library sees a lone surrogate
            raise RequestError("The prompt must be text of valid Unicode.") from None

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of many texts, as `encode` has them, on all cores."""
        try:
            found = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        except (TypeError, UnicodeEncodeError):  # how the library sees a lone surrogate
            raise RequestError("The prompts must be text of valid Unicode.") from None
        return [one.ids for one in found]

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """The text of token ids; bytes that are not UTF-8 become U+FFFD."""
        return self._backend.decode(ids, skip_special_tokens=skip_special)

    def to_json(self) -> str:
        """The whole tokenizer in the format of tokenizer.json."""
        return self._backend.to_str()


class StreamDecoder:
    """Decodes a growing sequence of tokens; the pieces joined equal `decode` of the whole.

    A piece is held back while a later token could still change it: a character whose last bytes are
    missing, and a run of byte tokens (which the tokenizer decodes as one). Each call decodes only
    the tokens since the last piece and, as their left context, that piece. Special tokens are no
    text, but `push_pieces` and `flush_pieces` have their ids where they stood: behind all text of
    the tokens before them, and behind a character that they interrupt.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special else frozenset()
        self._ids: list[int] = []  # the last piece's tokens, then those not yet shown
        self._shown = 0  # how many of _ids have been shown
        self._complete = 0  # how many of _ids stand before a trailing run of byte tokens
        self._special: list[tuple[int, int]] = []  # (how many of _ids stand before it, its id)

    def push(self, ids: Iterable[int]) -> str:
        """Take the next tokens; return the text that is now certain."""
        return _text_of(self.push_pieces(ids))

    def flush(self) -> str:
        """The rest, as it is; incomplete characters become U+FFFD."""
        return _text_of(self.flush_pieces())

    def push_pieces(self, ids: Iterable[int]) -> list[str | int]:
        """As `push`, with the ids of special tokens in their places."""
        for index in ids:
            if index in self._skipped:
                self._special.append((len(self._ids), index))
                continue
            self._ids.append(index)
            if index not in self._tokenizer.byte_ids:
                self._complete = len(self._ids)
        return self._show(self._safe_end())

    def flush_pieces(self) -> list[str | int]:
        """As `flush`, with the ids of special tokens in their places."""
        return self._show(len(self._ids))

    def _decode(self, start: int, end: int) -> str:
        return self._tokenizer.decode(self._ids[start:end], skip_special=False)

    def _safe_end(self) -> int:
        """Up to where the text cannot change any more."""
        start, end = self._shown, self._complete
        if end <= start:
            return start
        whole = self._decode(start, end)
        if not whole.endswith(_REPLACEMENT):
            return end
        # cut before a character that may be incomplete: a cut inside it would change the text
        for cut in range(end - 1, max(start, end - 1 - _MAX_SPLIT_TOKENS), -1):
            if self._decode(start, cut) + self._decode(cut, end) == whole:
                return cut
        return start

    def _show(self, end: int) -> list[str | int]:
        """Text and special tokens up to `end`."""
        due = [mark for mark in self._special if mark[0] <= end]
        del self._special[: len(due)]
        pieces: list[str | int] = []
        if end > self._shown:
            known = len(self._decode(0, self._shown))
            whole = self._decode(0, end)
            for place, index in due:
                cut = self._cut(place, end, whole)
                pieces += [whole[known:cut], index]
                known = max(known, cut)
            pieces.append(whole[known:])
            del self._ids[: self._shown]
            self._complete -= self._shown
            self._special = [(place - self._shown, index) for place, index in self._special]
            self._shown = end - self._shown
        else:
            pieces += [index for _, index in due]
        return [piece for piece in pieces if piece != ""]

    def _cut(self, place: int, end: int, whole: str) -> int:
        """Where the text of the tokens before `place`, with its last character, ends in `whole`."""
        for later in range(place, end):
            before = self._decode(0, later)
            is_whole = whole.startswith(before) and not before.endswith(_REPLACEMENT)
            if is_whole or before + self._decode(later, end) == whole:
                return len(before)
        return len(whole)


def _text_of(pieces: Iterable[str | int]) -> str:
    return "".join(piece for piece in pieces if isinstance(piece, str))


def _from_gguf(path: Path) -> Tokenizer | None:
    file = GGUFFile(path)
    backend = build_gguf_tokenizer(file.metadata, path)
    if backend is None:
        return None
    named = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        index = file.metadata.get(f"tokenizer.ggml.{key}_token_id")
        token = backend.id_to_token(index) if isinstance(index, int) and index >= 0 else None
        if token is not None:
            named[f"{name}_token"] = token
    template = file.metadata.get("tokenizer.chat_template")
    return Tokenizer(backend, special_tokens=named, chat_template=template)


def _from_folder(folder: Path) -> Tokenizer | None:
    path = folder / "tokenizer.json"
    if not path.is_file():
        if (folder / "tokenizer.model").is_file():
            logger.warning(
                "%s has a SentencePiece tokenizer.model but no tokenizer.json; it is loaded for "
                "token ids only.",
                folder,
            )
        return None
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise CheckpointError(f"{path} cannot be read: {error}.") from None
    backend.no_truncation()
    backend.no_padding()
    config: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if (folder / name).is_file():
            config |= read_json(folder / name)
    return Tokenizer(
        backend,
        special_tokens=_named_tokens(config),
        chat_template=_folder_template(folder, config),
    )


def _named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """bos_token, eos_token, …: strings, or objects with a "content"."""
    named = {}
    for name, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            named[name] = text
    return named


def _folder_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if template is None and (folder / "chat_template.json").is_file():
        template = read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(template, list):  # several named templates
        by_name = {entry.get("name"): entry.get("template") for entry in template}
        template = by_name.get("default")
    return template if isinstance(template, str) else None
