"""Answers of Llama 3.1 and later: a call is a bare object, `{"name": …, "parameters": {…}}`.

The token `<|python_tag|>` may stand before it. The same token stands before calls of functions that
Meta's own servers have, written as Python; nobody offers those here, so they are content. The
small models write `{"type": "function", "function": "name", …}` too, and several calls in a row.
"""

from __future__ import annotations

from flashdraft.chat.answers import hermes
from flashdraft.chat.answers.marks import AnswerMarks, MarkKind
from flashdraft.models.tokenizer import Tokenizer

PYTHON_TAG = "<|python_tag|>"


def knows(tokenizer: Tokenizer) -> bool:
    """Whether the model has Llama's token for calls, and a template that speaks of tools.

    Others were made from Llama and kept the token: one that has marks for its thoughts, or other
    marks for its calls, has a format of its own.
    """
    return (
        tokenizer.token_id(PYTHON_TAG) in tokenizer.special_ids
        and "tool" in (tokenizer.chat_template or "")
        and not hermes.answer_marks(tokenizer).spellings
    )


def answer_marks(tokenizer: Tokenizer) -> AnswerMarks:
    """How Llama 3 marks its answers."""
    tag = tokenizer.token_id(PYTHON_TAG)
    return AnswerMarks(
        {MarkKind.CALL: PYTHON_TAG},
        {} if tag is None else {tag: MarkKind.CALL},
        hermes.bare_call,
        thinks_by_default=False,
        new_bare_call=hermes.bare_call,
    )
