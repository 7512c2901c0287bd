"""Texts and bytes of single tokens, which may be halves of characters."""

from __future__ import annotations

import json
from functools import cached_property, lru_cache

from flashdraft.models.tokenizer import Tokenizer


class TokenTexts:
    """Texts and bytes of single tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._bytes = {
            index: bytes([byte])
            for byte in range(256)
            if (index := tokenizer.token_id(f"<0x{byte:02X}>")) is not None
        }
        self._texts: dict[int, str] = {}  # of tokens that were asked for
        letter = tokenizer.token_id("a")
        # decoders may drop the space of a first token
        self._before = [] if letter is None else [letter]
        self._known = len(tokenizer.decode(self._before, skip_special=False))

    def text(self, token: int) -> str:
        """What a token adds to a text; U+FFFD for a part of a character."""
        text = self._texts.get(token)
        if text is None:
            text = self._texts[token] = self._find_text(token)
        return text

    def _find_text(self, token: int) -> str:
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
