"""Progress of long work: a bar on a terminal, else lines with the time left."""

import math
import time
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, Protocol, TypeVar

from . import terminal

T = TypeVar("T")
# Short names of values, for a bar on a terminal.
ON_BAR = {
    "learning_rate": "lr {:.2g}",
    "tokens_per_second": "{:,.0f} tok/s",
    "peak_memory_gb": "{:.1f} GB",
}
MIN_BAR, MAX_BAR = 5, 20


class ProgressOutput(Protocol):
    """What a progress bar needs of a logger."""

    quiet: bool
    bar: Any

    def info(self, text: str) -> None: ...

    def debug(self, text: str) -> None: ...

    def open_bar(self, progress: "ProgressBar") -> None: ...

    def close_progress(self, progress: "ProgressBar") -> None: ...


class WorkRate:
    """The speed of work, measured while it runs, and the time left.

    The rate is that of the newer half of the work: the older half has what happens
    once, such as compiling kernels. Work is known to be done when it is counted, so
    that the time since then is subtracted, up to the time of another such amount.

    Args:
        total: amount of work, in any unit that takes about the same time each.
    """

    def __init__(self, total: float):
        self.total = total
        self.done: float = 0
        self._first: float = 0
        # Times at which amounts were done: the newest one of the older half, and later.
        self._marks = deque([(time.monotonic(), 0.0)])

    def count(self, done: float) -> None:
        """Work up to this amount is done now."""
        if done <= self.done:
            return
        self.done = done
        self._marks.append((time.monotonic(), done))
        middle = (self._first + done) / 2
        while len(self._marks) > 2 and self._marks[1][1] <= middle:
            self._marks.popleft()

    def restart(self, done: float) -> None:
        """Forget the rate; `done` of the work is done."""
        self.done = self._first = done
        self._marks = deque([(time.monotonic(), done)])

    def seconds_left(self) -> float | None:
        """None = unknown: nothing is done, or nothing is left."""
        (start, first), (end, done) = self._marks[0], self._marks[-1]
        if done <= first or done >= self.total:
            return None
        seconds_each = (end - start) / (done - first)
        newest = done - self._marks[-2][1]
        running = min(time.monotonic() - end, seconds_each * newest)
        return max(0.0, seconds_each * (self.total - done) - running)


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
        self._rate = WorkRate(total)
        self._description = description
        self._percent = percent
        self._text = ""
        # The text in parts, each short enough for a terminal.
        self._parts: list[str] = []
        # A terminal shows one bar at a time; nested operations log lines.
        self.is_on_screen = (
            terminal.output_is_terminal() and not logger.quiet and logger.bar is None
        )
        if self.is_on_screen:
            logger.open_bar(self)

    def update(self, done: float, **values: float) -> None:
        """Log the progress, with values such as loss=2.5."""
        self._rate.count(done)
        long = {
            name: f"{name.replace('_', ' ')} {format_number(value)}"
            for name, value in values.items()
        }
        self._text = "  ".join(long.values())
        self._parts = [
            ON_BAR.get(name, long[name]).format(value) for name, value in values.items()
        ]
        if self.is_on_screen:
            self._logger.debug(self.line())
        else:
            self._logger.info(self.line())

    def advance(self, amount: float = 1, note: str | None = None) -> None:
        """Count finished work.

        Args:
            note: what comes next. None = as before.
        """
        self._rate.count(min(self._rate.total, self._rate.done + amount))
        if note is not None:
            self._text, self._parts = note, [note]

    def skip(self, amount: float) -> None:
        """Count work that says nothing about the time left, e.g. of an earlier run."""
        self._rate.restart(min(self._rate.total, self._rate.done + amount))

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

    def on_screen(self, width: int) -> tuple[str, float, int, str]:
        """The progress for a terminal line of `width` characters.

        The time left comes first, then the values in their order, then a bar: what does
        not fit is left out.

        Returns:
            Text before the bar, the share that is done, characters of the bar (0 = no
            bar), and text after it.
        """
        start = f"{self._description} {self._amount()}"[:width]
        after: list[str] = []
        room = width - len(start)
        remaining = self._remaining().removeprefix("about ")
        for part in filter(None, (remaining, *self._parts)):
            if len(part) + 1 > room:
                break
            after.append(part)
            room -= len(part) + 1
        bar = min(MAX_BAR, room - 1)
        share = self._rate.done / self._rate.total if self._rate.total else 1.0
        return start, share, bar if bar >= MIN_BAR else 0, " ".join(after)

    def close(self) -> None:
        """Stop the bar; a terminal keeps its last state."""
        self._logger.close_progress(self)
        if self.is_on_screen:
            self._logger.bar.stop()
            self._logger.bar = None

    def _amount(self) -> str:
        done, total = self._rate.done, self._rate.total
        return f"{done / max(total, 1):.0%}" if self._percent else f"{done}/{total}"

    def _remaining(self) -> str:
        seconds = self._rate.seconds_left()
        # A last part that takes longer than expected has no known end.
        return f"about {format_duration(seconds)} left" if seconds else ""


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


def readable_size(count: float) -> str:
    """Bytes in the largest unit that fits."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"
