"""Which family's format a model writes its answers in: the one place where it is chosen."""

from __future__ import annotations

from typing import NamedTuple

from flashdraft.chat.answers import gemma4, hermes, llama3, qwen3_coder
from flashdraft.chat.answers.marks import AnswerMarks, MarkKind
from flashdraft.chat.grammar.gemma4 import GemmaCallGrammar
from flashdraft.chat.grammar.hermes import HermesCallGrammar
from flashdraft.chat.grammar.llama3 import Llama3CallGrammar
from flashdraft.chat.grammar.qwen3_coder import QwenCallGrammar
from flashdraft.chat.grammar.tools import CallGrammar
from flashdraft.models.tokenizer import Tokenizer


class Family(NamedTuple):
    """How answers are read, and how calls that must come are written."""

    marks: AnswerMarks | None  # None: it marks neither thoughts nor calls
    call_grammar: CallGrammar
    told_marks: AnswerMarks | None = None  # where the prompt tells of tools: with calls' marks


def family_of(tokenizer: Tokenizer) -> Family:
    """Find out which format a tokenizer's model has."""
    if gemma4.knows(tokenizer):
        return Family(gemma4.answer_marks(tokenizer), GemmaCallGrammar(tokenizer))
    if llama3.knows(tokenizer):
        return Family(llama3.answer_marks(tokenizer), Llama3CallGrammar(tokenizer))
    if qwen3_coder.knows(tokenizer):
        marks = qwen3_coder.answer_marks(tokenizer)
        return Family(marks, QwenCallGrammar(tokenizer, marks.spellings))
    own = hermes.answer_marks(tokenizer)
    if MarkKind.CALL in own.spellings:
        return Family(own, HermesCallGrammar(tokenizer, own.spellings))
    told = hermes.answer_marks(tokenizer, is_told=True)
    calls = HermesCallGrammar(tokenizer, told.spellings, reads_bare=True)
    return Family(own if own.spellings else None, calls, told)
