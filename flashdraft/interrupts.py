"""Ctrl-C between two steps instead of inside one; for whoever runs a loop. No torch."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interrupt_between_steps() -> Iterator[Callable[[], bool]]:
    """Ctrl-C sets what is yielded instead of tearing a step apart; a second one raises."""
    pressed = False

    def handle(_signal: int, _frame: FrameType | None) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True

    if threading.current_thread() is not threading.main_thread():
        yield lambda: False  # signals are the main thread's
        return
    before = signal.signal(signal.SIGINT, handle)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)
