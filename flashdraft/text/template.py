"""Runs a chat template, which is a program out of a checkpoint. Only child.py imports this.

Jinja's sandbox keeps a template from reaching Python's insides and from changing what it is given.
What it uses of processor and memory is no concern here: the process it runs in can be killed.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from flashdraft.killable.child import RefusalError
from flashdraft.text import exact_json

MAX_MESSAGE = 1000  # characters of what a template says when it refuses
_GLOBALS = ("range", "dict", "namespace", "cycler", "joiner")
_HIDDEN_FILTERS = {"pprint", "striptags", "urlize", "wordwrap", "xmlattr"}  # slow, and for HTML
_HIDDEN_METHODS = {"translate", "maketrans", "expandtabs", "encode", "to_bytes"}


def render(template: str, variables: Mapping[str, Any], max_chars: int) -> str:
    """The template's output. RefusalError where it cannot be compiled, fails or writes too much."""
    compiled = _compile(template)
    texts, size = list[str](), 0
    try:
        for text in compiled.generate(variables):
            size += len(text)
            if size > max_chars:
                raise RefusalError("limit", f"it makes text of more than {max_chars} characters")
            texts.append(text)
    except (RefusalError, MemoryError):
        raise
    except Exception as error:  # a template is a program: it fails in a program's ways
        raise RefusalError("template", str(error)[:MAX_MESSAGE]) from None
    return "".join(texts)


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with what chat templates count on, and little else."""

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
        )
        self.globals = {name: self.globals[name] for name in _GLOBALS}
        self.globals["raise_exception"] = _raise
        self.globals["strftime_now"] = _now
        self.filters["tojson"] = _to_json
        for name in _HIDDEN_FILTERS:
            del self.filters[name]

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return attr not in _HIDDEN_METHODS and super().is_safe_attribute(obj, attr, value)


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's own words for training; here it is transparent."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@functools.lru_cache(maxsize=1)
def _compile(template: str) -> jinja2.Template:
    try:
        return _Environment().from_string(template)
    except jinja2.TemplateSyntaxError as error:
        raise RefusalError(
            "checkpoint", f"is not valid Jinja: line {error.lineno}: {error.message}"[:MAX_MESSAGE]
        ) from None
    except (RecursionError, MemoryError, SyntaxError):  # brackets nested beyond all use
        raise RefusalError("checkpoint", "is nested too deeply", retire=True) from None
    except Exception as error:  # constants are computed already
        raise RefusalError("checkpoint", f"cannot be compiled: {error}"[:MAX_MESSAGE]) from None


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
    return exact_json.write(
        value, separators, ensure_ascii, indent=indent, sort_keys=sort_keys, allow_nan=True
    )
