"""SIGINT and SIGTERM as a request that the program polls."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..errors import INTERRUPTED

STDERR = 2


@contextmanager
def stop_requested(
    *kinds: signal.Signals, notice: str = ""
) -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether one of some signals has arrived.

    The first signal only sets this flag; a second one has its default effect. Outside
    the main thread, which alone receives signals, the flag stays False.

    Args:
        kinds: default: SIGINT, and SIGTERM inside of `sigterm_interrupts`. Elsewhere it
            is for the program that uses lmx.
        notice: a line for the terminal at the first signal.
    """
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    if not kinds:
        is_ours = signal.getsignal(signal.SIGTERM) is signal.default_int_handler
        kinds = (signal.SIGINT, *[signal.SIGTERM] * is_ours)
    before = {kind: signal.getsignal(kind) for kind in kinds}

    def note(kind, _):
        received.append(kind)
        for each in kinds:
            signal.signal(each, before[each])
        if notice and os.isatty(STDERR):
            # Buffered streams cannot be written in a handler.
            os.write(STDERR, f"\n{notice}\n".encode())

    for kind in kinds:
        signal.signal(kind, note)
    try:
        yield lambda: bool(received)
    finally:
        for kind in kinds:
            signal.signal(kind, before[kind])


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """Let SIGTERM raise KeyboardInterrupt, as SIGINT does.

    By default, it would end the process without a word in the run directory.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


# Called by `exit_at_once` with the exit code, because Python itself calls nothing then.
before_exit: list[Callable[[int], None]] = []


def exit_at_once(code: int) -> None:
    """End this process, whose main thread is blocked outside Python."""
    try:
        for action in before_exit:
            action(code)
    finally:
        os._exit(code)


@contextmanager
def exit_if_stuck(seconds: float) -> Iterator[None]:
    """Exit the process if this context is still open `seconds` after a SIGTERM.

    A collective that waits for a dead process blocks outside Python for ever, where
    Python's signal handlers do not run.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer)
    closed = threading.Event()

    def watch():
        while kinds := os.read(reader, 1):
            if kinds[0] == signal.SIGTERM and not closed.wait(seconds):
                exit_at_once(INTERRUPTED)
        os.close(reader)

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        closed.set()
        signal.set_wakeup_fd(before)
        os.close(writer)
