"""A conversation's answers: asked for with what fits of its history, shown as they come, counted.

An answer that Ctrl-C ends early stays in the history as far as it came; a question whose answer
failed does not.
"""

from __future__ import annotations

from flashdraft.cli.answer import ShownAnswer, describe_cut, show_answer
from flashdraft.cli.chat.conversation import Conversation, Message, Turn
from flashdraft.cli.display import AnswerView, DraftColours, Screen
from flashdraft.cli.pictures import PictureFile
from flashdraft.cli.statistics import Totals, describe_briefly, describe_fully, describe_histogram
from flashdraft.core import SamplingParams
from flashdraft.interrupts import interrupt_between_steps
from flashdraft.llm import LLM


class Talk:
    """A model, a conversation with it, and the settings that hold."""

    def __init__(
        self, llm: LLM, params: SamplingParams, screen: Screen, conversation: Conversation
    ) -> None:
        self.llm = llm
        self.params = params
        self.conversation = conversation
        self.pictures: list[PictureFile] = []  # of the next question
        self.picture_budget: int | None = None  # tokens; None: as is usual for the model
        self.in_colours = False
        self.more_room = "/set max-tokens"  # what gives an answer that was cut off more of it
        self._screen = screen
        self._last: ShownAnswer | None = None
        self._totals = Totals()

    def ask(self, question: str) -> None:
        """Answer a question, whatever it looks like."""
        conversation = self.conversation
        conversation.turns.append(Turn(question, pictures=tuple(self.pictures)))
        try:
            answer = self._show_answer()
        except BaseException:  # also when the user leaves: an unanswered turn is not history
            conversation.undo()
            raise
        conversation.turns[-1].answer = answer.text
        self.pictures = []  # of a question that was not answered they wait for the next one
        self._last = answer
        self._totals.add(answer.num_tokens, answer.stats, self.was_interrupted)
        summary = describe_briefly(answer.num_tokens, answer.stats)
        self._screen.note(f"[{summary}{self._ending(answer)}]")

    @property
    def was_interrupted(self) -> bool:
        """Whether the last answer was ended early."""
        return self._last is not None and self._last.generation is None

    def show_statistics(self) -> None:
        """Those of the last answer, and of all."""
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

    def _show_answer(self) -> ShownAnswer:
        context = self.llm.engine.max_context
        room = min(self.params.max_tokens or context, context // 2)  # for the answer
        dropped = self.conversation.fit(self._count_tokens, context - room)
        if dropped:
            turns = "turn was" if dropped == 1 else f"{dropped} turns were"
            self._screen.note(
                f"The context of {context} tokens is full: the oldest {turns} left out."
            )
        prompt = self.conversation.prompt()
        colours = None
        if self.in_colours and self.llm.tokenizer is not None:
            colours = DraftColours(self.llm.tokenizer)
        view = AnswerView(self._screen, colours=colours)
        with interrupt_between_steps() as is_stopped:
            return show_answer(self.llm.stream(prompt, self.params), view, is_stopped)

    def _count_tokens(self, messages: list[Message]) -> int:
        return len(self.llm.chat_prompt(messages))

    def _ending(self, answer: ShownAnswer) -> str:
        """What the user should know about how the answer ended."""
        if answer.generation is None:
            return " · interrupted"
        context = self.llm.engine.max_context
        cut = describe_cut(answer.generation, self.params, context, self.more_room)
        if cut is not None:
            return f" · cut off {cut.removesuffix('.')}"
        return "" if answer.text else " · empty answer"
