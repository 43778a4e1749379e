"""Experiment trackers, each in a thread, so that a slow or broken one blocks no run.

A tracker is a module with:

- `start(config, folder=, name=, recipe=)`: starts a run of the tracker, or resumes that
  of this run directory, and returns an object with `log(stage, step, values)` and
  `finish(summary, code)`. `folder` is the run directory, `recipe` the resolved recipe.
- `PACKAGE`, which it imports, and `EXTRA`, the extra of lmx that has it; "" = lmx
  itself needs it.
"""

import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from queue import SimpleQueue
from threading import Thread

from ..config.redaction import redact_environment
from . import mlflow_tracker, tensorboard_tracker, trackio_tracker, wandb_tracker

TRACKERS = {
    "wandb": wandb_tracker,
    "tensorboard": tensorboard_tracker,
    "trackio": trackio_tracker,
    "mlflow": mlflow_tracker,
}
# Seconds that the end of a run waits for all trackers.
FINISH_TIMEOUT = 60


def is_installed(name: str) -> bool:
    """Whether the package of a tracker can be imported; imports nothing."""
    spec = find_spec(TRACKERS[name].PACKAGE)
    # A folder without code, such as the one with wandb's files, has no origin.
    return spec is not None and spec.origin is not None


class TrackerThread:
    """Sends records to a tracker in a daemon thread.

    The first error is logged as a warning, and ends the tracking.

    Args:
        name: of the tracker, for the warning.
        start: opens the tracker; called in the thread.
        warning: logs the error; called in the thread of the run.
    """

    def __init__(self, name: str, start: Callable, warning: Callable[[str], None]):
        self._name = name
        self._start = start
        self._warning = warning
        self._jobs: SimpleQueue = SimpleQueue()
        self._error: str | None = None
        self._has_warned = False
        # A daemon thread: a tracker that hangs must not keep the process alive.
        self._thread = Thread(target=self._work, daemon=True, name=f"tracker {name}")
        self._thread.start()

    def log(self, record: dict) -> None:
        """Queue the numbers of a record of metrics.jsonl; does not block."""
        stage, step, kind = record["stage"], record["step"], record["kind"]
        values = {
            f"{kind}/{key}": value
            for key, value in record.items()
            if isinstance(value, int | float) and key != "step"
        }
        self._jobs.put(lambda tracker: tracker.log(stage, step, values))
        self._warn_once()

    def finish(self, summary: dict, code: int) -> None:
        """Queue the end of the run; see `wait`."""
        self._jobs.put(lambda tracker: tracker.finish(summary, code))
        self._jobs.put(None)

    def wait(self, seconds: float) -> None:
        """Wait for the tracker to end."""
        self._thread.join(max(0, seconds))
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
            self._warning(
                f"the tracker {self._name} failed, continuing without it: {reason}"
            )


def finish_all(trackers: Sequence[TrackerThread], summary: dict, code: int) -> None:
    """End all trackers, and wait up to FINISH_TIMEOUT seconds for all of them.

    Args:
        summary: the final metrics of the evaluated models.
        code: exit code of the run.
    """
    for tracker in trackers:
        tracker.finish(summary, code)
    deadline = time.monotonic() + FINISH_TIMEOUT
    for tracker in trackers:
        tracker.wait(deadline - time.monotonic())
