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
_NARROW_BAR = "{n_fmt}/{total_fmt}|{bar}{postfix}"
_NOTEBOOK_COLUMNS = 100

Choice = bool | Callable[..., Any]


class AnswerBar:
    """One batch's progress. `choice`: True where somebody watches, False never, or a tqdm class."""

    def __init__(self, num_prompts: int, choice: Choice) -> None:
        self._bar: Any = _new_bar(num_prompts, choice)
        self._num_done = self._num_tokens = self._num_steps = self._num_stepped = 0
        self._begun: set[str] = set()
        self._began = self._shown_at = time.perf_counter()

    def take(self, event: TokenEvent, num_done: int) -> None:
        """Count an event: a request's first tokens are the prompt's, later ones a step's."""
        if self._bar is None:
            return
        count = len(event.token_ids)
        self._num_tokens += count
        if event.request_id in self._begun:
            self._num_steps += count > 0
            self._num_stepped += count
        elif count:
            self._begun.add(event.request_id)
        now = time.perf_counter()
        if now - self._shown_at >= REFRESH_S:
            self._shown_at = now
            self._show(num_done)
        self._latest = num_done

    def close(self) -> None:
        """Show how it ended, and leave it there."""
        if self._bar is not None:
            self._show(getattr(self, "_latest", 0))
            self._bar.close()

    def _show(self, num_done: int) -> None:
        seconds = time.perf_counter() - self._began
        facts = [f"{self._num_tokens / seconds:.0f} tok/s"] if seconds > 0 else []
        if self._num_steps:
            facts.append(f"{self._num_stepped / self._num_steps:.2f} a step")
        self._bar.set_postfix_str(", ".join(facts), refresh=False)
        if isinstance(self._bar, tqdm) and type(self._bar) is tqdm:
            self._bar.bar_format = _NARROW_BAR if _columns() < NARROW else _WIDE_BAR
        self._bar.update(num_done - self._num_done)
        self._bar.refresh()
        self._num_done = num_done


def _new_bar(num_prompts: int, choice: Choice) -> Any:
    settings = {"total": num_prompts, "desc": "Answering", "unit": " prompts"}
    if callable(choice):
        return choice(**settings)
    if not isinstance(choice, bool):
        raise RequestError(f"use_tqdm is {choice!r}; it must be True, False or a class as tqdm's.")
    if not choice or num_prompts < 2 or sys.stderr is None:
        return None
    if _is_notebook():
        if importlib.util.find_spec("ipywidgets") is not None:
            from tqdm.notebook import tqdm as notebook_tqdm

            return notebook_tqdm(**settings)
        return tqdm(**settings, ncols=_NOTEBOOK_COLUMNS, bar_format=_WIDE_BAR)
    if not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        return None
    return tqdm(**settings, dynamic_ncols=True)


def _is_notebook() -> bool:
    kernel = sys.modules.get("ipykernel.kernelapp")
    return kernel is not None and bool(kernel.IPKernelApp.initialized())


def _columns() -> int:
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns
    except (OSError, ValueError):
        return _NOTEBOOK_COLUMNS
