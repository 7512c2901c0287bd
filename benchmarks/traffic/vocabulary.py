"""A vocabulary for random weights, so that grammars can be matched: bytes, and made-up words.

Words are letters alone, so that nearly every random draft fits into the free text of an answer. As
many of them as the model has tokens: a mask is as large as in the real thing.
"""

from __future__ import annotations

import json
import random
import string
from collections.abc import Sequence
from functools import lru_cache
from typing import cast

from benchmarks.traffic.workload import FIRST_TOKEN
from flashdraft.chat.grammar.compiler import LlguidanceCompiler, grammar_compiler
from flashdraft.models.tokenizer import Tokenizer

NUM_BYTES = 256
SPACE = "\u0120"  # as byte-level vocabularies spell it


class MadeUpVocabulary:
    """As much of a tokenizer as a grammar's compiler wants of one."""

    def __init__(self, vocab_size: int, words: Sequence[str] = ()) -> None:
        if vocab_size < FIRST_TOKEN + NUM_BYTES:
            raise ValueError(f"{vocab_size} tokens are too few for all bytes")
        self.vocab_size = vocab_size
        # a token each, alone and behind a space; with them every token is text, and none is silent
        self._words = list(dict.fromkeys(words))

    def to_json(self) -> str:
        """In the form of a tokenizer.json: byte-level, without merges."""
        names = [f"<special {n}>" for n in range(FIRST_TOKEN)]
        added = [{"id": n, "content": name, "special": True} for n, name in enumerate(names)]
        added = [] if self._words else added
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        spelled = names + byte_letters()
        spelled += [f"{space}{word}" for space in ("", SPACE) for word in self._words]
        spelled = list(dict.fromkeys(spelled))[: self.vocab_size]
        known, dice = set(spelled), random.Random(0)
        while len(spelled) < self.vocab_size:
            word = "".join(dice.choices(string.ascii_lowercase, k=dice.randint(2, 9)))
            if word not in known:
                known.add(word)
                spelled.append(word)
        byte_level = {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": bool(self._words),
        }
        return json.dumps(
            {
                "version": "1.0",
                "truncation": None,
                "padding": None,
                "added_tokens": [one | flags for one in added],
                "normalizer": None,
                "pre_tokenizer": byte_level,
                "post_processor": None,
                "decoder": byte_level,
                "model": {
                    "type": "BPE",
                    "dropout": None,
                    "unk_token": None,
                    "continuing_subword_prefix": None,
                    "end_of_word_suffix": None,
                    "fuse_unk": False,
                    "byte_fallback": False,
                    "ignore_merges": bool(self._words),
                    "vocab": {name: n for n, name in enumerate(spelled)},
                    "merges": [],
                },
            }
        )


def byte_letters() -> list[str]:
    """The letter that stands for each byte in a byte-level vocabulary: itself where it is seen."""
    seen = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    letters, num_unseen = [], 0
    for byte in range(NUM_BYTES):
        letters.append(chr(byte if byte in seen else 0x100 + num_unseen))
        num_unseen += byte not in seen
    return letters


@lru_cache(maxsize=1)
def schema_compiler(vocab_size: int) -> LlguidanceCompiler | None:
    """What compiles grammars over such a vocabulary; None where llguidance is not installed."""
    vocabulary = cast(Tokenizer, MadeUpVocabulary(vocab_size))
    return grammar_compiler(vocabulary, vocab_size, [1])
