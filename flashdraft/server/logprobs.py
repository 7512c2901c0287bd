"""Log-probabilities in the shapes of the chat API and of the older completions API.

A token's text alone may be half a character; its bytes are always exact.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Any

from flashdraft.core import TokenLogprob
from flashdraft.models.tokenizer import StreamDecoder, Tokenizer
from flashdraft.server.answers import Token

LEAST = -9999.0  # stands for minus infinity, which JSON does not have


class TokenTexts:
    """Texts and bytes of single tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._bytes = {
            index: bytes([byte])
            for byte in range(256)
            if (index := tokenizer.token_id(f"<0x{byte:02X}>")) is not None
        }
        letter = tokenizer.encode("a")
        self._before = letter[-1:]  # decoders may drop the space of a first token
        self._known = len(tokenizer.decode(self._before, skip_special=False))

    def text(self, token: int) -> str:
        """What a token adds to a text; U+FFFD for a part of a character."""
        if token in self._bytes and self._bytes[token] < b"\x80":
            return self._bytes[token].decode("ascii")
        whole = self.tokenizer.decode([*self._before, token], skip_special=False)
        return whole[self._known :]

    def bytes(self, token: int) -> list[int]:
        """The bytes a token stands for."""
        if token in self._bytes:
            return list(self._bytes[token])
        text = self.text(token)
        if "\ufffd" not in text:
            return list(text.encode("utf-8", "surrogatepass"))
        return list(_spelled_bytes(self._spellings.get(token, "")) or text.encode())

    @cached_property
    def _spellings(self) -> dict[int, str]:
        """How the vocabulary writes its tokens; made only when a token is part of a character."""
        vocabulary = json.loads(self.tokenizer.to_json())["model"]["vocab"]
        return {index: token for token, index in vocabulary.items()}


@lru_cache(maxsize=1)
def _byte_alphabet() -> dict[str, int]:
    """The letters that byte-level vocabularies write bytes with: printable Latin-1 as it is, the
    other bytes from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(0x100 + number): byte for number, byte in enumerate(others)}


def _spelled_bytes(spelling: str) -> bytes | None:
    alphabet = _byte_alphabet()
    if not spelling or any(letter not in alphabet for letter in spelling):
        return None
    return bytes(alphabet[letter] for letter in spelling)


def chat_logprobs(texts: TokenTexts, tokens: Sequence[Token], count: int) -> list[dict[str, Any]]:
    """`logprobs.content` of a choice; `count` is how many alternatives each token shows."""
    return [
        {
            **_entry(texts, token.id, token.logprob.logprob),
            "top_logprobs": [_entry(texts, *one) for one in token.logprob.top[:count]],
        }
        for token in tokens
        if token.logprob is not None and not token.is_stop
    ]


def _entry(texts: TokenTexts, token: int, logprob: float) -> dict[str, Any]:
    shown = max(logprob, LEAST)
    return {"token": texts.text(token), "logprob": shown, "bytes": texts.bytes(token)}


class LegacyLogprobs:
    """`logprobs` of a completions choice: four lists, one entry for each token."""

    def __init__(self, texts: TokenTexts, count: int) -> None:
        self._texts = texts
        self._count = count
        self._decoder = StreamDecoder(texts.tokenizer, skip_special=False)
        self._offset = 0

    def prompt(
        self, ids: Sequence[int], logprobs: Sequence[TokenLogprob | None], text: str
    ) -> dict[str, Any]:
        """The lists of an echoed prompt; special tokens put before its text have no width."""
        lists = self._lists(list(zip(ids, logprobs, strict=True)))
        added = max(0, self._offset - len(text))
        lists["text_offset"] = [max(0, offset - added) for offset in lists["text_offset"]]
        self._offset = len(text)
        return lists

    def answer(self, tokens: Sequence[Token]) -> dict[str, Any]:
        """The lists of further tokens of the answer, the one that ends it included: those who
        score prompts count on one new token for `max_tokens: 1`."""
        return self._lists([(token.id, token.logprob) for token in tokens])

    def _lists(self, entries: Sequence[tuple[int, TokenLogprob | None]]) -> dict[str, Any]:
        offsets = []
        for token, _ in entries:
            offsets.append(self._offset)
            self._offset += len(self._decoder.push((token,)))
        return {
            "tokens": [self._texts.text(token) for token, _ in entries],
            "token_logprobs": [
                max(found.logprob, LEAST) if found else None for _, found in entries
            ],
            "top_logprobs": [self._top(token, found) for token, found in entries],
            "text_offset": offsets,
        }

    def _top(self, token: int, found: TokenLogprob | None) -> dict[str, float] | None:
        if found is None:
            return None
        top: dict[str, float] = {}
        for one, logprob in (*found.top[: self._count], (token, found.logprob)):
            top.setdefault(self._texts.text(one), max(logprob, LEAST))
        return top
