"""Runs a chat template, which is a program out of a checkpoint, within limits.

Jinja's sandbox keeps a template from reaching Python's insides. The limits here keep it from using
up the machine: every loop and every macro looks at the clock, and every operation that makes text
or lists grow is measured before it runs, because one inside the interpreter cannot be stopped.
Rendering happens in a thread of the server, so there is no signal and no second process.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from flashdraft.chat.template_meter import (
    METER,
    Meter,
    TemplateLimitError,
    TemplateLimits,
    check_format,
    check_join,
    check_method,
    check_operator,
    check_replace,
    check_widths,
    measured,
)
from flashdraft.errors import CheckpointError

MAX_TEMPLATE = 512 * 1024  # characters of a template's source; real ones have thousands
_SIZED = (str, list, tuple, dict, set)
_GLOBALS = ("range", "dict", "namespace")
_HIDDEN_FILTERS = {"pprint", "striptags", "urlize", "wordwrap", "xmlattr"}  # slow, and for HTML
_HIDDEN_METHODS = {"translate", "maketrans", "expandtabs", "encode", "to_bytes"}
# Filters that write out what they are given, whatever it is.
_WRITERS = {
    *("capitalize", "center", "e", "escape", "forceescape", "format", "indent", "join", "lower"),
    *("replace", "string", "title", "tojson", "trim", "truncate", "upper", "urlencode"),
    "wordcount",
}
_WIDTHS = {"batch", "center", "indent", "round", "slice", "tojson", "truncate"}


def render(template: str, variables: Mapping[str, Any], limits: TemplateLimits) -> str:
    """The template's output. Raises what a program raises, TemplateLimitError at a limit."""
    compiled = _compile(template)
    token = METER.set(Meter(limits))
    try:
        return compiled.render(variables)
    finally:
        METER.reset(token)


class _Generator(CodeGenerator):
    """Writes a look at the clock into every loop and macro; joins text by the meter."""

    def visit_For(self, node: nodes.For, frame: Frame) -> None:
        _add_tick(node.body, node.lineno)
        super().visit_For(node, frame)

    def visit_Macro(self, node: nodes.Macro, frame: Frame) -> None:
        _add_tick(node.body, node.lineno)
        super().visit_Macro(node, frame)

    def visit_CallBlock(self, node: nodes.CallBlock, frame: Frame) -> None:
        _add_tick(node.body, node.lineno)
        super().visit_CallBlock(node, frame)

    def visit_ExprStmt(self, node: nodes.ExprStmt, frame: Frame) -> None:
        self.writeline("environment.tick()", node)  # there are none of these but our own

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        if not isinstance(node.arg, nodes.Slice):
            super().visit_Getitem(node, frame)
            return
        self.write("environment.cut(")
        self.visit(node.node, frame)
        for bound in (node.arg.start, node.arg.stop, node.arg.step):
            self.write(", ")
            self.visit(bound or nodes.Const(None), frame)
        self.write(")")

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.join_texts((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


def _add_tick(body: list[nodes.Node], line: int) -> None:
    body.insert(0, nodes.ExprStmt(nodes.Const(None), lineno=line))


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with a meter on everything that grows."""

    code_generator_class = _Generator
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # nothing is computed before there is a meter
            extensions=[_GenerationTag, loopcontrols],
            finalize=measured,
        )
        self.globals = {name: self.globals[name] for name in _GLOBALS}
        self.globals["raise_exception"] = _raise
        self.globals["strftime_now"] = _now
        self.filters["tojson"] = _to_json
        self.filters["sum"] = _sum
        self.filters = {
            name: _guarded(name, run)
            for name, run in self.filters.items()
            if name not in _HIDDEN_FILTERS
        }

    @staticmethod
    def tick() -> None:
        METER.get().tick()

    @staticmethod
    def join_texts(parts: Sequence[Any]) -> str:
        """What the operator ~ does."""
        meter = METER.get()
        meter.spend(sum(map(meter.weigh, parts)))
        return "".join(map(str, parts))

    @staticmethod
    def cut(value: Any, start: Any, stop: Any, step: Any) -> Any:
        """What value[start:stop:step] does."""
        found = value[start:stop:step]
        METER.get().spend(len(found))
        return found

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        """Put output together: the whole, or a macro's."""
        meter, texts, size = METER.get(), list[str](), 0
        for text in parts:
            size += len(text)
            meter.check(size)
            meter.tick()
            texts.append(text)
        meter.spend(size)
        return "".join(texts)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        check_operator(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return attr not in _HIDDEN_METHODS and super().is_safe_attribute(obj, attr, value)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        __self.tick()
        owner = getattr(__obj, "__self__", None)
        if owner is None:  # the sandbox wraps str.format
            owner = getattr(getattr(__obj, "__wrapped__", None), "__self__", None)
        if isinstance(owner, str):
            if __obj.__name__ == "join" and args:
                args = (list(args[0]), *args[1:])  # what is made on the way has no size yet
            check_method(owner, __obj.__name__, args, kwargs)
        elif isinstance(owner, _SIZED):
            METER.get().spend(len(owner))
        return super().call(__context, __obj, *args, **kwargs)


def _guarded(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that looks at the clock and at the size of what it is given."""
    passes = 1 if hasattr(run, "jinja_pass_arg") else 0  # arguments that are Jinja's own

    @functools.wraps(run)
    def guarded(*arguments: Any, **named: Any) -> Any:
        meter = METER.get()
        value, others = arguments[passes], [*arguments[passes + 1 :], *named.values()]
        if isinstance(value, _SIZED):
            meter.spend(len(value))
        if name == "join":
            value = list(value)
            arguments = (*arguments[:passes], value, *arguments[passes + 1 :])
            check_join(value, others[0] if others else "")
        elif name in _WRITERS:
            meter.spend(meter.weigh(value))
        if name == "format":
            check_format(str(value), others)
        elif name == "replace":
            order = [named[key] for key in ("old", "new") if key in named]
            check_replace(str(value), *[*arguments[passes + 1 :], *order][:2])
        elif name in _WIDTHS:
            check_widths(others)
            if name == "indent":
                width = others[0] if others else 4
                step = len(width) if isinstance(width, str) else int(width)
                meter.spend((str(value).count("\n") + 1) * step)
        meter.tick()
        return run(*arguments, **named)

    return guarded


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's own words for training; here it is transparent."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@functools.lru_cache(maxsize=16)
def _compile(template: str) -> jinja2.Template:
    if len(template) > MAX_TEMPLATE:
        raise CheckpointError(
            f"The model's chat template has {len(template)} characters; at most {MAX_TEMPLATE}."
        )
    try:
        return _Environment().from_string(template)
    except jinja2.TemplateSyntaxError as error:
        raise CheckpointError(
            f"The model's chat template is not valid Jinja: line {error.lineno}: {error.message}."
        ) from None
    except (RecursionError, MemoryError, SyntaxError):  # brackets nested beyond all use
        raise CheckpointError("The model's chat template is nested too deeply.") from None


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _now(pattern: str) -> str:
    if len(pattern) > 256 or re.search("[0-9]{3}", pattern):
        raise TemplateLimitError("strftime_now has a pattern beyond all use")
    return datetime.now().strftime(pattern)


def _sum(values: Iterable[Any], attribute: Any = None, start: Any = 0) -> Any:
    """Jinja's own would add lists and other things that grow."""
    found = [value if attribute is None else value[attribute] for value in values]
    if not all(isinstance(value, int | float) for value in [start, *found]):
        raise TypeError("sum takes numbers alone")
    return sum(found, start)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, which would change the prompt."""
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    if indent is None:
        return encoder.encode(value)
    return _Environment.concat(encoder.iterencode(value))  # slow: it must look at the clock
