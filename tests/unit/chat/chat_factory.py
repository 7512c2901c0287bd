"""Small tokenizers in the manner of each family, and answers written as text with marks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from flashdraft.models.tokenizer import Tokenizer

GEMMA4_DATA = Path(__file__).parents[4] / "shared" / "data" / "gemma4"
GEMMA4_MARKS = [
    "<eos>", "<bos>", "<|tool_call>", "<tool_call|>", "<|tool_response>", '<|"|>',
    "<|channel>", "<channel|>", "<|turn>", "<turn|>",
]  # fmt: skip
CHATML_MARKS = ["<|im_start|>", "<|im_end|>"]
HERMES_MARKS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]


def byte_tokenizer(special: list[str], plain: list[str], template: str | None = None) -> Tokenizer:
    """One token per byte, and the marks: special tokens, or added tokens that are text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [AddedToken(mark, special=True, normalized=False) for mark in special]
    )
    backend.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in plain])
    return Tokenizer(backend, chat_template=template)


def gemma4_tokenizer() -> Tokenizer:
    return byte_tokenizer(GEMMA4_MARKS, [])


def qwen3_tokenizer() -> Tokenizer:
    """As Qwen3 has it: the marks of ChatML are special, those of thoughts and calls are text."""
    return byte_tokenizer(CHATML_MARKS, HERMES_MARKS)


def special_hermes_tokenizer() -> Tokenizer:
    return byte_tokenizer(CHATML_MARKS + HERMES_MARKS, [])


def pieces_of(tokenizer: Tokenizer, text: str) -> list[str | int]:
    """An answer as the engine streams it: special tokens as ids, text between them."""
    ids = {tokenizer.decode([index], skip_special=False): index for index in tokenizer.special_ids}
    pattern = "|".join(re.escape(mark) for mark in sorted(ids, key=len, reverse=True))
    return [ids.get(part, part) for part in re.split(f"({pattern})", text) if part]


def tool(name: str, properties: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties or {}, **more}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [
    tool(
        "get_weather",
        {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "ratio": {"type": "number"},
            "metric": {"type": "boolean"},
            "zip": {"type": ["string", "null"]},
            "tags": {"type": "array", "items": {"type": "string"}},
            "where": {"$ref": "#/$defs/place"},
            "free": {},
        },
        required=["city"],
        **{
            "$defs": {
                "place": {
                    "type": "object",
                    "properties": {"x": {"type": "number"}, "name": {"type": "string"}},
                }
            }
        },
    ),
    tool("now"),
]
