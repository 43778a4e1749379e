"""Experiment trackers, in a thread, so that a slow or broken one never blocks a run."""

from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread

from ..config.redaction import redact_environment
from .wandb_tracker import start_wandb

TRACKERS = {"wandb": start_wandb}
# Seconds that the end of a run waits for the tracker.
FINISH_TIMEOUT = 60


class TrackerThread:
    """Sends records to a tracker in a daemon thread.

    The first error is logged as a warning, and ends the tracking.

    Args:
        start: opens the tracker; called in the thread.
        warning: logs the error; called in the thread of the run.
    """

    def __init__(self, start: Callable, warning: Callable[[str], None]):
        self._start = start
        self._warning = warning
        self._jobs: SimpleQueue = SimpleQueue()
        self._error: str | None = None
        self._has_warned = False
        # A daemon thread: a tracker that hangs must not keep the process alive.
        self._thread = Thread(target=self._work, daemon=True, name="tracker")
        self._thread.start()

    def log(self, record: dict) -> None:
        """Queue a record of metrics.jsonl; does not block."""
        self._jobs.put(lambda tracker: tracker.log(record))
        self._warn_once()

    def finish(self, summary: dict, code: int) -> None:
        """Queue the end of the run and wait up to FINISH_TIMEOUT seconds."""
        self._jobs.put(lambda tracker: tracker.finish(summary, code))
        self._jobs.put(None)
        self._thread.join(FINISH_TIMEOUT)
        if self._thread.is_alive():
            self._error = f"it has not finished within {FINISH_TIMEOUT} s"
        self._warn_once()

    def _work(self) -> None:
        try:
            tracker = self._start()
            while job := self._jobs.get():
                job(tracker)
        except BaseException as error:
            # No error of third-party code may end the run.
            self._error = f"{type(error).__name__}: {error}"

    def _warn_once(self) -> None:
        if self._error and not self._has_warned:
            self._has_warned = True
            reason = redact_environment(self._error).strip().split("\n")[0]
            self._warning(f"the tracker failed, continuing without it: {reason}")
