"""The grammar of an answer that calls tools, in the model's own format, arguments by schema.

Thoughts before the call stay free. The grammar is a Lark one in llguidance's dialect, compiled
where the engine runs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from flashdraft.chat.answers import gemma4, hermes
from flashdraft.chat.answers.formats import open_thought
from flashdraft.chat.answers.marks import AnswerMark
from flashdraft.chat.grammar.gemma4 import TERMINALS, GemmaSyntax, arguments_rule
from flashdraft.chat.schema.json_rule import FIXED, JsonGrammar
from flashdraft.chat.schema.reading import tool_functions
from flashdraft.chat.schema.rules import SchemaRules, lark_text
from flashdraft.core import GrammarSpec
from flashdraft.errors import RequestError
from flashdraft.models.tokenizer import Tokenizer

REQUIRED = "required"
AUTO = "auto"


def tool_grammar(
    tokenizer: Tokenizer,
    tools: Sequence[Mapping[str, Any]],
    choice: str,
    parallel: bool,
    prompt_ids: Sequence[int] = (),
    thinking: bool = True,
) -> GrammarSpec:
    """The grammar of an answer that makes a call: of any tool ("required") or of the one named.

    "auto" leaves the answer free until it begins a call; there, tools that are not `strict` take
    any arguments. `prompt_ids` tell whether the prompt left a thought open. Without `thinking` a
    call that must come has no other thought before it, which could take all the answer's tokens.
    """
    functions = _chosen(tools, choice)
    is_open = open_thought(tokenizer, prompt_ids) is not None
    if gemma4.knows(tokenizer):
        text = _gemma_grammar(tokenizer, functions, choice == AUTO, parallel, is_open, thinking)
    elif AnswerMark.CALL in hermes.spellings(tokenizer):
        text = _hermes_grammar(tokenizer, functions, choice == AUTO, parallel, is_open, thinking)
    else:
        raise RequestError(
            "The model has no format for tool calls that is known here, so a call cannot be "
            "forced; leave tool_choice at auto or none."
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


def _gemma_grammar(
    tokenizer: Tokenizer,
    functions: Mapping[str, Any],
    is_free: bool,
    parallel: bool,
    is_open: bool,
    thinking: bool,
) -> str:
    ids = {mark: tokenizer.token_id(text) for mark, text in gemma4.SPELLINGS.items()}
    tokens = {mark: f"<[{index}]>" for mark, index in ids.items()}
    rules = SchemaRules(GemmaSyntax(tokens[AnswerMark.QUOTE]))
    calls = [
        f"{lark_text(name)} {arguments_rule(rules, name, schema)}"
        for name, schema in functions.items()
    ]
    end = tokenizer.token_id(gemma4.TOOL_RESPONSE)
    # after several calls the model asks for their results; without the token it would call again
    after = f" <[{end}]>?" if parallel and end is not None else ""
    rest = f"TEXT? {tokens[AnswerMark.END_THINK]} " if is_open else ""
    must_call = "thought? calls" if thinking else "calls"
    start = "TEXT? (thought TEXT?)* calls?" if is_free else must_call
    begin, done = tokens[AnswerMark.CALL], tokens[AnswerMark.END_CALL]
    return "\n".join(
        [
            f"start: {rest}{start}",
            f"thought: {tokens[AnswerMark.THINK]} TEXT? {tokens[AnswerMark.END_THINK]}",
            f"calls: call{'+' if parallel else ''}{after}",
            f'call: {begin} "call:" ({" | ".join(calls)}) {done}',
            *rules.lines,
            *TERMINALS,
            "TEXT: /(?s:.+)/",
        ]
    )


def _hermes_grammar(
    tokenizer: Tokenizer,
    functions: Mapping[str, Any],
    is_free: bool,
    parallel: bool,
    is_open: bool,
    thinking: bool,
) -> str:
    known = hermes.spellings(tokenizer)
    mark = {name: _mark(tokenizer, text) for name, text in known.items()}
    lines = []
    calls = []
    rules = JsonGrammar(FIXED)
    for number, (name, schema) in enumerate(functions.items()):
        head = json.dumps({"name": name}, ensure_ascii=False)[:-1] + ', "arguments": '
        calls.append(f"{lark_text(head)} arguments{number}")
        where = f"the parameters of the tool {name!r:.60}"
        lines.append(f"arguments{number}: {rules.body(_arguments_schema(name, schema), where)}")
    lines += rules.lines
    lines.append(f'call: "\\n" ({" | ".join(calls)}) "}}\\n" {mark[AnswerMark.END_CALL]}')
    start = ""
    if AnswerMark.THINK in known:
        lines.append(f"thought: {mark[AnswerMark.THINK]} thoughts")
        lines.append(_until("thoughts", tokenizer, known[AnswerMark.END_THINK]))
        start = "thoughts " if is_open else "thought? " if thinking or is_free else ""
    more = f'("\\n" {mark[AnswerMark.CALL]} call)*' if parallel else ""
    if is_free:
        lines.append(_until("lead", tokenizer, known[AnswerMark.CALL]))
        lines.append("rest: /(?s:.*)/")
        body = "(lead call)* rest" if parallel else "(lead call | rest)"
    else:
        body = f"SPACE? {mark[AnswerMark.CALL]} call {more}"
        lines.append("SPACE: /\\n{1,4}/")
    return "\n".join([f"start: {start}{body}", *lines])


def _arguments_schema(name: str, schema: Any) -> dict[str, Any]:
    """The schema of an object; one that declares its properties has no others."""
    if schema is None:
        return {"type": "object"}
    if not isinstance(schema, Mapping) or schema.get("type", "object") != "object":
        raise RequestError(
            f"The parameters of the tool {name!r:.60} are {schema!r:.60}; they must be the JSON "
            "schema of an object."
        )
    closed = {"additionalProperties": False} if "properties" in schema else {}
    return {"type": "object", **closed, **schema}


def _mark(tokenizer: Tokenizer, text: str) -> str:
    """A mark as the token that it is, special or not, else as text."""
    index = tokenizer.token_id(text)
    return json.dumps(text) if index is None else f"<[{index}]>"


def _until(rule: str, tokenizer: Tokenizer, text: str) -> str:
    """A rule for free text up to a mark, the mark included."""
    if tokenizer.token_id(text) is None:
        return f"{rule}[lazy]: /(?s:.*){text.replace('/', chr(92) + '/')}/"
    return f"{rule}: /(?s:.+)/? {_mark(tokenizer, text)}"
