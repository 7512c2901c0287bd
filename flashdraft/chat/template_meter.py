"""Measures what a template makes before it makes it: one string operation cannot be stopped.

The sandbox calls these checks; they know sizes and the clock, and nothing of Jinja's machinery.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jinja2

_MAX_WORK = 64  # outputs of the largest size: what all steps together may write
_TICKS_PER_LOOK = 32  # the clock costs as much as a step of a template
_MAX_WIDTH = 10_000  # of padding, indentation and the like
_MAX_BITS = 4096  # of an integer
_LISTS = (str, list, tuple)  # as tuples: these tests are made for every step of a template
_CONTAINERS = (list, tuple, dict, set, frozenset)
_LONG_WIDTH = re.compile(r"\{[^{}]*[0-9]{5}|%[^%a-zA-Z]*[0-9]{5}")  # in a format
_GIVEN_WIDTH = re.compile(r"\{[^{}]*\{|%[^%a-zA-Z]*\*")  # a width that is an argument


@dataclass(frozen=True)
class TemplateLimits:
    """What one rendering may use."""

    time_s: float = 2.0  # of the processor: on a busy machine a rendering may take longer
    max_chars: int = 8_000_000  # of the prompt, and of any text on the way to it


class TemplateLimitError(jinja2.TemplateRuntimeError):
    """A template went beyond its limits."""


class Meter:
    """What one rendering has used so far."""

    def __init__(self, limits: TemplateLimits) -> None:
        self._limits = limits
        self._deadline = time.thread_time() + limits.time_s
        self._work = 0
        self._ticks = 0

    def tick(self) -> None:
        self._ticks += 1
        if self._ticks % _TICKS_PER_LOOK == 0 and time.thread_time() > self._deadline:
            raise TemplateLimitError(f"it ran for more than {self._limits.time_s:g} s")

    def spend(self, size: int) -> None:
        """Something of this size is about to be made."""
        self.check(size)
        self._work += size
        if self._work > self._limits.max_chars * _MAX_WORK:
            raise TemplateLimitError("it copies text and lists without end")
        self.tick()

    def check(self, size: int) -> None:
        limit = self._limits.max_chars
        if size > limit:
            raise TemplateLimitError(f"it makes text of more than {limit} characters")

    def weigh(self, value: Any) -> int:
        """About how long a value is when written out; one value may be contained many times."""
        if isinstance(value, str):
            return len(value)
        known: dict[int, int] = {}

        def weight(part: Any) -> int:
            if isinstance(part, str):
                return len(part) + 2
            if not isinstance(part, _CONTAINERS):
                return 8
            if id(part) not in known:
                self.tick()
                inner = [*part.keys(), *part.values()] if isinstance(part, dict) else part
                known[id(part)] = 2 + sum(map(weight, inner))
            return known[id(part)]

        return weight(value)


METER: ContextVar[Meter] = ContextVar("template_meter")  # of the rendering at hand


def measured(value: Any) -> Any:
    """Called on everything that is printed."""
    if not isinstance(value, str):
        meter = METER.get()
        meter.spend(meter.weigh(value))
    return value


def check_operator(operator: str, left: Any, right: Any) -> None:
    meter = METER.get()
    if operator == "%":
        if isinstance(left, str):
            check_format(left, right if isinstance(right, tuple) else (right,))
    elif isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * (max(right, 1) if operator == "**" else 1)
        if bits + (right.bit_length() if operator == "*" else 0) > _MAX_BITS:
            raise TemplateLimitError(f"it makes an integer of more than {_MAX_BITS} bits")
    elif operator == "+" and isinstance(left, _LISTS):
        meter.spend(len(left) + (len(right) if isinstance(right, _LISTS) else 0))
    elif operator == "*":
        text, count = (right, left) if isinstance(left, int) else (left, right)
        if isinstance(text, _LISTS) and isinstance(count, int):
            meter.spend(len(text) * max(count, 0))


def check_method(text: str, name: str, arguments: Sequence[Any], named: Mapping[str, Any]) -> None:
    """A method of a string."""
    meter = METER.get()
    if name in ("format", "format_map"):
        check_format(text, (*arguments, *named.values()))
    elif name == "join" and arguments:
        check_join(arguments[0], text)
    elif name == "replace":
        check_replace(text, *arguments[:2])
    else:
        meter.spend(len(text))
        check_widths(arguments)


def check_format(text: str, arguments: Sequence[Any]) -> None:
    meter = METER.get()
    if _LONG_WIDTH.search(text):
        raise TemplateLimitError(f"a format has a width of more than {_MAX_WIDTH}")
    if _GIVEN_WIDTH.search(text):
        check_widths(arguments)
    places = text.count("%") + text.count("{")
    meter.spend(len(text) + places * sum(map(meter.weigh, arguments)))


def check_join(parts: Sequence[Any], separator: Any) -> None:
    meter = METER.get()
    meter.spend(sum(map(meter.weigh, parts)) + len(parts) * meter.weigh(separator))


def check_replace(text: str, old: Any = "", new: Any = "") -> None:
    meter = METER.get()
    meter.spend(meter.weigh(old))
    meter.spend(len(text) + text.count(str(old)) * meter.weigh(new))


def check_widths(values: Iterable[Any]) -> None:
    for value in values:
        if isinstance(value, int) and abs(value) > _MAX_WIDTH:
            raise TemplateLimitError(f"it asks for a width of {value}; at most {_MAX_WIDTH}")
