"""Axes: round numbers between two values, and where a value lies on paper."""

import math
from dataclasses import dataclass

from ..report import format_number

TICKS = 5


@dataclass(frozen=True)
class Scale:
    """Values from `low` to `high` on paper from `start` to `end`."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return round(self.start + share * (self.end - self.start), 1)

    @property
    def ticks(self) -> list[tuple[float, str]]:
        """Place and label of the round numbers in between."""
        step = round_step(self.high - self.low)
        first, last = math.ceil(self.low / step), math.floor(self.high / step)
        values = [round(n * step, 12) for n in range(first, last + 1)]
        return [(self(value), format_number(value)) for value in values]


def around(values: list[float], start: float, end: float, *, zero: bool) -> Scale:
    """A scale that holds the values, and 0 if asked; never of no extent."""
    low, high = min(values), max(values)
    low = min(0.0, low) if zero else low
    if high == low:
        low, high = low - (abs(low) or 1) / 2, high + (abs(high) or 1) / 2
    return Scale(low, high, start, end)


def round_step(extent: float) -> float:
    """1, 2 or 5 times a power of ten, so that about `TICKS` of it are the extent."""
    rough = extent / TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    return next(n * power for n in (1, 2, 5, 10) if n * power >= rough * 0.999)
