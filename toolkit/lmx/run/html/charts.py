"""Line charts as shapes in SVG coordinates; the templates write the SVG."""

import math
from dataclasses import dataclass
from typing import ClassVar

from ..progress import format_number

TICKS = 5
LEFT, RIGHT, TOP, BOTTOM = 50, 340, 10, 172
MAX_POINTS = 240
# Lines with at most this many points have a mark at each.
MAX_MARKS = 40
TABLE_ROWS = 12

# Position and value; None is a gap.
Point = tuple[float, float | None]


@dataclass(frozen=True)
class Scale:
    """A linear map from values [low, high] to coordinates [start, end]."""

    low: float
    high: float
    start: float
    end: float

    @classmethod
    def of(cls, values: list[float], start: float, end: float, *, zero: bool):
        """A scale with all values, and with 0 if `zero`. Its range is never empty."""
        low, high = min([*values, *[0.0] * zero]), max(values)
        if high == low:
            low, high = low - (abs(low) or 1) / 2, high + (abs(high) or 1) / 2
        return cls(low, high, start, end)

    def __call__(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return round(self.start + share * (self.end - self.start), 1)

    @property
    def ticks(self) -> list[tuple[float, str]]:
        """Coordinates and labels of about `TICKS` round numbers in the range."""
        rough = (self.high - self.low) / TICKS
        power = 10.0 ** math.floor(math.log10(rough))
        # 1, 2 or 5 times a power of ten.
        step = next(n * power for n in (1, 2, 5, 10) if n * power >= rough * 0.999)
        first, last = math.ceil(self.low / step), math.floor(self.high / step)
        values = [round(n * step, 12) for n in range(first, last + 1)]
        return [(self(value), format_number(value)) for value in values]


@dataclass(frozen=True)
class Chart:
    """Curves over the steps, with a description and a table for accessibility.

    Attributes:
        paths: of every line its name, the attribute `d` of an SVG path, and its marks.
    """

    width: ClassVar[int] = 360
    height: ClassVar[int] = 210
    left: ClassVar[int] = LEFT
    right: ClassVar[int] = RIGHT
    bottom: ClassVar[int] = BOTTOM

    key: str
    title: str
    unit: str
    description: str
    columns: list[str]
    rows: list[list[str]]
    down_ticks: list[tuple[float, str]]
    across_ticks: list[tuple[float, str]]
    paths: list[tuple[str, str, list[tuple[float, float]]]]


def line_chart(
    key: str,
    title: str,
    unit: str,
    lines: dict[str, list[Point]],
    *,
    across: str = "step",
) -> Chart | None:
    """A chart of lines by name over steps; None if no line has a value.

    Args:
        across: what a position is.
    """
    known = {
        name: {x: y for x, y in points if y is not None}
        for name, points in lines.items()
    }
    known = {name: points for name, points in known.items() if points}
    if not known:
        return None
    xs = sorted({x for points in known.values() for x in points})
    ys = [y for points in known.values() for y in points.values()]
    x = Scale.of(xs, LEFT, RIGHT, zero=True)
    y = Scale.of(ys, BOTTOM, TOP, zero=min(ys) >= 0 and min(ys) < 0.5 * max(ys))
    # Evenly spaced rows, including the first and the last.
    count = min(TABLE_ROWS, len(xs))
    rows = [xs[round(i * (len(xs) - 1) / max(1, count - 1))] for i in range(count)]
    return Chart(
        key,
        title,
        unit,
        description=" ".join(_describe(*line, across) for line in known.items()),
        columns=[across, *known],
        rows=[
            [
                format_number(at),
                *(format_number(p[at]) if at in p else "-" for p in known.values()),
            ]
            for at in rows
        ],
        down_ticks=y.ticks,
        across_ticks=x.ticks,
        paths=[_path(name, lines[name], x, y) for name in known],
    )


def _path(name: str, points: list[Point], x: Scale, y: Scale) -> tuple:
    """A line of at most MAX_POINTS points: means of neighbors, at the last of them."""
    size = max(1, -(-len(points) // MAX_POINTS))
    parts, pen = [], "M"
    for start in range(0, len(points), size):
        chunk = points[start : start + size]
        values = [value for _, value in chunk if value is not None]
        if values:
            parts.append(f"{pen}{x(chunk[-1][0])} {y(sum(values) / len(values))}")
        pen = "L" if values else "M"
    marks = [(x(at), y(value)) for at, value in points if value is not None]
    return name, " ".join(parts), marks if len(marks) <= MAX_MARKS else []


def _describe(name: str, points: dict[float, float], across: str) -> str:
    def at(step: float) -> str:
        return f"{format_number(points[step])} at {across} {format_number(step)}"

    steps = [*points]
    lowest, highest = (best(points, key=points.get) for best in (min, max))
    return (
        f"{name}: {at(steps[0])}, {at(steps[-1])}; lowest {at(lowest)}, "
        f"highest {at(highest)}."
    )
