"""The bar that a batch of prompts shows: prompts done, tokens per second, accepted length.

It is there where somebody watches: on a terminal, and in a notebook. It has no colours.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from tqdm import tqdm

from flashdraft.core import TokenEvent
from flashdraft.errors import RequestError

REFRESH_S = 0.1
NARROW = 70  # columns; with fewer there is only room for what matters
_WIDE_BAR = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"
_NARROW_BAR = "{n_fmt}/{total_fmt}|{bar}|{postfix}"
_NOTEBOOK_COLUMNS = 100

Choice = bool | Callable[..., Any]


class AnswerBar:
    """One batch's progress. `choice`: True where somebody watches, False never, or a tqdm class."""

    def __init__(self, num_prompts: int, choice: Choice) -> None:
        self._is_on_terminal = choice is True and _is_watched_terminal()
        self._bar: Any = _new_bar(num_prompts, choice, self._is_on_terminal)
        self._num_done = self._num_shown = 0  # prompts
        self._num_tokens = self._num_steps = self._num_stepped = 0
        self._begun: set[str] = set()
        self._began = self._shown_at = time.perf_counter()

    def take(self, event: TokenEvent, num_done: int) -> None:
        """Count an event: a request's first tokens are the prompt's, later ones a step's."""
        if self._bar is None:
            return
        count, self._num_done = len(event.token_ids), num_done
        self._num_tokens += count
        if event.request_id in self._begun:
            self._num_steps += count > 0
            self._num_stepped += count
        elif count:
            self._begun.add(event.request_id)
        now = time.perf_counter()
        if now - self._shown_at >= REFRESH_S:
            self._shown_at = now
            self._try_to_show()

    def close(self) -> None:
        """Show how it ended, and leave it there."""
        if self._bar is not None:
            self._try_to_show()
        if self._bar is not None:
            self._bar.close()

    def _try_to_show(self) -> None:
        """Show how far it is; a terminal that has gone costs no answers."""
        try:
            self._show()
        except OSError:
            self._bar = None

    def _show(self) -> None:
        seconds = time.perf_counter() - self._began
        facts = [f"{self._num_tokens / seconds:.0f} tok/s"] if seconds > 0 else []
        if self._num_steps:
            facts.append(f"{self._num_stepped / self._num_steps:.2f} a step")
        self._bar.set_postfix_str(", ".join(facts), refresh=False)
        if self._is_on_terminal:
            self._bar.bar_format = _bar_format()
        self._bar.update(self._num_done - self._num_shown)
        self._bar.refresh()
        self._num_shown = self._num_done


def _new_bar(num_prompts: int, choice: Choice, is_on_terminal: bool) -> Any:
    settings = {"total": num_prompts, "desc": "Answering", "unit": " prompts"}
    if callable(choice):
        return choice(**settings)
    if not isinstance(choice, bool):
        raise RequestError(f"use_tqdm is {choice!r}; it must be True, False or a class as tqdm's.")
    if not choice or num_prompts < 2:
        return None
    if is_on_terminal:
        return tqdm(**settings, dynamic_ncols=True, bar_format=_bar_format())
    if _is_notebook():
        if importlib.util.find_spec("ipywidgets") is not None:
            from tqdm.notebook import tqdm as notebook_tqdm

            return notebook_tqdm(**settings)
        return tqdm(**settings, ncols=_NOTEBOOK_COLUMNS, bar_format=_WIDE_BAR)
    return None


def _is_watched_terminal() -> bool:
    """Whether stderr, which a program may have closed, is a terminal that can redraw a line."""
    try:
        return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
    except (AttributeError, ValueError):
        return False


def _is_notebook() -> bool:
    kernel = sys.modules.get("ipykernel.kernelapp")
    return kernel is not None and bool(kernel.IPKernelApp.initialized())


def _bar_format() -> str:
    """What the terminal, whose width may change, has room for."""
    try:
        columns = os.get_terminal_size(sys.stderr.fileno()).columns
    except (OSError, ValueError):
        columns = NARROW
    return _NARROW_BAR if columns < NARROW else _WIDE_BAR
