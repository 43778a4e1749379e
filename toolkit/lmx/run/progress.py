"""Progress of long work: a bar on a terminal, else lines with the time left."""

import math
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class ProgressOutput(Protocol):
    """What a progress bar needs of a logger."""

    quiet: bool
    bar: Any

    def info(self, text: str) -> None: ...

    def debug(self, text: str) -> None: ...

    def open_bar(self, description: str, total: float, *, percent: bool) -> Any: ...

    def close_progress(self, progress: "ProgressBar") -> None: ...


class ProgressBar:
    """Progress of a long operation; made by `RunLogger.progress`.

    `update` writes a line. `advance` writes none, so that an inner loop can call it:
    the heartbeat of the logger writes one whenever the log is silent for too long.

    Args:
        total: amount of work, in any unit.
        percent: show the share that is done instead of amounts.
    """

    def __init__(
        self,
        logger: ProgressOutput,
        total: float,
        description: str,
        *,
        percent: bool = False,
    ):
        self._logger = logger
        self._total = total
        self._description = description
        self._percent = percent
        self._done: float = 0
        self._text = ""
        self._created = time.monotonic()
        # Time and amount that the time left is extrapolated from.
        self._started: tuple[float, float] | None = None
        self._task = None
        # A terminal shows one bar at a time; nested operations log lines.
        if sys.stdout.isatty() and not logger.quiet and logger.bar is None:
            self._task = logger.open_bar(description, total, percent=percent)

    def update(self, done: float, **values: float) -> None:
        """Log the progress, with values such as loss=2.5."""
        self._done = done
        self._text = "  ".join(
            f"{name.replace('_', ' ')} {format_number(value)}"
            for name, value in values.items()
        )
        if self._task is None:
            self._logger.info(self.line())
        else:
            self._logger.debug(f"{self._description} {self._amount()}  {self._text}")
            self._draw()

    def advance(self, amount: float = 1, note: str | None = None) -> None:
        """Count finished work.

        Args:
            note: what comes next. None = as before.
        """
        if self._started is None:
            self._started = (self._created, 0)
        self._done = min(self._total, self._done + amount)
        self._text = self._text if note is None else note
        if self._task is not None:
            self._draw()

    def skip(self, amount: float) -> None:
        """Count work that was done before, which says nothing about the time left."""
        self.advance(amount)
        self._started = (time.monotonic(), self._done)

    def track(self, items: Iterable[T], note: str | None = None) -> Iterator[T]:
        """The items; each is counted when the next one is asked for."""
        self.advance(0, note)
        for item in items:
            yield item
            self.advance()

    def line(self) -> str:
        """The progress and the time left as text."""
        parts = (f"{self._description} {self._amount()}", self._text, self._remaining())
        return "  ".join(filter(None, parts))

    def close(self) -> None:
        """Remove the bar from the screen."""
        self._logger.close_progress(self)
        if self._task is not None:
            self._logger.bar.stop()
            self._logger.bar = None

    @property
    def is_on_screen(self) -> bool:
        """Whether a terminal shows it."""
        return self._task is not None

    def _amount(self) -> str:
        if self._percent:
            return f"{self._done / max(self._total, 1):.0%}"
        return f"{self._done}/{self._total}"

    def _draw(self) -> None:
        self._logger.bar.update(self._task, completed=self._done, values=self._text)

    def _remaining(self) -> str:
        now = time.monotonic()
        if self._started is None:
            self._started = (now, self._done)
            return ""
        start, first = self._started
        if self._done <= first:
            return ""
        remaining = (now - start) / (self._done - first) * (self._total - self._done)
        return f"about {format_duration(remaining)} left" if remaining else ""


def format_number(value: float) -> str:
    """A number with four significant digits and grouped thousands."""
    if isinstance(value, int):
        return f"{value:,}"
    if 1000 <= abs(value) < math.inf:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def format_duration(seconds: float) -> str:
    """A duration such as 45 s, 12 min or 3.5 h."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
