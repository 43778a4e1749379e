"""Stopping on Ctrl-C and SIGTERM at a moment of the program's own choosing."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..errors import INTERRUPTED


@contextmanager
def stop_requested() -> Iterator[Callable[[], bool]]:
    """While open, the first SIGINT or SIGTERM only sets what the callable returns.

    A second signal acts as ever, for those who cannot wait. Outside the main thread,
    which alone receives signals, nothing is changed.
    """
    seen: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    kinds = (signal.SIGINT, signal.SIGTERM)
    before = {kind: signal.getsignal(kind) for kind in kinds}

    def note(kind, _):
        seen.append(kind)
        for each in kinds:
            signal.signal(each, before[each])

    for kind in kinds:
        signal.signal(kind, note)
    try:
        yield lambda: bool(seen)
    finally:
        for kind in kinds:
            signal.signal(kind, before[kind])


@contextmanager
def ended_when_stuck(seconds: float) -> Iterator[None]:
    """SIGTERM ends the process if this is still open `seconds` after it.

    Who waits for another process waits outside of Python, which hears no signal there;
    if that process is dead, it would hear none for ever.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer)
    left = threading.Event()

    def watch():
        while kinds := os.read(reader, 1):
            if kinds[0] == signal.SIGTERM and not left.wait(seconds):
                os._exit(INTERRUPTED)
        os.close(reader)

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        left.set()
        signal.set_wakeup_fd(before)
        os.close(writer)
