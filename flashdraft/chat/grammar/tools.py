"""The grammar of an answer that calls tools, in the model's own format, arguments by schema.

Thoughts before the call stay free. The grammar is a Lark one in llguidance's dialect, compiled
where the engine runs. How a family writes a call is for its `CallGrammar`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from flashdraft.chat.schema.reading import tool_functions
from flashdraft.core import GrammarSpec
from flashdraft.errors import RequestError

REQUIRED = "required"
AUTO = "auto"
# Text that cannot be read as a call without marks: after white space, of which Python knows more
# than regular expressions, no bracket. Not empty.
NO_BARE_CALL = r"(?s:[\s\x1c-\x1f]+|[\s\x1c-\x1f]*[^\s\x1c-\x1f{\[].*)"


class CallGrammar(Protocol):
    """Writes the grammars of one model's calls."""

    def text(
        self,
        functions: Mapping[str, Any],
        *,
        is_free: bool,
        parallel: bool,
        is_open: bool,
        thinking: bool,
    ) -> str:
        """A Lark grammar whose first line is its start rule.

        `functions` are the parameters' schemas by name. `is_free`: the answer need not call.
        `is_open`: the prompt left a thought open.
        """
        ...


def tool_grammar(
    calls: CallGrammar,
    tools: Sequence[Mapping[str, Any]],
    choice: str,
    parallel: bool,
    is_open: bool,
    thinking: bool,
) -> GrammarSpec:
    """The grammar of an answer that makes a call: of any tool ("required") or of the one named.

    One that is named is called once, whatever `parallel` says: who names it waits for one call.
    "auto" leaves the answer free until it begins a call; there, tools that are not `strict` take
    any arguments. `is_open`: the prompt left a thought open. Without `thinking` a call that must
    come has no other thought before it, which could take all the answer's tokens.
    """
    functions = _chosen(tools, choice)
    text = calls.text(
        functions,
        is_free=choice == AUTO,
        parallel=parallel and choice in (AUTO, REQUIRED),
        is_open=is_open,
        thinking=thinking,
    )
    return GrammarSpec("lark", text)


def _chosen(tools: Sequence[Mapping[str, Any]], choice: str) -> dict[str, Any]:
    functions = tool_functions(tools)
    if not functions:
        raise RequestError("tools is empty; a call needs at least one tool.")
    if choice == AUTO:
        strict = {
            function.get("name")
            for tool in tools
            if isinstance(function := tool.get("function", tool), Mapping)
            and (function.get("strict") is True or tool.get("strict") is True)
        }
        return {name: schema if name in strict else None for name, schema in functions.items()}
    if choice == REQUIRED:
        return functions
    if choice not in functions:
        raise RequestError(
            f"tool_choice names {choice!r:.60}; the tools are {', '.join(functions)}."
        )
    return {choice: functions[choice]}
