"""The state machine that tells an answer's thoughts, text and tool calls apart.

One machine serves every family: `AnswerMarks` has the spellings and the reader of calls. A mark
that is a special token counts wherever it stands; one that is plain text counts only where the
format expects it, because an answer may as well speak of it.

Malformed answers never raise. A call whose head cannot be read (no name, no arguments) is given
back as content, marks included; once its arguments have begun, it is a call, and they are closed
into valid JSON however it ends.

Some models call without marks: an object that begins an answer, or follows a call, is held back
until its reader can tell whether it is a call, and not a character longer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto
from typing import Any

from flashdraft.chat.answers.deltas import (
    Content,
    Delta,
    Reasoning,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallEnd,
    join_deltas,
)
from flashdraft.chat.answers.marks import AnswerMarks, CallReader, MarkKind

_NEWLINES = "\r\n"
_MAX_LEADING_SPACE = 1024  # longer white space at the answer's start is content
_AFTER_CALL = " \t\r\n}]),;"  # what may stand between a call's last bracket and its end mark
_BARE = ("{", "[")  # what a call without marks begins with


class _State(Enum):
    START = auto()  # nothing but white space so far
    FRESH = auto()  # the same after a thought or a call, where a call without marks may stand
    CONTENT = auto()
    LABEL = auto()  # at a thought's beginning, where its label may stand
    REASONING = auto()
    CALL = auto()
    AFTER_CALL = auto()  # the brackets are closed, the end mark is due
    RAW = auto()  # inside a call that is given back as content


class MarkedParser:
    """A `ResponseParser` for answers with marks."""

    def __init__(
        self, marks: AnswerMarks, functions: Mapping[str, Any], thought: str | None = None
    ) -> None:
        """Without functions a call is content.

        `thought` is what the prompt left open of a thought, None where it left none open.
        """
        self._marks = marks
        self._functions = functions
        self._text = ""  # not consumed yet
        self._deltas: list[Delta] = []
        self._state = _State.START
        self._skips_newlines = False
        self._newlines = ""  # at the end of the thoughts so far
        self._has_reasoned = False
        self._call: CallReader | None = None
        self._raw: list[str] = []  # the call's own text, until it is known to be one
        self._num_calls = 0
        self._new_bare_call = marks.new_bare_call if functions else None
        self._fresh = _State.CONTENT if self._new_bare_call is None else _State.FRESH
        call_marks = (MarkKind.CALL,) if functions else ()
        unmarked = dict.fromkeys(marks.unmarked_calls, MarkKind.CALL) if functions else {}
        self._live = {
            _State.START: {**marks.openings, **marks.text_marks(*call_marks), **unmarked},
            _State.FRESH: {**marks.text_marks(*call_marks), **unmarked},
            _State.CONTENT: {**marks.text_marks(*call_marks), **unmarked},
            _State.LABEL: marks.text_marks(MarkKind.END_THINK),
            _State.REASONING: marks.text_marks(MarkKind.END_THINK),
            _State.CALL: marks.text_marks(*call_marks, MarkKind.END_CALL),
            _State.AFTER_CALL: {**marks.text_marks(*call_marks, MarkKind.END_CALL), **unmarked},
            _State.RAW: {**marks.text_marks(*call_marks, MarkKind.END_CALL), **unmarked},
        }
        self._label = marks.label
        if thought is not None:
            self._think()
            if marks.label.startswith(thought):
                self._label = marks.label[len(thought) :]
            if self._label == "" or thought not in marks.label:
                self._state = _State.REASONING
            self._skips_newlines = not thought.removeprefix(marks.label).strip(_NEWLINES)

    def push(self, pieces: Sequence[str | int]) -> list[Delta]:
        for piece in pieces:
            if isinstance(piece, str):
                self._text += piece
                self._drain(is_final=False)
            elif piece in self._marks.tokens:
                mark = self._marks.tokens[piece]
                is_start = self._state in (_State.START, _State.FRESH)
                if is_start and mark in (MarkKind.THINK, MarkKind.CALL):
                    self._text = self._text.strip()
                self._drain(is_final=True)
                self._take_mark(mark)
        return self._take()

    def finish(self) -> list[Delta]:
        self._drain(is_final=True)
        if self._call is not None:
            self._end_call(is_complete=False)
        return self._take()

    # Text

    def _drain(self, is_final: bool) -> None:
        """Consume the text as far as it is decided; all of it where no more can join it."""
        position = 0
        while position < len(self._text):
            step = _STEPS[self._state]
            reached = step(self, position, is_final)
            if reached is None:
                break
            position = reached
        self._text = self._text[position:]

    def _find_mark(self, start: int, is_final: bool) -> tuple[int, str | None]:
        """Where the next live mark begins and its spelling; or how far there certainly is none."""
        live = self._live[self._state]
        if not live:
            return len(self._text), None
        places = [(self._text.find(spelling, start), spelling) for spelling in live]
        found = min((place for place in places if place[0] >= 0), default=None)
        if found is not None:
            return found
        return (len(self._text) if is_final else self._held_from(start, live)), None

    def _held_from(self, start: int, spellings: Mapping[str, MarkKind]) -> int:
        """Where an unfinished mark at the text's end may begin."""
        longest = max(map(len, spellings))
        for place in range(max(start, len(self._text) - longest + 1), len(self._text)):
            if any(spelling.startswith(self._text[place:]) for spelling in spellings):
                return place
        return len(self._text)

    def _mark_at(self, position: int, is_final: bool) -> tuple[str | None, bool]:
        """The live mark that begins right here, and whether one may still turn out to."""
        live = self._live[self._state]
        for spelling in live:
            if self._text.startswith(spelling, position):
                return spelling, False
        rest = self._text[position : position + 32]
        return None, not is_final and any(spelling.startswith(rest) for spelling in live)

    def _read_start(self, position: int, is_final: bool) -> int | None:
        begin = position
        limit = min(len(self._text), position + _MAX_LEADING_SPACE)
        while begin < limit and self._text[begin].isspace():
            begin += 1
        if begin == position + _MAX_LEADING_SPACE:
            self._state = _State.CONTENT
            return position
        if begin == len(self._text) and not is_final:
            return None
        spelling, is_open = self._mark_at(begin, is_final)
        if is_open:
            return None
        if spelling is None:
            space = self._text[position:begin]
            if self._skips_newlines:
                space = space.lstrip(_NEWLINES)
            if self._begins_bare_call(begin, space):
                return begin
            self._state = _State.CONTENT
            return position
        mark = self._live[self._state][spelling]
        reached = self._take_spelling(spelling, begin)
        if mark is MarkKind.THINK and spelling != self._marks.spellings[mark]:
            self._state = _State.REASONING  # the opening was the label itself
        return reached

    def _read_content(self, position: int, is_final: bool) -> int | None:
        end, spelling = self._find_mark(position, is_final)
        text = self._text[position:end]
        if self._skips_newlines:
            text = text.lstrip(_NEWLINES)
            self._skips_newlines = not text
        self._emit_content(text)
        if spelling is None:
            return end if end > position else None
        return self._take_spelling(spelling, end)

    def _read_label(self, position: int, is_final: bool) -> int | None:
        rest = self._text[position:]
        if rest.startswith(self._label):
            self._state = _State.REASONING
            return position + len(self._label)
        if self._label.startswith(rest) and not is_final:
            return None
        self._state = _State.REASONING
        # "thought" alone, without its newline, is a label too
        return position + (len(rest) if rest == self._label.rstrip(_NEWLINES) else 0)

    def _read_reasoning(self, position: int, is_final: bool) -> int | None:
        end, spelling = self._find_mark(position, is_final)
        text = self._text[position:end]
        if self._skips_newlines:
            text = text.lstrip(_NEWLINES)
            self._skips_newlines = not text
        body = text.rstrip(_NEWLINES)
        if body:
            self._emit(Reasoning(self._newlines + body))
            self._newlines = ""
        self._newlines += text[len(body) :]
        if spelling is None:
            return end if end > position else None
        self._take_mark(self._live[_State.REASONING][spelling])
        return end + len(spelling)

    def _read_call(self, position: int, is_final: bool) -> int | None:
        call = self._call
        assert call is not None
        if not call.in_string:
            spelling, is_open = self._mark_at(position, is_final)
            if is_open:
                return None
            if spelling is not None:
                self._take_mark(self._live[_State.CALL][spelling])
                return position + len(spelling)
        end = call.feed(self._text, position)
        if call.failed:
            self._give_back()
            return position  # read again: content may have marks
        if not self._begun:
            self._raw.append(self._text[position:end])
        self._show_call()
        return end

    def _read_after_call(self, position: int, is_final: bool) -> int | None:
        spelling, is_open = self._mark_at(position, is_final)
        if is_open:
            return None
        if spelling is not None:
            return self._take_spelling(spelling, position)
        if self._text[position] in _AFTER_CALL:
            return position + 1
        if not self._begins_bare_call(position, ""):
            self._state = _State.CONTENT
        return position

    # Marks

    def _take_spelling(self, spelling: str, place: int) -> int:
        """Take a mark that is text; where to read on."""
        if spelling not in self._marks.unmarked_calls:
            self._take_mark(self._live[self._state][spelling])
            return place + len(spelling)
        self._leave()
        self._raw, self._state = [], _State.CALL
        self._call = self._marks.unmarked_calls[spelling](self._functions)
        return place  # what it begins with is the call's own

    def _take_mark(self, mark: MarkKind) -> None:
        match mark:
            case MarkKind.THINK:
                self._leave()
                self._think()
            case MarkKind.END_THINK:
                if self._state in (_State.LABEL, _State.REASONING):
                    self._leave()
                    self._state = self._fresh
            case MarkKind.CALL:
                self._leave()
                self._begin_call()
            case MarkKind.END_CALL:
                if self._state in (_State.RAW, _State.CALL, _State.AFTER_CALL):
                    self._leave()
                    self._skips_newlines = self._state is not _State.RAW
                    if self._state is _State.RAW:
                        self._emit_content(self._marks.spellings[mark])
                    self._state = _State.CONTENT if self._state is _State.RAW else self._fresh
            case MarkKind.QUOTE:
                if self._call is not None:
                    if not self._begun:
                        self._raw.append(self._marks.spellings[mark])
                    self._call.quote()
                    self._show_call()
                elif self._state is _State.RAW:
                    self._emit_content(self._marks.spellings[mark])

    def _leave(self) -> None:
        """End what is under way before something else begins."""
        if self._call is not None:
            self._end_call(is_complete=True)
        self._skips_newlines = self._state in (_State.LABEL, _State.REASONING)
        self._newlines = ""

    def _think(self) -> None:
        self._label = self._marks.label
        self._state = _State.LABEL if self._label else _State.REASONING
        self._skips_newlines = True
        self._newlines = "\n" if self._has_reasoned else ""  # between two thoughts

    # Calls

    @property
    def _begun(self) -> bool:
        return self._call is not None and self._call.name is not None

    def _begin_call(self) -> None:
        self._raw = [self._marks.spellings[MarkKind.CALL]]
        if not self._functions:
            self._give_back()
        else:
            self._state = _State.CALL
            self._call = self._marks.new_call(self._functions)

    def _begins_bare_call(self, position: int, space: str) -> bool:
        """Whether what stands here may be a call without marks; `space` before it is its own."""
        if self._new_bare_call is None or self._text[position : position + 1] not in _BARE:
            return False
        self._raw = [space]
        self._state = _State.CALL
        self._call = self._new_bare_call(self._functions)
        return True

    def _give_back(self) -> None:
        """What was read of a call is content after all."""
        self._call = None
        self._state = _State.RAW
        self._skips_newlines = False
        self._emit_content("".join(self._raw))
        self._raw = []

    def _end_call(self, is_complete: bool) -> None:
        assert self._call is not None
        self._call.close(is_complete)
        self._show_call()

    def _show_call(self) -> None:
        """Hand on what the reader has decided."""
        call = self._call
        assert call is not None
        if call.failed:
            self._give_back()
            return
        if call.name is not None:
            if self._raw:
                self._raw = []
                self._emit(ToolCallBegin(self._num_calls, call.name))
            text = call.take()
            if text:
                self._emit(ToolCallArguments(self._num_calls, text))
        if call.done:
            self._emit(ToolCallEnd(self._num_calls))
            self._num_calls += 1
            self._call = None
            self._state = _State.AFTER_CALL

    # Deltas

    def _emit_content(self, text: str) -> None:
        if text:
            self._emit(Content(text))

    def _emit(self, delta: Delta) -> None:
        self._deltas.append(delta)
        self._has_reasoned |= isinstance(delta, Reasoning)

    def _take(self) -> list[Delta]:
        deltas, self._deltas = join_deltas(self._deltas), []
        return deltas


_Step = Callable[[MarkedParser, int, bool], int | None]
_STEPS: dict[_State, _Step] = {
    _State.START: MarkedParser._read_start,
    _State.FRESH: MarkedParser._read_start,
    _State.CONTENT: MarkedParser._read_content,
    _State.RAW: MarkedParser._read_content,
    _State.LABEL: MarkedParser._read_label,
    _State.REASONING: MarkedParser._read_reasoning,
    _State.CALL: MarkedParser._read_call,
    _State.AFTER_CALL: MarkedParser._read_after_call,
}
