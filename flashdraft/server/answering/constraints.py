"""Tools and forms of texts within the server's limits, and the grammar an answer is bound to.

Knows no API's shape: a tool is OpenAI's function tool, a form is a schema, a pattern or a list.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from flashdraft.chat.binding import Tool, ToolUse, bound_grammar
from flashdraft.chat.grammar.compiler import check_multiples
from flashdraft.chat.schema.closing import open_objects
from flashdraft.chat.schema.json_rule import FIXED, JsonGrammar
from flashdraft.chat.schema.reading import is_deeper_than
from flashdraft.core import GrammarSpec
from flashdraft.errors import RequestError
from flashdraft.server.answering.serving import Serving
from flashdraft.server.http.body_structure import MAX_CHOICES, MAX_TOOLS
from flashdraft.server.http.errors import FieldError
from flashdraft.server.http.fields import FunctionDefinition
from flashdraft.text import exact_json

_CHOICES = frozenset({"auto", "none", "required"})


def check_schema(serving: Serving, schema: Any, where: str) -> str:
    """A JSON schema as text, within the limits of size and depth."""
    settings = serving.settings
    if is_deeper_than(schema, settings.max_schema_depth):
        raise FieldError(
            where, f"{where} is nested deeper than {settings.max_schema_depth} levels."
        )
    try:
        text = exact_json.write(schema)
    except ValueError:
        raise FieldError(where, f"{where} holds NaN or an infinity, which JSON has not.") from None
    size = _num_bytes(text, where)
    if size > settings.max_schema_bytes:
        raise FieldError(
            where, f"{where} has {size} bytes; at most {settings.max_schema_bytes}. Shorten it."
        )
    return text


def _num_bytes(text: str, where: str) -> int:
    try:
        return len(text.encode("utf-8"))
    except UnicodeEncodeError:
        raise FieldError(where, f"{where} must be text of valid Unicode.") from None


def json_schema_grammar(serving: Serving, schema: Any, where: str) -> GrammarSpec:
    """The grammar of a schema, given as an object or as its JSON text."""
    if isinstance(schema, str):
        if len(schema) > serving.settings.max_schema_bytes:
            raise FieldError(where, f"{where} has {len(schema)} characters; it is too long.")
        try:
            schema = exact_json.read(schema)
        except (ValueError, RecursionError):
            raise FieldError(where, f"{where} is not valid JSON.") from None
    if not isinstance(schema, Mapping | bool):
        raise FieldError(where, f"{where} must be a JSON schema, which is an object.")
    text = check_schema(serving, schema, where)
    check_multiples(schema)
    if serving.settings.open_objects:
        schema = open_objects(schema)
        text = exact_json.write(schema)
    if isinstance(schema, Mapping):
        try:
            JsonGrammar(FIXED).body(schema, where)
        except RequestError as error:  # a number that cannot be kept
            raise FieldError(where, str(error)) from None
    return GrammarSpec("json_schema", text)


def regex_grammar(serving: Serving, pattern: str, where: str) -> GrammarSpec:
    """The grammar of a regular expression."""
    size, limit = _num_bytes(pattern, where), serving.settings.max_regex_bytes
    if not 0 < size <= limit:
        raise FieldError(where, f"{where} has {size} bytes; it must have from 1 to {limit}.")
    return GrammarSpec("regex", pattern)


def choice_grammar(serving: Serving, choices: Sequence[str], where: str) -> GrammarSpec:
    """The grammar of a list of texts, one of which is the answer."""
    if not 0 < len(choices) <= MAX_CHOICES or not all(choices):
        raise FieldError(where, f"{where} must be a list of 1 to {MAX_CHOICES} non-empty strings.")
    check_schema(serving, list(choices), where)
    return GrammarSpec("choice", json.dumps(list(choices)))


def answer_grammar(
    serving: Serving,
    tool_use: ToolUse,
    form: GrammarSpec | None,
    prompt_ids: Sequence[int],
    thinking: bool | None = None,
    max_tokens: int | None = None,
) -> GrammarSpec | None:
    """The one grammar of an answer; see chat/binding.py.

    In `max_tokens`, if they are fewer than usual, a call should end.
    """
    usual: int = serving.sampling_defaults["max_tokens"]
    grammar = bound_grammar(
        serving.answer_format,
        tool_use,
        form,
        prompt_ids,
        thinking,
        usual if max_tokens is None else min(usual, max_tokens),
        serving.settings.open_objects,
    )
    if grammar is not None and not serving.engine.info.supports_grammar:
        raise RequestError(
            "Constrained answers need the package llguidance, which the server does not have: "
            'pip install "flashdraft[serve]".'
        )
    return grammar


def function_tools(functions: Iterable[FunctionDefinition]) -> tuple[Tool, ...]:
    """Functions as chat templates want their tools."""
    return tuple(
        {"type": "function", "function": function.model_dump(exclude_none=True)}
        for function in functions
    )


def check_function_tools(serving: Serving, tool_use: ToolUse) -> None:
    """The same for tools whose schemas stand where OpenAI's chat and Ollama have them."""
    places = [f"tools[{n}].function.parameters" for n in range(len(tool_use.tools))]
    check_tools(serving, tool_use, places)


def check_tools(serving: Serving, tool_use: ToolUse, places: Sequence[str]) -> None:
    """Tools within the limits, and a choice that is one of them.

    `places` say where in the body each tool's schema stands.
    """
    names = [str(tool["function"]["name"]) for tool in tool_use.tools]
    if len(names) > MAX_TOOLS:
        raise FieldError("tools", f"tools has {len(names)} entries; at most {MAX_TOOLS}.")
    if taken := _CHOICES.intersection(names):
        raise FieldError(
            "tools",
            f"tools has a function named {min(taken)!r}, which is a word of tool_choice; give it "
            "another name.",
        )
    if len(set(names)) < len(names):
        raise FieldError("tools", "tools has two functions of the same name.")
    for tool, place in zip(tool_use.tools, places, strict=True):
        check_schema(serving, tool["function"].get("parameters"), place)
    if wrong := tool_use.wrong_choice:
        raise FieldError("tool_choice", wrong)
