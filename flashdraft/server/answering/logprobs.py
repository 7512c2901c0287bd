"""Log-probabilities in the shapes of the chat API and of the older completions API.

A token's text alone may be half a character; its bytes are always exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flashdraft.core import TokenLogprob
from flashdraft.models.stream_decoder import StreamDecoder
from flashdraft.server.answering.answers import Token
from flashdraft.server.answering.token_texts import TokenTexts

LEAST = -9999.0  # stands for minus infinity, which JSON does not have


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
        self._answer = StreamDecoder(texts.tokenizer)  # special tokens are not in its text
        self._offset = 0

    def prompt(
        self, ids: Sequence[int], logprobs: Sequence[TokenLogprob | None], text: str
    ) -> dict[str, Any]:
        """The lists of an echoed prompt; special tokens put before its text have no width."""
        decoder = StreamDecoder(self._texts.tokenizer, skip_special=False)
        lists = self._lists(list(zip(ids, logprobs, strict=True)), decoder)
        added = max(0, self._offset - len(text))
        lists["text_offset"] = [max(0, offset - added) for offset in lists["text_offset"]]
        self._offset = len(text)
        return lists

    def answer(self, tokens: Sequence[Token]) -> dict[str, Any]:
        """The lists of further tokens of the answer, the one that ends it included: those who
        score prompts count on one new token for `max_tokens: 1`."""
        return self._lists([(token.id, token.logprob) for token in tokens], self._answer)

    def _lists(
        self, entries: Sequence[tuple[int, TokenLogprob | None]], decoder: StreamDecoder
    ) -> dict[str, Any]:
        offsets = []
        for token, _ in entries:
            offsets.append(self._offset)
            self._offset += len(decoder.push((token,)))
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
