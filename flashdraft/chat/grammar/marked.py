"""The grammar around calls that stand between marks: thoughts, free text, one call or several.

Qwen's formats share the marks; what stands between them is for each format to say.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from flashdraft.chat.answers.marks import MarkKind
from flashdraft.chat.grammar.tools import NO_BARE_CALL
from flashdraft.models.tokenizer import Tokenizer

ANYTHING = "(?s:.+)"


class Call(NamedTuple):
    """A call between its marks, as bodies of Lark rules."""

    body: str
    rules: Sequence[str]  # that it refers to
    # Where a model forgets the mark: the text that such a call begins with, and the rest of it.
    unmarked: tuple[str, str] | None = None


class MarkedAnswers:
    """Writes grammars of answers with one tokenizer's marks."""

    def __init__(
        self, tokenizer: Tokenizer, spellings: Mapping[MarkKind, str], reads_bare: bool = False
    ) -> None:
        """`spellings` are the marks that the model knows, those of calls among them.

        `reads_bare`: calls without marks are read too; free text must not look like one.
        """
        self._spellings = spellings
        self._free = NO_BARE_CALL if reads_bare else ANYTHING
        self._ids = {mark: tokenizer.token_id(text) for mark, text in spellings.items()}

    def text(
        self, call: Call, *, is_free: bool, parallel: bool, is_open: bool, thinking: bool
    ) -> str:
        """A Lark grammar whose first line is its start rule; see grammar/tools.py for the rest."""
        begin, end = self._mark(MarkKind.CALL), self._mark(MarkKind.END_CALL)
        lines = [f'call: "\\n" {call.body} "\\n" {end}', *call.rules]
        start = ""
        if MarkKind.THINK in self._spellings:
            lines.append(f"thought: {self._mark(MarkKind.THINK)} thoughts")
            lines.append(self._until("thoughts", MarkKind.END_THINK, ANYTHING))
            start = "thoughts " if is_open else "thought? " if thinking or is_free else ""
        if is_free:
            lines.append(self._until("lead", MarkKind.CALL, self._free))
            lines.append(f"rest: /{self._free}/?")
            calls = "lead call"
            if call.unmarked is not None:
                opening, rest = call.unmarked
                lines.append(f"unmarked[lazy]: {_up_to(opening, self._free)}")
                calls += f' | unmarked {rest} ("\\n"? {end})?'
            body = f"({calls})* rest" if parallel else f"({calls} | rest)"
        else:
            more = f'("\\n" {begin} call)*' if parallel else ""
            body = f"SPACE? {begin} call {more}"
            lines.append("SPACE: /\\n{1,4}/")
        return "\n".join([f"start: {start}{body}", *lines])

    def _mark(self, mark: MarkKind) -> str:
        """A mark as the token that it is, special or not, else as text."""
        index = self._ids[mark]
        return json.dumps(self._spellings[mark]) if index is None else f"<[{index}]>"

    def _until(self, rule: str, mark: MarkKind, free: str) -> str:
        """A rule for free text up to a mark, the mark included."""
        if self._ids[mark] is None:
            return f"{rule}[lazy]: {_up_to(self._spellings[mark], free)}"
        return f"{rule}: /{free}/? {self._mark(mark)}"


def _up_to(text: str, free: str) -> str:
    """Free text that ends with this one; no character of it may mean something in a pattern."""
    return f"/(?:{free})?{text.replace('/', chr(92) + '/')}/"
