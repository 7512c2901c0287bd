"""Chat messages to prompt text, by the model's own Jinja template, in a sandbox with limits.

It knows no family: what a turn looks like is the template's business, what a token is, the
tokenizer's.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jinja2

from flashdraft.chat.messages import Message, brief, check_messages, check_tools, fit_to_template
from flashdraft.chat.sandbox import render
from flashdraft.chat.template_meter import TemplateLimitError, TemplateLimits
from flashdraft.errors import RequestError
from flashdraft.models.tokenizer import Tokenizer

_RENDER_ERRORS = (  # a template is a program: on odd messages it fails in a program's ways
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
    MemoryError,
)
_OWN_NAMES = ("messages", "tools", "add_generation_prompt", "raise_exception", "strftime_now")
_DEFAULT_LIMITS = TemplateLimits()


def render_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    extra: Mapping[str, Any] | None = None,
    allowed: Collection[str] | None = None,
    limits: TemplateLimits = _DEFAULT_LIMITS,
) -> str:
    """The prompt text of a conversation; `extra` holds template switches such as enable_thinking.

    `allowed` lists the switches that may be given, None for any; none can replace what the prompt
    is made of. The text carries its own special tokens: encode it without adding any.
    """
    template = tokenizer.chat_template
    if template is None:
        raise RequestError("The model has no chat template; use generate with a plain prompt.")
    variables = {
        **_check_extra(extra or {}, allowed),
        **tokenizer.special_tokens,
        "messages": fit_to_template(check_messages(messages), template),
        "tools": check_tools(tools),
        "add_generation_prompt": add_generation_prompt,
    }
    try:
        return render(template, variables, limits)
    except TemplateLimitError as error:
        raise RequestError(
            f"The model's chat template was stopped: {error}. Send a shorter conversation, or "
            "check the template."
        ) from None
    except _RENDER_ERRORS as error:
        raise RequestError(
            f"The model's chat template does not accept these messages: {error}."
        ) from None


def _check_extra(extra: Mapping[str, Any], allowed: Collection[str] | None) -> dict[str, Any]:
    for name in extra:
        if not isinstance(name, str) or name in _OWN_NAMES or name.endswith("_token"):
            raise RequestError(
                f"The template switch {brief(name)} is reserved: it is made from the request and "
                "the model, and cannot be given."
            )
        if allowed is not None and name not in allowed:
            known = ", ".join(sorted(allowed)) or "none"
            raise RequestError(
                f"The template switch {brief(name)} is not allowed; allowed are: {known}."
            )
    return dict(extra)
