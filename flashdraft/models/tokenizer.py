"""Text to token ids and back, also token by token; and what a chat template needs to know.

A tokenizer comes from a folder's tokenizer.json or from a GGUF file. Its patterns and its template
are programs out of a checkpoint: they run in processes that can be killed (text/child.py). Decoding
has no such patterns and happens here. What messages look like is the chat package's; nothing here
imports transformers.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import tokenizers

from flashdraft.errors import (
    CapacityError,
    CheckpointError,
    FlashdraftError,
    RequestError,
    quoted,
    shortened,
)
from flashdraft.habits import ExplainsCalls
from flashdraft.killable.pool import (
    MIB,
    First,
    FirstError,
    Limits,
    ProcessPool,
    ProcessStoppedError,
    RefusedError,
)
from flashdraft.models.files.digests import read_digest
from flashdraft.models.files.opening import check_model_files, read_json, read_model_bytes, reading
from flashdraft.models.gguf.file import GGUFFile
from flashdraft.models.gguf.tokenizer import build_gguf_tokenizer
from flashdraft.text import exact_json
from flashdraft.text.protocol import MAX_CHARS, identity, unpack_ids

logger = logging.getLogger(__name__)

MAX_TEMPLATE = 512 * 1024  # characters of a template's source; real ones have thousands
LONG_TEXT = 16 * 1024  # characters; texts that are longer take noticeable time
_CHILD, _WORK = "flashdraft.text.child", "tokenizes"
_TEXT_CPU_S, _TEXT_CPU_S_PER_CHAR = 2.0, 10e-6  # ten times what honest tokenizers take
_TEXT_MIB, _TEXT_BYTES_PER_CHAR = 256, 1024
_LOAD_CPU_S, _LOAD_CPU_S_PER_BYTE = 4.0, 0.5e-6
_LOAD_MIB, _LOAD_BYTES_PER_BYTE = 256, 32
_BATCH_CHARS = 1_000_000  # of texts that one process encodes at a time
_MAX_DEPTH = 500  # of lists and objects in each other; who writes and reads JSON goes down it
_PANIC = "PanicException"  # of the library's native code; it is no Exception, and not exported


class Tokenizer(ExplainsCalls):
    """A model's tokenizer: `encode`, `decode`, its special tokens and its chat template."""

    _habits: ClassVar[str] = "llm.get_tokenizer().…"

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        chat_template: str | None = None,
        pool: ProcessPool | None = None,
    ) -> None:
        self._backend = backend
        self.special_tokens = dict(special_tokens or {})  # "bos_token" -> "<s>", for templates
        self._chat_template = chat_template
        self.pool = pool or _pool_of(backend, chat_template, self.special_tokens)
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

    def with_template(self, chat_template: str | None) -> Tokenizer:
        """The same tokenizer with another chat template, or with none."""
        return Tokenizer(
            self._backend, special_tokens=self.special_tokens, chat_template=chat_template
        )

    @property
    def chat_template(self) -> str | None:
        """Fixed: the processes that render have it too."""
        return self._chat_template

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
        return self._encode([text], add_special)[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of many texts, as `encode` has them, in all processes at once."""
        _check_texts(texts)
        with ThreadPoolExecutor(self.pool.size) as threads:
            batches = list(threads.map(self._encode, _batches(texts)))
        return [ids for batch in batches for ids in batch]

    def _encode(self, texts: Sequence[str], add_special: bool = False) -> list[list[int]]:
        _check_texts(texts)
        message = {"type": "encode", "texts": list(texts), "add_special": add_special}
        with _tokenizer_errors():
            num_chars = sum(map(len, texts))
            found = self._ask(message, num_chars, num_chars > LONG_TEXT)["ids"]
        return list(map(unpack_ids, found))

    def render(self, variables: Mapping[str, Any]) -> str:
        """What the chat template makes of its variables, which are JSON values."""
        with _template_errors():
            return str(self._render(variables, None)["text"])

    def encode_rendered(
        self,
        variables: Mapping[str, Any],
        max_chars: int = MAX_CHARS,
        waits: bool | None = None,
        continues: bool = False,
    ) -> list[int]:
        """The token ids of what the chat template makes of its variables.

        A text of more than `max_chars` is not encoded: RefusedError, of the kind "length", with
        the number of its characters. `waits`: whether it waits behind other long ones, so that
        a process stays free; by default where it is long. `continues`: the text ends where the
        last message's does.
        """
        with _template_errors():
            (found,) = self._render(variables, max_chars, waits, continues)["ids"]
        return unpack_ids(found)

    def _render(
        self,
        variables: Mapping[str, Any],
        encode_up_to: int | None,
        waits: bool | None = None,
        continues: bool = False,
    ) -> dict[str, Any]:
        size = len(self.chat_template or "")
        if size > MAX_TEMPLATE:
            raise CheckpointError(
                f"The model's chat template has {size} characters; at most {MAX_TEMPLATE}."
            )
        if waits is None:
            waits = is_long(variables)
        try:
            text = exact_json.write(variables, (",", ":"), ensure_ascii=True, allow_nan=True)
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(
                f"Messages and tools must be made of JSON values: {error}."
            ) from None
        message = {"type": "render", "variables": text, "encode": encode_up_to}
        if continues:
            message["continues"] = True
        return self._ask(message, len(text), waits)

    def _ask(self, message: Mapping[str, Any], num_chars: int, waits: bool) -> dict[str, Any]:
        limits = Limits(
            _TEXT_CPU_S + _TEXT_CPU_S_PER_CHAR * num_chars,
            _TEXT_MIB + _TEXT_BYTES_PER_CHAR * num_chars // MIB,
        )
        try:
            return self.pool.ask(message, limits, is_long=waits)
        except FirstError as error:
            raise _loading_error(error) from None

    def rest(self) -> None:
        """End processes that have nothing to do; where one is needed again it is started anew."""
        self.pool.rest()

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """The text of token ids; bytes that are not UTF-8 become U+FFFD."""
        try:
            return self._backend.decode(ids, skip_special_tokens=skip_special)
        except (TypeError, OverflowError):
            raise RequestError(
                f"Token ids must be a list of whole numbers from 0 to {self.vocab_size - 1}."
            ) from None
        except BaseException as error:
            if type(error).__name__ != _PANIC:
                raise
            raise FlashdraftError(f"The model's tokenizer cannot decode: {error}.") from None

    def to_json(self) -> str:
        """The whole tokenizer in the format of tokenizer.json."""
        return self._backend.to_str()


def is_long(value: Any) -> bool:
    """Whether a value of JSON has more text than is tokenized in no time.

    Raises RequestError where it is nested too deeply, or contains itself.
    """
    size = 0
    for depth, level in enumerate(exact_json.levels(value)):
        if depth > _MAX_DEPTH:
            raise RequestError(f"Messages or tools are nested more than {_MAX_DEPTH} levels deep.")
        keys = (key for one in level if isinstance(one, Mapping) for key in one)
        size += sum(len(text) for text in (*level, *keys) if isinstance(text, str))
    return size > LONG_TEXT


def _check_texts(texts: Sequence[str]) -> None:
    if not all(isinstance(text, str) for text in texts):
        raise RequestError("A prompt must be text.")


def _pool_of(
    backend: tokenizers.Tokenizer, template: str | None, special_tokens: Mapping[str, str]
) -> ProcessPool:
    """Processes with a tokenizer that was made here."""

    @functools.cache  # written out for the first of them alone
    def first() -> First:
        content = backend.to_str()
        return _first({"path": None, "json": content}, len(content), template, special_tokens)

    return ProcessPool(_CHILD, first, work=_WORK)


def _pool_from(path: Path, template: str | None, special_tokens: Mapping[str, str]) -> ProcessPool:
    """Processes with the tokenizer of a file, as it is now."""
    file = _UnchangedFile(path)
    return ProcessPool(
        _CHILD, lambda: _first(file.source(), file.size, template, special_tokens), work=_WORK
    )


class _UnchangedFile:
    """A file that later processes load too: written anew is fine, another content is not."""

    def __init__(self, path: Path) -> None:
        self._path = path.absolute()
        with reading(path):
            self._identity = identity(str(self._path))
            self._digest = read_digest(self._path)
        self.size = self._identity[0]

    def source(self) -> dict[str, Any]:
        """What a process is told of it. Raises CheckpointError where it has changed or is gone."""
        try:
            found = identity(str(self._path))
            is_same = found == self._identity or (
                found[0] == self.size and read_digest(self._path) == self._digest
            )
        except OSError as error:
            raise CheckpointError(
                f"{self._path} cannot be read any more: {error.strerror}. Put it back, or restart."
            ) from None
        if not is_same:
            raise CheckpointError(
                f"{self._path} has changed since the model was loaded. Put the old file back, or "
                "restart to load the new one."
            )
        self._identity = found
        return {"path": str(self._path), "identity": found}


def _first(
    source: Mapping[str, Any], size: int, template: str | None, special_tokens: Mapping[str, str]
) -> First:
    limits = Limits(
        _LOAD_CPU_S + _LOAD_CPU_S_PER_BYTE * size, _LOAD_MIB + _LOAD_BYTES_PER_BYTE * size // MIB
    )
    if template is not None and len(template) > MAX_TEMPLATE:
        template = None  # it is refused where it is asked for
    named = {"template": template, "special_tokens": dict(special_tokens)}
    return First({"type": "load", **source, **named}, limits)


def _batches(texts: Sequence[str]) -> Iterator[list[str]]:
    """Texts in the same order, some at a time."""
    batch, size = list[str](), 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= _BATCH_CHARS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _loading_error(error: FirstError) -> FlashdraftError:
    """Of a process that should replace another one, or be the first for a GGUF file."""
    if error.kind == "limit":
        return CapacityError(
            f"A process was stopped while loading the model's tokenizer: {error}. Try again later."
        )
    return CheckpointError(
        f"The model's tokenizer cannot be loaded: {shortened(error)}. Check the model's files and "
        "restart."
    )


@contextmanager
def _tokenizer_errors() -> Iterator[None]:
    try:
        yield
    except ProcessStoppedError as error:
        raise RequestError(
            f"The model's tokenizer was stopped: {error}. Send a shorter text, or check "
            "tokenizer.json."
        ) from None
    except RefusedError as error:
        raise _tokenizer_error(error) from None


def _tokenizer_error(error: RefusedError) -> RequestError:
    if error.kind == "text":
        return RequestError(f"The prompt {error}.")
    return RequestError(f"The model's tokenizer fails on this text: {error}.")


@contextmanager
def _template_errors() -> Iterator[None]:
    try:
        yield
    except ProcessStoppedError as error:
        raise RequestError(_stopped_template(error)) from None
    except RefusedError as error:
        if error.kind == "length":
            raise
        if error.kind == "checkpoint":
            raise CheckpointError(f"The model's chat template {error}.") from None
        if error.kind in ("text", "tokenizer"):
            raise _tokenizer_error(error) from None
        if error.kind == "limit":
            raise RequestError(_stopped_template(error)) from None
        raise RequestError(
            f"The model's chat template does not accept these messages: {error}."
        ) from None


def _stopped_template(why: FlashdraftError) -> str:
    return (
        f"The model's chat template was stopped: {why}. Send a shorter conversation, or check the "
        "template."
    )


def _from_gguf(path: Path) -> Tokenizer | None:
    file = GGUFFile(path)
    with reading(f"The tokenizer of {path}"):
        backend = build_gguf_tokenizer(file.metadata, path)
    if backend is None:
        return None
    named = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        index = file.metadata.get(f"tokenizer.ggml.{key}_token_id")
        if not isinstance(index, int) or not 0 <= index < backend.get_vocab_size():
            continue
        if (token := backend.id_to_token(index)) is not None:
            named[f"{name}_token"] = token
    template = _checked_template(path, file.metadata.get("tokenizer.chat_template"))
    return Tokenizer(backend, special_tokens=named, chat_template=template)


def _from_folder(folder: Path) -> Tokenizer | None:
    check_model_files(folder)
    path = folder / "tokenizer.json"
    if not path.is_file():
        if (folder / "tokenizer.model").is_file():
            logger.warning(
                "%s has a SentencePiece tokenizer.model but no tokenizer.json; it is loaded for "
                "token ids only.",
                folder,
            )
        return None
    config: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if (folder / name).is_file():
            config |= read_json(folder / name)
    template = _folder_template(folder, config)
    named = _named_tokens(config)
    pool = _pool_from(path, template, named)
    try:
        pool.start()  # another process has loaded it within its limits: so can we
        backend = tokenizers.Tokenizer.from_file(str(path))
    except FirstError as error:
        if error.kind == "limit":
            raise CheckpointError(f"{path} was not loaded: {error}. Fetch it again.") from None
        raise CheckpointError(f"{path} cannot be read: {shortened(error)}.") from None
    return Tokenizer(backend, special_tokens=named, chat_template=template, pool=pool)


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
        try:
            return read_model_bytes(file).decode("utf-8").replace("\r\n", "\n")
        except UnicodeDecodeError as error:
            raise CheckpointError(
                f"{file} is not UTF-8: byte {error.start} begins no character. Fetch it again."
            ) from None
    template = config.get("chat_template")
    if template is None and (folder / "chat_template.json").is_file():
        template = read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(template, list) and all(isinstance(entry, dict) for entry in template):
        by_name = {str(entry.get("name")): entry.get("template") for entry in template}
        template = by_name.get("default")
    return _checked_template(folder, template)


def _checked_template(path: Path, template: Any) -> str | None:
    if template is None or isinstance(template, str):
        return template
    raise CheckpointError(
        f"{path} has the chat template {quoted(template)}; it must be text, or a list of objects "
        "with a name and a template. Fetch it again."
    )
