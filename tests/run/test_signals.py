"""Signals as a request: the first is noted, the second acts."""

import os
import pty
import signal

import pytest
from lmx.run import signals


def test_first_signal_is_noted_and_the_second_acts():
    before = signal.getsignal(signal.SIGINT)
    with signals.stop_requested() as is_requested:
        assert not is_requested()
        signal.raise_signal(signal.SIGINT)
        assert is_requested()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_notice_is_for_a_terminal(monkeypatch, capfd):
    ours, terminal = pty.openpty()
    with signals.stop_requested(notice="stopping") as is_requested:
        monkeypatch.setattr(signals, "STDERR", terminal)
        signal.raise_signal(signal.SIGTERM)
        assert is_requested()
    assert os.read(ours, 100).split() == [b"stopping"]
    monkeypatch.undo()
    with signals.stop_requested(notice="stopping"):
        signal.raise_signal(signal.SIGTERM)
    assert capfd.readouterr().err == ""
    os.close(ours)
    os.close(terminal)
