"""SentencePiece's BPE from a GGUF file's pieces and scores, through the `tokenizers` library.

Such a tokenizer has no list of merges: of all neighbours those are joined whose piece has the best
score. Here every way to make a piece of two others becomes a merge, the best pieces first. What no
piece spells becomes the tokens of its bytes. Which tokens are matched whole is tokenizer.py's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
from tokenizers import decoders, models, normalizers

from flashdraft.errors import CheckpointError, UnsupportedModelError, quoted

_NORMAL, _UNUSED, _BYTE = 1, 5, 6  # values of tokenizer.ggml.token_type
_SPACE = "▁"
_MAX_PIECE = 1024  # characters; SentencePiece's longest by default are 16
# merges for every piece of a file, on average; published vocabularies have about 2, and pieces of
# 16 characters can have 15
_MAX_MERGES = 16
_REMEDY = "Fetch or convert the file again."
# what else SentencePiece may do with a text, and no file of a supported family asks for
_CHANGES = ("precompiled_charsmap", "remove_extra_whitespaces")


class Pieces(NamedTuple):
    """What a file lists, by token id."""

    texts: Sequence[str]
    scores: Sequence[float]
    types: Sequence[int]


def read_pieces(metadata: Mapping[str, Any], path: Path) -> Pieces:
    """The file's lists, which must belong together."""
    for key in _CHANGES:
        if metadata.get(f"tokenizer.ggml.{key}"):
            raise UnsupportedModelError(
                f"{path} has a SentencePiece tokenizer that changes texts by {key!r}; only those "
                "that take a text as it is are supported."
            )
    lists = [metadata.get(f"tokenizer.ggml.{key}") for key in ("tokens", "scores", "token_type")]
    texts, scores, types = (one if isinstance(one, list) else [] for one in lists)
    if not texts or not len(texts) == len(scores) == len(types):
        raise CheckpointError(
            f"{path}: a SentencePiece tokenizer needs tokens, scores and token_type of one length; "
            f"there are {len(texts)}, {len(scores)} and {len(types)}. {_REMEDY}"
        )
    pieces = Pieces(texts, scores, types)
    seen: set[object] = set()
    for text, score, kind in zip(*pieces, strict=True):
        is_number = isinstance(score, int | float) and not math.isnan(score)
        if not isinstance(text, str) or not is_number or not isinstance(kind, int):
            raise CheckpointError(
                f"{path}: the tokenizer has {quoted(text)} with score {quoted(score)} and type "
                f"{quoted(kind)}; these must be a text, a number and a whole number. {_REMEDY}"
            )
        if len(text) > _MAX_PIECE:
            raise CheckpointError(
                f"{path}: the tokenizer has a piece of {len(text)} characters; at most "
                f"{_MAX_PIECE} are allowed. {_REMEDY}"
            )
        if text in seen:  # which of its ids a text becomes could not be told
            raise CheckpointError(
                f"{path}: the tokenizer has the piece {quoted(text)} twice; every piece must be "
                f"there once. {_REMEDY}"
            )
        seen.add(text)
    return pieces


def build_sentencepiece(
    pieces: Pieces, path: Path, unknown: object, has_prefix: bool
) -> tokenizers.Tokenizer:
    """The tokenizer; with `has_prefix` a text begins as if a space stood before it."""
    vocabulary = {text: index for index, text in enumerate(pieces.texts)}
    num_bytes = sum(
        kind == _BYTE and text == f"<0x{text[3:5]}>"
        for text, kind in zip(pieces.texts, pieces.types, strict=True)
    )
    is_known = isinstance(unknown, int) and 0 <= unknown < len(pieces.texts)
    if num_bytes < 256 and not is_known:
        raise UnsupportedModelError(
            f"{path} has a SentencePiece tokenizer with {num_bytes} of 256 byte tokens and without "
            "a token for what is unknown; it cannot spell every text. Use another file."
        )
    tokenizer = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=_merges(pieces, path),
            unk_token=pieces.texts[unknown] if isinstance(unknown, int) and is_known else None,
            fuse_unk=True,
            byte_fallback=num_bytes >= 256,
        )
    )
    before = [normalizers.Prepend(_SPACE)] if has_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*before, normalizers.Replace(" ", _SPACE)])
    after = [decoders.Strip(content=" ", left=1)] if has_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *after]
    )
    return tokenizer


def _merges(pieces: Pieces, path: Path) -> list[tuple[str, str]]:
    """Every pair of pieces that makes a third, by the third's score and, alike, its id."""
    parts = {
        text: (-score, index)
        for index, (text, score, kind) in enumerate(zip(*pieces, strict=True))
        if kind == _NORMAL
    }
    unused = {
        text for text, kind in zip(pieces.texts, pieces.types, strict=True) if kind == _UNUSED
    }
    most = _MAX_MERGES * len(pieces.texts)
    found: list[tuple[float, int, int, tuple[str, str]]] = []
    for whole in (*parts, *unused):
        for cut in range(len(whole) - 1, 0, -1):  # the longest left part first
            pair = whole[:cut], whole[cut:]
            if pair[0] not in parts or pair[1] not in parts:
                continue
            if whole in unused:  # SentencePiece would make it, and take it apart at the end
                raise UnsupportedModelError(
                    f"{path} has the unused piece {quoted(whole)} in its SentencePiece tokenizer, "
                    "which other pieces make; such tokenizers are not supported. Use another file."
                )
            if len(found) == most:
                raise CheckpointError(
                    f"{path}: the pieces of its SentencePiece tokenizer make each other in more "
                    f"than {most} ways, {_MAX_MERGES} for each of {len(pieces.texts)}. {_REMEDY}"
                )
            found.append((*parts[whole], len(found), pair))
    return [pair for *_, pair in sorted(found)]
