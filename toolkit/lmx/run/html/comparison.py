"""Runs side by side as a page."""

from ..compare import RunSummary, figures_table, recipe_table
from .charts import Chart, Line, line_chart
from .curves import CURVES, points
from .page import render


def comparison(sides: list[RunSummary]) -> str:
    """The page, HTML."""
    return render(
        "compare.html",
        names=[side.name for side in sides],
        figures=figures_table(sides),
        recipes=recipe_table(sides),
        charts=_charts(sides),
    )


def _charts(sides: list[RunSummary]) -> list[Chart]:
    """The curves of all runs over each other, of the stage each trained in first."""
    found = [_over("valid", "loss", "Validation loss", "nats per token", sides)]
    found += [_over("train", key, title, unit, sides) for key, title, unit in CURVES]
    return [chart for chart in found if chart]


def _over(kind: str, key: str, title: str, unit: str, sides: list[RunSummary]):
    lines = [
        Line(side.name, points(side.metrics, _first(side), kind, key)) for side in sides
    ]
    return line_chart(f"{kind}-{key}", title, unit, lines)


def _first(side: RunSummary) -> str | None:
    return next((r["stage"] for r in side.metrics if r.get("kind") == "train"), None)
