"""What is typed in a chat: questions, which are answered, and commands, which begin with a slash.

Ctrl-D, /bye, /exit or /quit leaves. In a terminal an error ends its turn only; from a pipe it ends
the command.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from flashdraft.cli.chat.conversation import Turn
from flashdraft.cli.chat.lines import LineJoiner, Typed, line_editing, piped_lines
from flashdraft.cli.chat.saved import load_chat, save_chat
from flashdraft.cli.chat.settings import (
    change_setting,
    describe_setting,
    describe_settings,
    settings_of,
    take_settings,
)
from flashdraft.cli.chat.talk import Talk
from flashdraft.cli.display import Screen
from flashdraft.cli.input import checked_text
from flashdraft.cli.model import describe_model
from flashdraft.cli.parser import in_flags
from flashdraft.cli.pictures import read_picture, typed_path
from flashdraft.errors import FlashdraftError, RequestError, did_you_mean, printable, quoted
from flashdraft.media.kinds import FILM, PDF, PICTURE

PROMPT, GOING_ON = "> ", "... "
LEAVING = ("bye", "exit", "quit")
HELP = '''\
/set [NAME VALUE]  the settings, or change one: /set temperature 0.8
/system [TEXT]     set the system prompt, or remove it
/image [FILE]      show the next question a picture, a PDF or a film; several times; without FILE,
                   none
/undo              take the last turn back
/reset, /clear     forget every turn; the system prompt stays
/save FILE         write the conversation: .json to be loaded again, else as text
/load FILE         go on with a conversation that /save wrote as .json
/stats             the last answer's statistics, and the session's
/colour on|off     colour tokens by whether they were drafted or chosen by the target
/help              this list
/bye, /exit, /quit leave, as Ctrl-D does

""" begins and ends a text of several lines; a line with \\ at its end goes on in the next.
Ctrl-C ends an answer early; what came of it stays.'''
_COMMAND = re.compile(r"/([a-z]+|\?)(?:\s+(.*))?", re.DOTALL)
_ELSEWHERE = {"show": "/set lists the settings, /help the commands."}  # as Ollama has it
_SHOWN = 60  # characters of a question in a note


class Chat:
    """Somebody types, or a pipe does."""

    def __init__(self, talk: Talk, screen: Screen, flags: Mapping[str, str] | None = None) -> None:
        self._flags = flags or {}  # as errors are to name them
        self._talk = talk
        self._initial = talk.params
        self._screen = screen
        self._lines = LineJoiner()
        self._may_replace = set[Path]()  # files that were written here, or are to be replaced
        self._commands: dict[str, Callable[[str], None]] = {
            "help": lambda _: self._screen.note(HELP),
            "stats": lambda _: talk.show_statistics(),
            "colour": self._set_colours,
            "set": self._set,
            "system": self._set_system,
            "image": self._add_picture,
            "undo": lambda _: self._undo(),
            "reset": lambda _: self._reset(),
            "clear": lambda _: self._reset(),
            "save": self._save,
            "load": self._load,
        }

    def talk_in_terminal(self) -> None:
        """Prompt for lines until somebody leaves; errors end their turn only."""
        self._screen.note(self._introduction())
        is_shown = sys.stdout.isatty()
        with line_editing():
            while True:
                prompt = GOING_ON if self._lines.is_waiting else PROMPT
                try:
                    line = input(prompt if is_shown else "")
                except EOFError:
                    self._screen.note("")
                    if not self._lines.is_waiting:
                        return
                    self._drop_lines()
                    continue
                except KeyboardInterrupt:
                    self._screen.note("")
                    self._drop_lines()
                    continue
                try:
                    if not self.take(line):
                        return
                except FlashdraftError as error:
                    self._screen.note(f"flashdraft: error: {in_flags(error, self._flags)}")

    def talk_through_pipe(self) -> None:
        """Take lines from stdin until they end or say to leave."""
        for line in piped_lines():
            if not self.take(line):
                return
        last = self._lines.end()
        if last is not None:
            self._take_whole(last)

    def take(self, line: str) -> bool:
        """Answer a line, or do what it commands; False if it says to leave."""
        whole = self._lines.push(line)
        return True if whole is None else self._take_whole(whole)

    def _take_whole(self, typed: Typed) -> bool:
        text = checked_text(typed.text.strip(), "What was typed")
        match = None if typed.is_question else _COMMAND.fullmatch(text)
        if match is None:
            if text:
                self._talk.ask(text)
            return True
        name, argument = match[1].replace("?", "help"), (match[2] or "").strip()
        if name in LEAVING:
            return False
        if name not in self._commands:
            meant = did_you_mean(name, (*self._commands, *LEAVING))
            listed = _ELSEWHERE.get(name, "/help lists them.")
            raise RequestError(f"There is no command /{name}.{meant} {listed}")
        self._commands[name](argument)
        return True

    def _drop_lines(self) -> None:
        if self._lines.is_waiting:
            self._lines.drop()
            self._screen.note("What was begun is dropped.")
        else:
            self._screen.note("Ctrl-D or /bye leaves.")

    def _introduction(self) -> str:
        llm = self._talk.llm
        return (
            f"{describe_model(llm)} · context {llm.engine.max_context} tokens\n"
            "/help lists commands, Ctrl-D leaves"
        )

    # -- commands ------------------------------------------------------------------------------

    def _set_colours(self, argument: str) -> None:
        if argument not in ("on", "off"):
            raise RequestError(f"/colour takes on or off, not {quoted(argument)}.")
        if argument == "on" and not self._screen.has_colours:
            raise RequestError(
                "Colours need a terminal that has them, on stdout, and NO_COLOR not set."
            )
        self._talk.in_colours = argument == "on"
        self._screen.note(self._screen.legend() if self._talk.in_colours else "Colours are off.")

    def _set(self, argument: str) -> None:
        if argument:
            self._talk.params = change_setting(self._talk.params, argument, self._initial)
            self._screen.note(describe_setting(self._talk.params, argument))
        else:
            self._screen.note(describe_settings(self._talk.params))

    def _set_system(self, argument: str) -> None:
        self._talk.conversation.system = argument or None
        self._screen.note(f"System prompt {'set' if argument else 'removed'}.")

    def _add_picture(self, argument: str) -> None:
        talk = self._talk
        if not argument:
            talk.pictures = []
            self._screen.note("The next question has no pictures.")
            return
        picture = read_picture(typed_path(argument), talk.picture_budget, kind=None)
        seen = talk.llm.chat_pictures([{"role": "user", "content": [picture.part()]}])
        talk.pictures.append(picture)
        name, count = printable(picture.path.name), len(talk.pictures)
        unit = {PICTURE: "", FILM: "frame", PDF: "page"}[picture.kind]
        held = f"{len(seen)} {unit}{'' if len(seen) == 1 else 's'}, " if unit else ""
        what = "picture" if all(one.kind is PICTURE for one in talk.pictures) else "file"
        self._screen.note(
            f"{name} goes with the next question: {held}"
            f"{sum(placed.picture.num_tokens for placed in seen)} tokens, "
            f"{count} {what}{'' if count == 1 else 's'} now."
        )

    def _undo(self) -> None:
        turn = self._talk.conversation.undo()
        self._screen.note("Nothing to undo." if turn is None else f"Took back: {_brief(turn)}")

    def _reset(self) -> None:
        self._talk.conversation.reset()
        self._talk.pictures = []
        self._screen.note("Conversation forgotten.")

    def _save(self, argument: str) -> None:
        path = _named_file("save", argument)
        place, is_there = path.resolve(), path.is_file()
        if is_there and place not in self._may_replace:
            self._may_replace.add(place)
            raise RequestError(f"{path} exists; the same /save once more replaces it.")
        talk = self._talk
        save_chat(path, talk.conversation, settings_of(talk.params), talk.llm.model)
        self._may_replace.add(place)
        self._screen.note(printable(f"{'Replaced' if is_there else 'Saved to'} {path}."))

    def _load(self, argument: str) -> None:
        saved = load_chat(_named_file("load", argument))
        talk, turns = self._talk, saved.conversation.turns
        if any(turn.pictures for turn in turns) and not talk.llm.sees_pictures:
            raise RequestError(
                f"{argument} has pictures, and the model sees none; take them out, or load it with "
                "a model that does."
            )
        talk.params = take_settings(talk.params, saved.settings)
        num_before = len(talk.conversation.turns)
        talk.conversation = saved.conversation
        said = f"Loaded {_count(len(turns))}{' and the settings' if saved.settings else ''}"
        if num_before:
            said += f"; the {_count(num_before)} before are forgotten"
        if saved.model is not None and saved.model != talk.llm.model:
            said += f"; the answers are {printable(saved.model)}'s"
        self._screen.note(said + (f". The last question: {_brief(turns[-1])}" if turns else "."))


def _named_file(command: str, argument: str) -> Path:
    if not argument:
        raise RequestError(f"/{command} needs a file name: /{command} talk.json.")
    try:
        path = Path(argument).expanduser()
        path.is_file()
        path.resolve()
    except (OSError, RuntimeError, ValueError) as error:  # too long, or of a user who is not there
        raise RequestError(f"{quoted(argument)} is no name of a file: {error}.") from None
    return path


def _count(num_turns: int) -> str:
    return f"{num_turns} turn{'' if num_turns == 1 else 's'}"


def _brief(turn: Turn) -> str:
    """A question's beginning, fit for a terminal."""
    text = printable(" ".join(turn.question[: 4 * _SHOWN].split()))
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"
