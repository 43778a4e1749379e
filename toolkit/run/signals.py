"""Stopping on Ctrl-C and SIGTERM at a moment of the program's own choosing."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


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
