"""Which format a model's answers have, told by its tokenizer and its template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flashdraft.chat.answers import gemma4, hermes
from flashdraft.chat.answers.marks import AnswerFormat, AnswerMark
from flashdraft.models.tokenizer import Tokenizer

_MAX_TAIL = 4096  # tokens of the prompt's end that are looked at


def answer_format(tokenizer: Tokenizer, functions: Mapping[str, Any] | None) -> AnswerFormat | None:
    """The marks of the model's answers; None where it has none."""
    if gemma4.knows(tokenizer):
        return gemma4.answer_format(tokenizer, functions)
    found = hermes.answer_format(tokenizer, functions)
    return found if found.spellings else None


def supports_tools(tokenizer: Tokenizer) -> bool:
    """Whether the model has a format for tool calls that is known here."""
    found = answer_format(tokenizer, None)
    return found is not None and AnswerMark.CALL in found.spellings


def thinks_by_default(tokenizer: Tokenizer) -> bool:
    """Whether the model thinks where its template is not told: Gemma 4 does not, Qwen3 does."""
    found = answer_format(tokenizer, None)
    return found is not None and AnswerMark.THINK in found.spellings and not gemma4.knows(tokenizer)


def open_thought(tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> str | None:
    """The text of a thought that the prompt begins and does not end; None where there is none."""
    found = answer_format(tokenizer, None)
    if found is None or AnswerMark.THINK not in found.spellings:
        return None
    tail = list(prompt_ids[-_MAX_TAIL:])
    thinks = (AnswerMark.THINK, AnswerMark.END_THINK)
    for place in range(len(tail) - 1, -1, -1):
        # any other special token parts the answer from what stood before it
        if tail[place] in tokenizer.special_ids and found.tokens.get(tail[place]) not in thinks:
            tail = tail[place + 1 :]
            break
    text = tokenizer.decode(tail, skip_special=False)
    _, opener, rest = text.rpartition(found.spellings[AnswerMark.THINK])
    return rest if opener and found.spellings[AnswerMark.END_THINK] not in rest else None
