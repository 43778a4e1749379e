"""Line and bar charts as shapes in SVG coordinates; the templates write the SVG."""

import math
from dataclasses import dataclass
from typing import ClassVar

from ..progress import format_number

TICKS = 5


@dataclass(frozen=True)
class Scale:
    """A linear map from values [low, high] to coordinates [start, end]."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return round(self.start + share * (self.end - self.start), 1)

    @property
    def ticks(self) -> list[tuple[float, str]]:
        """Coordinates and labels of the round numbers in the range."""
        step = round_step(self.high - self.low)
        first, last = math.ceil(self.low / step), math.floor(self.high / step)
        values = [round(n * step, 12) for n in range(first, last + 1)]
        return [(self(value), format_number(value)) for value in values]


def scale_for(values: list[float], start: float, end: float, *, zero: bool) -> Scale:
    """A scale with all values, and with 0 if `zero`. Its range is never empty."""
    low, high = min(values), max(values)
    low = min(0.0, low) if zero else low
    if high == low:
        low, high = low - (abs(low) or 1) / 2, high + (abs(high) or 1) / 2
    return Scale(low, high, start, end)


def round_step(extent: float) -> float:
    """1, 2 or 5 times a power of ten, about `TICKS` of which give the extent."""
    rough = extent / TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    return next(n * power for n in (1, 2, 5, 10) if n * power >= rough * 0.999)


LEFT, RIGHT, TOP, BOTTOM = 50, 340, 10, 172
MAX_POINTS = 240
# Lines with at most this many points have a mark at each.
MAX_MARKS = 40
TABLE_ROWS = 12


@dataclass(frozen=True)
class Line:
    """A named line; None is a gap."""

    name: str
    points: list[tuple[float, float | None]]

    @property
    def known(self) -> list[tuple[float, float]]:
        """The points that have a value."""
        return [(x, y) for x, y in self.points if y is not None]


@dataclass(frozen=True)
class Path:
    """A drawn line: the attribute `d` of an SVG path, and the points to mark."""

    name: str
    d: str
    marks: list[tuple[float, float]]


@dataclass(frozen=True)
class Chart:
    """A chart of lines or bars, with a description and a table for accessibility."""

    width: ClassVar[int] = 360
    height: ClassVar[int] = 210
    left: ClassVar[int] = LEFT
    right: ClassVar[int] = RIGHT
    bottom: ClassVar[int] = BOTTOM

    key: str
    title: str
    unit: str
    across: str
    description: str
    columns: list[str]
    rows: list[list[str]]
    down_ticks: list[tuple[float, str]]
    across_ticks: list[tuple[float, str]]
    paths: list[Path]
    bars: list[tuple[float, float, float, float]]


def line_chart(
    key: str, title: str, unit: str, lines: list[Line], *, across: str = "step"
) -> Chart | None:
    """A line chart; None if no line has a value."""
    lines = [line for line in lines if line.known]
    if not lines:
        return None
    xs = [x for line in lines for x, _ in line.known]
    ys = [y for line in lines for _, y in line.known]
    x = scale_for(xs, LEFT, RIGHT, zero=True)
    y = scale_for(ys, BOTTOM, TOP, zero=min(ys) >= 0 and min(ys) < 0.5 * max(ys))
    return Chart(
        key=key,
        title=title,
        unit=unit,
        across=across,
        description=" ".join(_describe(line, across) for line in lines),
        columns=[across, *(line.name for line in lines)],
        rows=_rows(lines),
        down_ticks=y.ticks,
        across_ticks=x.ticks,
        paths=[_path(line, x, y) for line in lines],
        bars=[],
    )


def bar_chart(
    key: str,
    title: str,
    unit: str,
    bars: list[tuple[str, float | None]],
    *,
    across: str,
    labels: list[tuple[float, str]],
    percent: bool = False,
) -> Chart | None:
    """A histogram; None if it is empty.

    Args:
        bars: name and height of each; None = no bar.
        labels: position on the axis from 0 (left edge) to `len(bars)`, and text.
    """
    heights = [height for _, height in bars if height is not None]
    if not any(heights):
        return None
    y = scale_for([*heights, 1.0] if percent else heights, BOTTOM, TOP, zero=True)
    x = Scale(0, len(bars), LEFT, RIGHT)
    write = "{:.1%}".format if percent else format_number
    shown = [(name, height) for name, height in bars if height is not None]
    highest = max(shown, key=lambda bar: bar[1])
    ticks = [(0.25 * n, f"{25 * n} %") for n in range(5)]
    return Chart(
        key=key,
        title=title,
        unit=unit,
        across=across,
        description=f"Highest at {highest[0]}: {write(highest[1])}.",
        columns=[across, unit],
        rows=[[name, write(height)] for name, height in shown],
        down_ticks=[(y(v), text) for v, text in ticks] if percent else y.ticks,
        across_ticks=[(x(place), text) for place, text in labels],
        paths=[],
        bars=[
            (
                x(i) + 1,
                y(height),
                round(x(i + 1) - x(i) - 2, 1),
                round(BOTTOM - y(height), 1),
            )
            for i, (_, height) in enumerate(bars)
            if height
        ],
    )


def downsample(points: list[tuple[float, float | None]]) -> list:
    """At most MAX_POINTS points: means of neighbors, at the position of the last."""
    size = -(-len(points) // MAX_POINTS)
    if size <= 1:
        return points
    means = []
    for start in range(0, len(points), size):
        chunk = points[start : start + size]
        values = [y for _, y in chunk if y is not None]
        means.append((chunk[-1][0], sum(values) / len(values) if values else None))
    return means


def _path(line: Line, x: Scale, y: Scale) -> Path:
    parts, pen = [], "M"
    for at, value in downsample(line.points):
        if value is None:
            pen = "M"
            continue
        parts.append(f"{pen}{x(at)} {y(value)}")
        pen = "L"
    marks = [(x(at), y(value)) for at, value in line.known]
    return Path(line.name, " ".join(parts), marks if len(marks) <= MAX_MARKS else [])


def _describe(line: Line, across: str) -> str:
    (first, start), (last, end) = line.known[0], line.known[-1]
    at_lowest, lowest = min(line.known, key=lambda point: point[1])
    _, highest = max(line.known, key=lambda point: point[1])
    return (
        f"{line.name}: {format_number(start)} at {across} {format_number(first)}, "
        f"{format_number(end)} at {across} {format_number(last)}; "
        f"lowest {format_number(lowest)} at {across} {format_number(at_lowest)}, "
        f"highest {format_number(highest)}."
    )


def _rows(lines: list[Line]) -> list[list[str]]:
    """Up to TABLE_ROWS evenly spaced rows, including the first and the last."""
    values = [dict(line.known) for line in lines]
    xs = sorted({x for line in lines for x, _ in line.known})
    count = min(TABLE_ROWS, len(xs))
    gaps = max(1, count - 1)
    rows_at = [xs[round(i * (len(xs) - 1) / gaps)] for i in range(count)]
    return [
        [format_number(x), *(format_number(v[x]) if x in v else "-" for v in values)]
        for x in rows_at
    ]
