"""Progress of long work: a bar on a terminal, else lines with the time left."""

import math
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol, TypeVar

from ..interfaces import Progress
from . import terminal
from .work_rate import KindOfWork, WorkRate

T = TypeVar("T")
# The kind of work of a progress that has one.
ONE = ""
# Short names of values, for a bar on a terminal.
ON_BAR = {
    "learning_rate": "lr {:.2g}",
    "trained_tokens_per_second": "{:,.0f} trained tok/s",
    "peak_memory_gb": "{:.1f} GB",
}
MIN_BAR, MAX_BAR = 5, 20
# Seconds that a time left is shown from.
SHORTEST = 0.5


class ProgressOutput(Protocol):
    """What a progress bar needs of a logger."""

    quiet: bool
    bar: Any

    def log_progress(self, line: str, *, on_screen: bool) -> None: ...

    def open_bar(self, progress: "ProgressBar") -> None: ...

    def close_progress(self, progress: "ProgressBar") -> None: ...


class ProgressBar(Progress):
    """Progress of a long operation; made by `RunLogger.progress`.

    `update` writes a line. `advance` writes none, so that an inner loop can call it:
    the heartbeat of the logger writes one whenever the last one is too old. The share
    that is shown never falls, also where later work turns out to be longer.

    Args:
        total: amount of work in any unit, or work of several kinds.
        percent: show the share that is done instead of amounts.
    """

    def __init__(
        self,
        logger: ProgressOutput,
        total: float | Mapping[str, KindOfWork],
        description: str,
        *,
        percent: bool = False,
    ):
        self._logger = logger
        kinds = total if isinstance(total, Mapping) else {ONE: KindOfWork(total)}
        self._rate = WorkRate(kinds)
        self._description = description
        self._percent = percent
        # What comes next, and the values of the last update for a terminal.
        self._note = ""
        self._parts: list[str] = []
        self._shown = 0.0
        # A terminal shows one bar at a time; nested operations log lines.
        self.is_on_screen = (
            terminal.output_is_terminal() and not logger.quiet and logger.bar is None
        )
        if self.is_on_screen:
            logger.open_bar(self)

    def update(self, done: float, **values: float) -> None:
        """Log the progress, with values such as loss=2.5."""
        self.advance(done - self._work.done)
        long = {
            name: f"{name.replace('_', ' ')} {format_number(value)}"
            for name, value in values.items()
        }
        self._parts = [
            ON_BAR.get(name, long[name]).format(value) for name, value in values.items()
        ]
        self._logger.log_progress(
            self.line(*long.values()), on_screen=self.is_on_screen
        )

    def advance(
        self, amount: float | Mapping[str, float] = 1, note: str | None = None
    ) -> None:
        """Count finished work.

        Args:
            amount: by kind if there are several.
            note: what comes next. None = as before.
        """
        if isinstance(amount, Mapping):
            self._rate.count(amount)
        elif amount > 0:
            self._rate.count({ONE: amount})
        if note is not None:
            self._note = note

    def skip(self, amount: float) -> None:
        """Count work that says nothing about the time left, e.g. of an earlier run."""
        work = self._work
        work.restart(min(work.total, work.done + amount))
        self.skip_time()

    def skip_time(self) -> None:
        """The time since the last amount was spent on something that is not counted."""
        self._rate.skip_time()

    @property
    def _work(self) -> KindOfWork:
        return self._rate.kinds[ONE]

    def track(self, items: Iterable[T]) -> Iterator[T]:
        """The items; each is counted when the next one is asked for."""
        for item in items:
            yield item
            self.advance()

    def line(self, *values: str) -> str:
        """The progress, values, what comes next and the time left as text."""
        start = f"{self._description} {self._amount()}"
        return "  ".join(filter(None, (start, *values, self._note, self._remaining())))

    def on_screen(self, width: int, inner: str = "") -> tuple[str, float, int, str]:
        """The progress for a terminal line of `width` characters.

        The time left comes first, then the text of what runs inside, then the values in
        their order, then a bar: what does not fit is left out.

        Returns:
            Text before the bar, the share that is done, characters of the bar (0 = no
            bar), and text after it.
        """
        start = f"{self._description} {self._amount()}"[:width]
        after: list[str] = []
        room = width - len(start)
        remaining = self._remaining().removeprefix("about ")
        for part in filter(None, (remaining, self._note, inner, *self._parts)):
            if len(part) + 1 > room:
                break
            after.append(part)
            room -= len(part) + 1
        bar = min(MAX_BAR, room - 1)
        return start, self._share(), bar if bar >= MIN_BAR else 0, " ".join(after)

    def close(self) -> None:
        """Stop the bar; a terminal keeps its last state."""
        if self.is_on_screen:
            self._logger.bar.stop()
            self._logger.bar = None
        self._logger.close_progress(self)

    def _amount(self) -> str:
        if self._percent:
            # Rounded down: 100 % is the end.
            return f"{int(100 * self._share())}%"
        return f"{self._work.done}/{self._work.total}"

    def _share(self) -> float:
        self._shown = max(self._shown, self._rate.share)
        return self._shown

    def _remaining(self) -> str:
        seconds = self._rate.seconds_left()
        # A last part that takes longer than expected has no known end.
        is_known = seconds is not None and seconds >= SHORTEST
        return f"about {format_duration(seconds)} left" if is_known else ""


class Activity:
    """Work whose amount is unknown, and since when it runs; made by
    `RunLogger.activity`."""

    def __init__(self, text: str):
        self._text, self._start = text, time.monotonic()

    def line(self) -> str:
        """What happens, and for how long."""
        return f"{self._text} for {format_duration(time.monotonic() - self._start)}"


def format_number(value: float) -> str:
    """A number with four significant digits and grouped thousands."""
    if isinstance(value, int):
        return f"{value:,}"
    if 1000 <= abs(value) < math.inf:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def format_duration(seconds: float) -> str:
    """A duration such as 45 s, 12 min, 3.5 h or 9 days."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    hours = seconds / 3600
    return f"{hours:.1f} h" if hours < 72 else f"{hours / 24:.0f} days"


def readable_size(count: float) -> str:
    """Bytes in the largest unit that fits."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"
