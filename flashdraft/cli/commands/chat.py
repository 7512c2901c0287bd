"""`flashdraft chat`: a conversation in the terminal, or with lines piped in.

Ctrl-C ends an answer early and keeps what was said; Ctrl-D or /exit leaves. In a terminal an error
ends its turn only; from a pipe it ends the command.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from flashdraft.cli.answer import ShownAnswer, show_answer
from flashdraft.cli.arguments import model_sampling, sampling_params
from flashdraft.cli.conversation import Conversation, Message, Turn
from flashdraft.cli.display import AnswerView, DraftColours, Screen
from flashdraft.cli.model import describe_model, load_model, require_template
from flashdraft.cli.parser import in_flags
from flashdraft.cli.statistics import Totals, describe_briefly, describe_fully, describe_histogram
from flashdraft.core import FinishReason, SamplingParams
from flashdraft.errors import FlashdraftError, RequestError
from flashdraft.interrupts import interrupt_between_steps
from flashdraft.llm import LLM

PROMPT = "> "
HELP = """\
/stats          the last answer's statistics, and the session's
/colour on|off  colour tokens by whether they were drafted or chosen by the target
/system [TEXT]  set the system prompt, or remove it
/undo           take the last turn back
/reset          forget every turn; the system prompt stays
/save FILE      write the conversation: .json as messages, else as text
/help           this list
/exit           leave (Ctrl-D too); Ctrl-C ends an answer early"""
_COMMAND = re.compile(r"/([a-z]+)(?:\s+(.*))?", re.DOTALL)


def run(arguments: argparse.Namespace) -> int:
    """Talk until the user leaves."""
    sampling_params(arguments)  # a wrong flag is reported before the model is loaded
    llm = load_model(arguments)
    require_template(llm)
    params = sampling_params(arguments, model_sampling(llm.generation_config))
    chat = Chat(llm, params, Screen.detect(), Conversation(arguments.system), arguments.flags)
    if sys.stdin.isatty():
        chat.talk_in_terminal()
    else:
        chat.talk_through_pipe()
    return 0


class Chat:
    """A conversation with a model."""

    def __init__(
        self,
        llm: LLM,
        params: SamplingParams,
        screen: Screen,
        conversation: Conversation,
        flags: Mapping[str, str] | None = None,
    ) -> None:
        self._flags = flags or {}  # as errors are to name them
        self._llm = llm
        self._params = params
        self._screen = screen
        self._conversation = conversation
        self._in_colours = False
        self._last: ShownAnswer | None = None
        self._totals = Totals()
        self._commands: dict[str, Callable[[str], None]] = {
            "help": lambda _: self._screen.note(HELP),
            "stats": lambda _: self._show_stats(),
            "colour": self._set_colours,
            "system": self._set_system,
            "undo": lambda _: self._undo(),
            "reset": lambda _: self._reset(),
            "save": self._save,
        }

    def talk_in_terminal(self) -> None:
        """Prompt for lines until Ctrl-D or /exit; errors end their turn only."""
        with contextlib.suppress(ImportError):  # not on every system
            importlib.import_module("readline")  # gives input() line editing and a history
        self._screen.note(self._introduction())
        prompt = PROMPT if sys.stdout.isatty() else ""
        while True:
            try:
                line = input(prompt)
            except EOFError:
                self._screen.note("")
                return
            except KeyboardInterrupt:
                self._screen.note("\nCtrl-D or /exit leaves.")
                continue
            try:
                if not self.take(line):
                    return
            except FlashdraftError as error:
                self._screen.note(f"flashdraft: error: {in_flags(error, self._flags)}")

    def talk_through_pipe(self) -> None:
        """Take lines from stdin until they end or say /exit."""
        try:
            for line in sys.stdin:
                if not self.take(line.rstrip("\n")):
                    return
        except UnicodeDecodeError as error:
            raise RequestError(f"A line on stdin is not valid text: {error}.") from None

    def take(self, line: str) -> bool:
        """Answer a line, or do what it commands; False if it says to leave."""
        line = line.strip()
        match = _COMMAND.fullmatch(line)
        if match is None:
            if line:
                self._answer(line)
            return True
        name, argument = match[1], (match[2] or "").strip()
        if name == "exit":
            return False
        if name not in self._commands:
            raise RequestError(f"There is no command /{name}; /help lists them.")
        self._commands[name](argument)
        return True

    # -- answers -------------------------------------------------------------------------------

    def _answer(self, question: str) -> None:
        conversation = self._conversation
        conversation.turns.append(Turn(question))
        try:
            answer = self._show_answer()
        except BaseException:  # also when the user leaves: an unanswered turn is not history
            conversation.undo()
            raise
        conversation.turns[-1].answer = answer.text
        interrupted = answer.generation is None
        self._last = answer
        self._totals.add(answer.num_tokens, answer.stats, interrupted)
        summary = describe_briefly(answer.num_tokens, answer.stats)
        self._screen.note(f"[{summary}{self._ending(answer)}]")

    def _show_answer(self) -> ShownAnswer:
        context = self._llm.engine.max_context
        room = min(self._params.max_tokens or context, context // 2)  # for the answer
        dropped = self._conversation.fit(self._count_tokens, context - room)
        if dropped:
            turns = "turn was" if dropped == 1 else f"{dropped} turns were"
            self._screen.note(
                f"The context of {context} tokens is full: the oldest {turns} left out."
            )
        prompt = self._llm.chat_prompt(self._conversation.prompt())
        colours = None
        if self._in_colours and self._llm.tokenizer is not None:
            colours = DraftColours(self._llm.tokenizer)
        view = AnswerView(self._screen, colours=colours)
        with interrupt_between_steps() as is_stopped:
            return show_answer(self._llm.stream(prompt, self._params), view, is_stopped)

    def _count_tokens(self, messages: list[Message]) -> int:
        return len(self._llm.chat_prompt(messages))

    def _ending(self, answer: ShownAnswer) -> str:
        """What the user should know about how the answer ended."""
        if answer.generation is None:
            return " · interrupted"
        if answer.generation.finish_reason is FinishReason.LENGTH:
            if answer.num_tokens < (self._params.max_tokens or self._llm.engine.max_context):
                return " · cut short: the context is full"
            return f" · cut short: --max-tokens {self._params.max_tokens}"
        return "" if answer.text else " · empty answer"

    def _introduction(self) -> str:
        return (
            f"{describe_model(self._llm)} · context {self._llm.engine.max_context} tokens\n"
            "/help lists commands, Ctrl-D leaves"
        )

    # -- commands ------------------------------------------------------------------------------

    def _show_stats(self) -> None:
        if self._last is None:
            self._screen.note("No answer yet.")
            return
        stats, num_tokens = self._last.stats, self._last.num_tokens
        if self._last.generation is None:
            last = f"{describe_briefly(num_tokens, stats)} · interrupted"
        else:
            last = describe_fully(num_tokens, stats)
        self._screen.note(f"last answer\n{last}\n{describe_histogram(stats)}")
        self._screen.note(
            f"session\n{self._totals.describe()}\n{describe_histogram(self._totals.stats)}"
        )

    def _set_colours(self, argument: str) -> None:
        if argument not in ("on", "off"):
            raise RequestError(f"/colour takes on or off, not {argument!r}.")
        if argument == "on" and not self._screen.has_colours:
            raise RequestError(
                "Colours need a terminal that has them, on stdout, and NO_COLOR not set."
            )
        self._in_colours = argument == "on"
        self._screen.note(self._screen.legend() if self._in_colours else "Colours are off.")

    def _set_system(self, argument: str) -> None:
        self._conversation.system = argument or None
        self._screen.note(f"System prompt {'set' if argument else 'removed'}.")

    def _undo(self) -> None:
        turn = self._conversation.undo()
        self._screen.note("Nothing to undo." if turn is None else f"Took back: {turn.question}")

    def _reset(self) -> None:
        self._conversation.reset()
        self._screen.note("Conversation forgotten.")

    def _save(self, argument: str) -> None:
        if not argument:
            raise RequestError("/save needs a file name.")
        path = Path(argument).expanduser()
        self._conversation.save(path)
        self._screen.note(f"Saved to {path}.")
