"""Ctrl-C and SIGTERM while something is saved: the second signal tears nothing, unless pressed."""

from __future__ import annotations

import os
import signal

import pytest

from flashdraft.interrupts import interrupt_between_steps, terminate_as_interrupt


def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_raises_and_a_later_sigterm_does_not(first: signal.Signals) -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    saved = False
    with pytest.raises(KeyboardInterrupt), terminate_as_interrupt():
        try:
            send(first)
        finally:
            send(signal.SIGTERM)  # as torchrun does after a Ctrl-C
            saved = True
    assert saved
    with pytest.raises(KeyboardInterrupt), terminate_as_interrupt():
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGTERM)
        send(signal.SIGINT)  # a person who does not want to wait
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_between_steps_sigterm_counts_only_where_it_is_asked_for() -> None:
    with interrupt_between_steps(signal.SIGTERM) as is_stopped:
        assert not is_stopped()
        send(signal.SIGTERM)
        send(signal.SIGTERM)
        assert is_stopped()
    with terminate_as_interrupt(), interrupt_between_steps() as is_stopped:
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGTERM)
        assert not is_stopped()
