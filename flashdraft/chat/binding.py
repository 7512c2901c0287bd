"""What an answer is bound to: the tools it may call, and the form that its text must have.

The one grammar of both is made here, for the server and for Python alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flashdraft.chat.answer_format import AnswerFormat
from flashdraft.chat.grammar.compiler import check_multiples
from flashdraft.chat.schema.bounding import bound_values
from flashdraft.chat.schema.closing import open_objects
from flashdraft.core import GrammarSpec
from flashdraft.errors import quoted

Tool = Mapping[str, Any]


@dataclass(frozen=True)
class ToolUse:
    """Which tools the model is told of, and whether it must call one."""

    tools: tuple[Tool, ...] = ()
    choice: str = "auto"  # "auto", "none", "required", or a function's name
    parallel: bool = True

    @property
    def offered(self) -> list[Tool] | None:
        """The tools for the prompt and the parser."""
        return list(self.tools) if self.tools and self.choice != "none" else None

    @property
    def is_forced(self) -> bool:
        return self.choice not in ("auto", "none")

    @property
    def wrong_choice(self) -> str | None:
        """What is wrong with the choice, in words."""
        names = [tool["function"].get("name") for tool in self.tools]
        if not self.is_forced or (self.choice == "required" and names) or self.choice in names:
            return None
        if not names:
            return "tool_choice asks for a call, but there are no tools."
        return (
            f"tool_choice is {quoted(self.choice)}; it must be 'auto', 'none', 'required', or the "
            "name of one of the tools."
        )

    @property
    def is_strict(self) -> bool:
        """Whether a tool asks that calls of it follow its schema even where none is forced."""
        return any(tool["function"].get("strict") for tool in self.offered or ())


def bound_grammar(
    answer_format: AnswerFormat,
    tool_use: ToolUse,
    form: GrammarSpec | None,
    prompt_ids: Sequence[int],
    thinking: bool | None,
    max_tokens: int,
    has_open_objects: bool = False,
) -> GrammarSpec | None:
    """The one grammar of an answer: that of its form, of the calls it may or must make, or both.

    Where it says nothing of `thinking`, the model does as it is used to. `max_tokens`: about how
    long an answer may be.
    """
    thinks = answer_format.thinks_by_default if thinking is None else thinking
    tools = tool_use.tools
    if has_open_objects:
        tools = tuple(map(_with_open_objects, tools))
    if answer_format.told_marks is not None:  # nothing has taught the model to end a call
        tools = tuple(_with_bounds(tool, max_tokens) for tool in tools)
    is_strict = tool_use.is_strict
    if tool_use.is_forced or is_strict or form is not None:
        check_multiples(tool_use.offered)
    if tool_use.is_forced or (is_strict and form is None):
        return answer_format.tool_grammar(
            tools, tool_use.choice, tool_use.parallel, prompt_ids, thinks
        )
    if form is None:
        return None
    calls = None
    if tool_use.offered:
        calls = answer_format.tool_grammar(tools, "required", tool_use.parallel, prompt_ids, thinks)
    return answer_format.form_grammar(form, prompt_ids, thinks, calls)


def _with_open_objects(tool: Tool) -> Tool:
    """A tool whose arguments may be more than it declares; a strict one stays as it is."""
    function = tool["function"]
    if function.get("strict"):
        return tool
    return {
        **tool,
        "function": {**function, "parameters": open_objects(function.get("parameters"))},
    }


def _with_bounds(tool: Tool, max_tokens: int) -> Tool:
    """A tool whose texts and lists end, in the grammar; the prompt has them as they came."""
    function = tool["function"]
    bounded = bound_values(function.get("parameters"), max_tokens)
    return {**tool, "function": {**function, "parameters": bounded}}
