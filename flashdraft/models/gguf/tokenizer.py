"""A tokenizer built from a GGUF file's metadata, through the `tokenizers` library.

It knows byte-level BPE (GPT-2's scheme, with the splitting rules of the supported families) and
Gemma 4's BPE over characters; SentencePiece's is sentencepiece.py's. Everything a tokenizer.json
would say is set here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from flashdraft.errors import (
    CheckpointError,
    FlashdraftError,
    UnsupportedModelError,
    quoted,
    shortened,
)
from flashdraft.models.gguf.sentencepiece import build_sentencepiece, read_pieces

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # values of tokenizer.ggml.token_type
_SPECIAL_TYPES = {
    # its files list its chat markers as user-defined, its tokenizer.json as special
    "gemma4": (_UNKNOWN, _CONTROL, _USER_DEFINED),
    "llama": (_UNKNOWN, _CONTROL),
}

_LETTERS_AND_SYMBOLS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = _LETTERS_AND_SYMBOLS % r"\p{N}{1,3}"
_QWEN2 = _LETTERS_AND_SYMBOLS % r"\p{N}"


def _split_by(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _split_gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _split_smollm() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _split_gpt2()])


_SPLITTERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "default": _split_gpt2,
    "gpt-2": _split_gpt2,
    "smollm": _split_smollm,
    "llama-bpe": lambda: _split_by(_LLAMA3),
    "qwen2": lambda: _split_by(_QWEN2),
}


def build_gguf_tokenizer(metadata: Mapping[str, Any], path: Path) -> tokenizers.Tokenizer | None:
    """The tokenizer of a file's metadata (`path` is for messages); None without a vocabulary."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    if tokens is None:
        return None
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "llama":
        return _sentencepiece(metadata, path)
    merges = metadata.get("tokenizer.ggml.merges")
    if kind not in ("gpt2", "gemma4") or merges is None:
        raise UnsupportedModelError(
            f"{path} has a tokenizer of kind {quoted(kind)} "
            f"{'without' if merges is None else 'with'} merges; BPE tokenizers of the kinds gpt2 "
            "and gemma4, and llama's of SentencePiece, are supported."
        )
    types = metadata.get("tokenizer.ggml.token_type", [])
    if not all(isinstance(values, list) for values in (tokens, merges, types)):
        raise CheckpointError(f"{path}: the tokenizer's tokens, merges and types must be lists.")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    pairs = [_merge_pair(path, merge) for merge in merges]
    rule = metadata.get("tokenizer.ggml.pre", "default")
    if kind == "gpt2" and rule not in _SPLITTERS:
        raise UnsupportedModelError(
            f"{path} splits text by the rule {quoted(rule)}; supported are {', '.join(_SPLITTERS)}."
        )
    with _building(path):
        tokenizer = (
            _gemma4(vocabulary, pairs) if kind == "gemma4" else _byte_level(vocabulary, pairs, rule)
        )
    _add_tokens(tokenizer, tokens, types, kind)
    # llama.cpp's defaults, for files that do not say
    adds_bos = kind == "gemma4" or rule == "llama-bpe"
    if metadata.get("tokenizer.ggml.add_bos_token", adds_bos):
        _add_bos(tokenizer, tokens, metadata.get("tokenizer.ggml.bos_token_id"))
    return tokenizer


def _sentencepiece(metadata: Mapping[str, Any], path: Path) -> tokenizers.Tokenizer:
    def said(key: str, default: object) -> Any:
        return metadata.get(f"tokenizer.ggml.{key}", default)

    pieces = read_pieces(metadata, path)
    with _building(path):
        tokenizer = build_sentencepiece(
            pieces, path, said("unknown_token_id", 0), bool(said("add_space_prefix", True))
        )
    _add_tokens(tokenizer, pieces.texts, pieces.types, "llama")
    if said("add_bos_token", True):
        _add_bos(tokenizer, pieces.texts, said("bos_token_id", 1))
    return tokenizer


@contextmanager
def _building(path: Path) -> Iterator[None]:
    try:
        yield
    except FlashdraftError:
        raise
    except Exception as error:  # the library raises plain Exception for merges that do not fit
        raise CheckpointError(f"{path}: the tokenizer is damaged: {shortened(error)}.") from None


def _merge_pair(path: Path, merge: str) -> tuple[str, str]:
    left, gap, right = merge.partition(" ")
    if not (left and gap and right):
        raise CheckpointError(f"{path}: the tokenizer's merge {quoted(merge)} is not a pair.")
    return left, right


def _byte_level(
    vocabulary: dict[str, int], merges: list[tuple[str, str]], rule: str
) -> tokenizers.Tokenizer:
    # Llama 3 takes a word that is in the vocabulary whole, whatever the merges would make of it
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, ignore_merges=rule == "llama-bpe")
    )
    if rule == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _SPLITTERS[rule]()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _gemma4(vocabulary: dict[str, int], merges: list[tuple[str, str]]) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocabulary, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True
        )
    )
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


def _add_tokens(
    tokenizer: tokenizers.Tokenizer, tokens: Sequence[str], types: Sequence[int], kind: str
) -> None:
    """Tokens that are matched whole in a text; special ones are left out of decoded text."""
    special_types = _SPECIAL_TYPES.get(kind, (_CONTROL,))
    special, plain = [], []
    for token, token_type in zip(tokens, types, strict=False):
        if token_type in special_types:
            special.append(AddedToken(token, normalized=False, special=True))
        elif token_type == _USER_DEFINED:
            plain.append(AddedToken(token, normalized=False, special=False))
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(plain)


def _add_bos(tokenizer: tokenizers.Tokenizer, tokens: Sequence[str], bos: int | None) -> None:
    if bos is None or not 0 <= bos < len(tokens):
        return
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[tokens[bos], "$A"], special_tokens=[(tokens[bos], bos)]
    )
