"""The speed of work, measured while it runs, and the time left."""

import time
from collections import deque
from collections.abc import Mapping


class KindOfWork:
    """Work in a unit that takes about the same time each.

    The rate is that of the newer half of the work: the older half has what happens
    once, such as compiling kernels.

    Args:
        total: amount of work.
        seconds_each: of a unit, until one was measured. None = unknown.
    """

    def __init__(self, total: float, seconds_each: float | None = None):
        self.total = total
        self._expected = seconds_each
        self.restart(0)

    def restart(self, done: float) -> None:
        """Forget the rate; `done` of the work is done."""
        self.done = self._first = done
        # Seconds after which amounts were done: the newest one of the older half, and
        # later.
        self._marks = deque([(0.0, done)])

    def add(self, amount: float, seconds: float) -> None:
        """This amount more is done, and took this time."""
        if (done := min(self.total, self.done + amount)) <= self.done:
            return
        self.done = done
        self._marks.append((self._marks[-1][0] + seconds, self.done))
        middle = (self._first + self.done) / 2
        while len(self._marks) > 2 and self._marks[1][1] <= middle:
            self._marks.popleft()

    @property
    def seconds_each(self) -> float | None:
        """The time of a unit; None = unknown."""
        (start, first), (end, done) = self._marks[0], self._marks[-1]
        return (end - start) / (done - first) if done > first else self._expected


class WorkRate:
    """The time left of work of one kind or of several, each with its own rate.

    Work is known to be done when it is counted, so that the time since then is
    subtracted, up to the time of another such amount.
    """

    def __init__(self, kinds: Mapping[str, KindOfWork]):
        self.kinds = kinds
        self.skip_time()

    def skip_time(self) -> None:
        """The time since the last amount was spent on something that is not counted."""
        self._last = time.monotonic()
        self._newest: Mapping[str, float] = {}

    def count(self, amounts: Mapping[str, float]) -> None:
        """These amounts are done. They share the time as their rates were before."""
        now = time.monotonic()
        seconds, shares = now - self._last, self._seconds(amounts)
        total = sum(shares.values())
        for kind, amount in amounts.items():
            share = shares[kind] / total if total else 1 / len(amounts)
            self.kinds[kind].add(amount, share * seconds)
        self._last, self._newest = now, amounts

    def seconds_left(self) -> float | None:
        """None = unknown, or nothing is left."""
        left = {kind: work.total - work.done for kind, work in self.kinds.items()}
        left = {kind: amount for kind, amount in left.items() if amount > 0}
        if not left or any(self.kinds[k].seconds_each is None for k in left):
            return None
        newest = sum(self._seconds(self._newest).values())
        running = min(time.monotonic() - self._last, newest)
        return max(0.0, sum(self._seconds(left).values()) - running)

    @property
    def share(self) -> float:
        """The part of the time that is over, 0 to 1."""
        works = self.kinds.values()
        # The unit of a single kind needs no rate.
        each = [len(works) == 1 or work.seconds_each or 0.0 for work in works]
        done, total = (
            sum(e * getattr(work, name) for e, work in zip(each, works, strict=True))
            for name in ("done", "total")
        )
        return done / total if total else 1.0

    def _seconds(self, amounts: Mapping[str, float]) -> dict[str, float]:
        """The time that amounts take; 0 where it is unknown."""
        return {k: n * (self.kinds[k].seconds_each or 0.0) for k, n in amounts.items()}
