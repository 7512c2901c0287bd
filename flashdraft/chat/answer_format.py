"""How one model writes its answers, found out once per tokenizer and passed on.

The format itself is chosen in families.py. Everything else about thoughts and calls asks the
`AnswerFormat`: what reads an answer as it streams, and which grammar an answer must follow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flashdraft.chat.answers.deltas import PlainParser, ResponseParser
from flashdraft.chat.answers.machine import MarkedParser
from flashdraft.chat.answers.marks import AnswerMarks, MarkKind
from flashdraft.chat.families import family_of
from flashdraft.chat.grammar.forms import form_grammar
from flashdraft.chat.grammar.tools import AUTO, CallGrammar, tool_grammar
from flashdraft.chat.schema.reading import tool_functions
from flashdraft.core import GrammarSpec
from flashdraft.models.tokenizer import Tokenizer

_MAX_TAIL = 4096  # tokens of the prompt's end that are looked at


@dataclass(frozen=True)
class AnswerFormat:
    """The format of a model's answers, told by its tokenizer and its template."""

    tokenizer: Tokenizer
    marks: AnswerMarks | None  # None: it marks neither thoughts nor calls
    call_grammar: CallGrammar
    told_marks: AnswerMarks | None = None  # where the prompt tells of tools: with calls' marks

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> AnswerFormat:
        """Find out which format a tokenizer's model has."""
        return cls(tokenizer, *family_of(tokenizer))

    @property
    def marks_thoughts(self) -> bool:
        """Whether the model's thoughts can be told from its answer."""
        return self.marks is not None and MarkKind.THINK in self.marks.spellings

    @property
    def thinks_by_default(self) -> bool:
        """Whether the model thinks where its template is not told: Gemma 4 does not, Qwen3 does."""
        return self.marks is not None and self.marks.thinks_by_default

    def open_thought(self, prompt_ids: Sequence[int]) -> str | None:
        """The text of a thought that the prompt begins and does not end; None where none is."""
        if self.marks is None or MarkKind.THINK not in self.marks.spellings:
            return None
        tail = list(prompt_ids[-_MAX_TAIL:])
        special, thinks = self.tokenizer.special_ids, (MarkKind.THINK, MarkKind.END_THINK)
        for place in range(len(tail) - 1, -1, -1):
            # any other special token parts the answer from what stood before it
            if tail[place] in special and self.marks.tokens.get(tail[place]) not in thinks:
                tail = tail[place + 1 :]
                break
        text = self.tokenizer.decode(tail, skip_special=False)
        _, opener, rest = text.rpartition(self.marks.spellings[MarkKind.THINK])
        return rest if opener and self.marks.spellings[MarkKind.END_THINK] not in rest else None

    def parser(
        self, prompt_ids: Sequence[int], tools: Sequence[Mapping[str, Any]] | None
    ) -> ResponseParser:
        """The parser of one answer; without tools a call is content, as the model wrote it."""
        marks = self.told_marks if tools and self.told_marks is not None else self.marks
        if marks is None:
            return PlainParser()
        return MarkedParser(marks, tool_functions(tools), self.open_thought(prompt_ids))

    def tool_grammar(
        self,
        tools: Sequence[Mapping[str, Any]],
        choice: str,
        parallel: bool,
        prompt_ids: Sequence[int] = (),
        thinking: bool = True,
    ) -> GrammarSpec:
        """The grammar of an answer that calls tools; see grammar/tools.py for what they mean.

        `prompt_ids` tell whether the prompt left a thought open. A model that was only told of
        calls and must make one makes one: nothing has taught it to end a list of them, and where
        its tokens end it, clients end their loops.
        """
        is_open = self.open_thought(prompt_ids) is not None
        parallel = parallel and (choice == AUTO or self.told_marks is None)
        return tool_grammar(self.call_grammar, tools, choice, parallel, is_open, thinking)

    def form_grammar(
        self,
        form: GrammarSpec,
        prompt_ids: Sequence[int],
        thinking: bool,
        calls: GrammarSpec | None = None,
    ) -> GrammarSpec:
        """A form, after thoughts that stay free where the model is to think, or `calls` instead."""
        return form_grammar(form, self._free_thoughts(prompt_ids, thinking), calls)

    def _free_thoughts(self, prompt_ids: Sequence[int], thinking: bool) -> str:
        """What may stand before a form, as the beginning of a Lark rule; "" where nothing may."""
        if self.marks is None or MarkKind.THINK not in self.marks.spellings:
            return ""
        is_open = self.open_thought(prompt_ids) is not None
        if not (thinking or is_open):
            return ""
        ids = {mark: index for index, mark in self.marks.tokens.items()}
        if MarkKind.THINK not in ids or MarkKind.END_THINK not in ids:
            return ""  # marks that are plain text cannot be told from the form's own
        begin, end = f"<[{ids[MarkKind.THINK]}]>", f"<[{ids[MarkKind.END_THINK]}]>"
        return f"ANY_THOUGHT? {end}" if is_open else f"({begin} ANY_THOUGHT? {end})?"
