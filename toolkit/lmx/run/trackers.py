"""A tracker beside the run: in a thread of its own, never in the way."""

import os
import re
from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread

from .wandb_tracker import start_wandb

TRACKERS = {"wandb": start_wandb}
# Seconds that the end of a run waits for a tracker.
PATIENCE = 60
_SECRET = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD)$")


class TrackerThread:
    """Rows on their way to a tracker, which may be slow, or fail.

    The first thing that goes wrong is told, once, and nothing is sent after it.

    Args:
        start: opens the tracker; called in the thread.
        warn: told what went wrong, in the thread of the run.
    """

    def __init__(self, start: Callable, warning: Callable[[str], None]):
        self._start = start
        self._warn = warning
        self._jobs: SimpleQueue = SimpleQueue()
        self._fault: str | None = None
        self._told = False
        # A daemon: a tracker that hangs must not keep the process alive.
        self._thread = Thread(target=self._work, daemon=True, name="tracker")
        self._thread.start()

    def log(self, row: dict) -> None:
        """Hand over a row; returns at once."""
        self._jobs.put(lambda tracker: tracker.log(row))
        self._tell()

    def finish(self, summary: dict, code: int) -> None:
        """Hand over the end of the run and wait for it, though not for ever."""
        self._jobs.put(lambda tracker: tracker.finish(summary, code))
        self._jobs.put(None)
        self._thread.join(PATIENCE)
        if self._thread.is_alive():
            self._fault = f"it has not finished within {PATIENCE} s"
        self._tell()

    def _work(self) -> None:
        try:
            tracker = self._start()
            while job := self._jobs.get():
                job(tracker)
        except BaseException as error:
            # Somebody else's program; whatever it does must not end the run.
            self._fault = f"{type(error).__name__}: {error}"

    def _tell(self) -> None:
        if self._fault and not self._told:
            self._told = True
            reason = _plain(self._fault)
            self._warn(f"the tracker has failed, going on without it: {reason}")


def _plain(text: str) -> str:
    """The first line, without what the environment holds in confidence."""
    for name, value in os.environ.items():
        if value and _SECRET.search(name):
            text = text.replace(value, "***")
    return text.strip().split("\n")[0]
