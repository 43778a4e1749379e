"""Signals as a request: the first is noted, the second acts."""

import os
import pty
import signal

import pytest
from lmx.run import signals


@pytest.fixture(autouse=True)
def default_handler():
    """A process in the background may ignore SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_first_signal_is_noted_and_the_second_acts():
    with signals.stop_requested() as is_requested:
        assert not is_requested()
        signal.raise_signal(signal.SIGINT)
        assert is_requested()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_sigterm_is_the_programs():
    """Unless a command of lmx takes it."""
    received = []
    before = signal.signal(signal.SIGTERM, lambda kind, _: received.append(kind))
    try:
        with signals.stop_requested() as is_requested:
            signal.raise_signal(signal.SIGTERM)
            assert not is_requested()
        assert received == [signal.SIGTERM]
        with signals.sigterm_interrupts(), signals.stop_requested() as is_requested:
            signal.raise_signal(signal.SIGTERM)
            assert is_requested()
        assert received == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_notice_is_for_a_terminal(monkeypatch, capfd):
    ours, terminal = pty.openpty()
    with (
        signals.sigterm_interrupts(),
        signals.stop_requested(notice="stopping") as is_requested,
    ):
        monkeypatch.setattr(signals, "STDERR", terminal)
        signal.raise_signal(signal.SIGTERM)
        assert is_requested()
    assert os.read(ours, 100).split() == [b"stopping"]
    monkeypatch.undo()
    with signals.sigterm_interrupts(), signals.stop_requested(notice="stopping"):
        signal.raise_signal(signal.SIGTERM)
    assert capfd.readouterr().err == ""
    os.close(ours)
    os.close(terminal)
