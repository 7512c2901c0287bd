"""Chat messages to prompt text, by the model's own Jinja template, in a sandbox.

It validates messages (text only, for now) and knows no family: what a turn looks like is the
template's business, what a token is, the tokenizer's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from flashdraft.errors import CheckpointError, RequestError
from flashdraft.models.tokenizer import Tokenizer

Message = Mapping[str, Any]

_RENDER_ERRORS = (  # a template is a program: on odd messages it fails in a program's ways
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)


def render_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    extra: Mapping[str, Any] | None = None,
) -> str:
    """The prompt text of a conversation; `extra` holds template switches such as enable_thinking.

    The text carries its own special tokens: encode it without adding any.
    """
    if tokenizer.chat_template is None:
        raise RequestError("The model has no chat template; use generate with a plain prompt.")
    variables = {
        **tokenizer.special_tokens,
        **(extra or {}),
        "messages": check_messages(messages),
        "tools": _check_tools(tools),
        "add_generation_prompt": add_generation_prompt,
    }
    template = _compile(tokenizer.chat_template)
    try:
        return template.render(variables)
    except _RENDER_ERRORS as error:
        raise RequestError(
            f"The model's chat template does not accept these messages: {error}."
        ) from None


def check_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Copies of the messages with text parts joined and tool-call arguments as objects."""
    if isinstance(messages, str | bytes) or not isinstance(messages, Sequence) or not messages:
        raise RequestError(
            'messages must be a non-empty list of {"role": …, "content": …}, '
            f"not {_brief(messages)}."
        )
    return [_check_message(index, message) for index, message in enumerate(messages)]


def _check_message(index: int, message: Message) -> dict[str, Any]:
    where = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise RequestError(f"{where} is {_brief(message)}; it must be an object.")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise RequestError(
            f"{where}.role is {_brief(role)}; it must be a name such as 'system', 'user' or "
            "'assistant'."
        )
    checked = dict(message)
    calls = message.get("tool_calls")
    if calls:
        checked["tool_calls"] = _check_calls(where, calls)
    content = message.get("content")
    if content is None and not calls and not message.get("tool_responses"):
        raise RequestError(f"{where} has no content; only a message with tool calls may lack it.")
    checked["content"] = "" if content is None else _text_of(where, content)
    return checked


def _text_of(where: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise RequestError(
            f"{where}.content is {_brief(content)}; it must be text or a list of text parts."
        )
    texts = []
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind != "text":
            raise RequestError(
                f"{where}.content[{number}] is {_brief(kind or part)}; only text parts are "
                "supported: images, audio and video are refused."
            )
        if not isinstance(part.get("text"), str):
            raise RequestError(f"{where}.content[{number}].text must be a string.")
        texts.append(part["text"])
    return "\n".join(texts)


def _check_calls(where: str, calls: Any) -> list[dict[str, Any]]:
    """Tool calls whose arguments are objects: clients send JSON text, templates want the values."""
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise RequestError(f"{where}.tool_calls is {_brief(calls)}; it must be a list.")
    checked = []
    for number, call in enumerate(calls):
        spot = f"{where}.tool_calls[{number}]"
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RequestError(f"{spot} needs a function with a name.")
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
            except ValueError as error:
                raise RequestError(
                    f"{spot}.function.arguments is not valid JSON: {error}."
                ) from None
        if not isinstance(arguments, Mapping):
            raise RequestError(f"{spot}.function.arguments must be a JSON object.")
        checked.append({**call, "function": {**function, "arguments": dict(arguments)}})
    return checked


def _check_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    if tools is None:
        return None
    if not isinstance(tools, Sequence) or isinstance(tools, str | bytes):
        raise RequestError(f"tools is {_brief(tools)}; it must be a list of objects.")
    if not tools:
        return None
    for number, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise RequestError(f"tools[{number}] is {_brief(tool)}; it must be an object.")
    return [dict(tool) for tool in tools]


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's own words for training; here it is transparent."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@lru_cache(maxsize=16)
def _compile(template: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _now
    try:
        return environment.from_string(template)
    except jinja2.TemplateSyntaxError as error:
        raise CheckpointError(
            f"The model's chat template is not valid Jinja: line {error.lineno}: {error.message}."
        ) from None


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, which would change the prompt."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
