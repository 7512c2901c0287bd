"""Ctrl-C and SIGTERM where they do no harm: between two steps, or as one exception. No torch."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interrupt_between_steps(*also: signal.Signals) -> Iterator[Callable[[], bool]]:
    """Ctrl-C sets what is yielded instead of tearing a step apart; a second one raises.

    So do the signals in `also`; a second one of those does nothing: who sends it waits anyway.
    """
    pressed = False

    def handle(number: int, _frame: FrameType | None) -> None:
        nonlocal pressed
        if pressed and number == signal.SIGINT:
            raise KeyboardInterrupt
        pressed = True

    with _handling(handle, signal.SIGINT, *also):
        yield lambda: pressed


@contextmanager
def terminate_as_interrupt() -> Iterator[None]:
    """SIGTERM ends what runs as Ctrl-C does: by a KeyboardInterrupt, so that work is saved.

    Whichever comes first raises. A SIGTERM after that does not: the saving must not be torn.
    """
    ended = False

    def handle(number: int, _frame: FrameType | None) -> None:
        nonlocal ended
        is_first, ended = not ended, True
        if is_first or number == signal.SIGINT:
            raise KeyboardInterrupt

    signals = [signal.SIGTERM]
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as in a background job
        signals.append(signal.SIGINT)
    with _handling(handle, *signals):
        yield


@contextmanager
def _handling(
    handle: Callable[[int, FrameType | None], None], *signals: signal.Signals
) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are the main thread's
        return
    before = {number: signal.signal(number, handle) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
