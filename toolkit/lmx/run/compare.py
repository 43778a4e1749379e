"""Runs beside each other: what was measured, and what their recipes differ in."""

from dataclasses import dataclass
from pathlib import Path

from ..errors import UserError
from .html.record import Record, read_report
from .tables import Metric, metrics_of, one_line, recipe_values

ABSENT = "-"


@dataclass(frozen=True)
class RunSummary:
    """One run: the figures of its last model, and its recipe by dotted key.

    Attributes:
        status: None of a report.json alone, of which no recipe is known either.
    """

    name: str
    path: Path
    model: str | None
    figures: dict
    thresholds: list[dict]
    status: str | None
    recipe: dict
    metrics: list[dict]

    def to_json(self) -> dict:
        """For programs; the curves are in the run's own metrics.jsonl."""
        own = {key: value for key, value in vars(self).items() if key != "metrics"}
        return own | {"path": str(self.path)}


def read_runs(paths: list[Path]) -> list[RunSummary]:
    """Read run folders, or report.json files, under names that differ.

    Raises:
        UserError: one is neither.
    """
    return [_side(name, path) for name, path in zip(_names(paths), paths, strict=True)]


def figures_table(sides: list[RunSummary]) -> tuple[list[str], list[list[str]]]:
    """Columns and rows; every run but the first with its distance from the first."""
    rows = [
        ["model", *(side.model or ABSENT for side in sides)],
        ["status", *(side.status or ABSENT for side in sides)],
        ["thresholds passed", *map(_passed, sides)],
    ]
    for figure in metrics_of([side.figures for side in sides]):
        if any(figure.value(side.figures) is not None for side in sides):
            rows.append([figure.label, *(_cell(figure, s, sides[0]) for s in sides)])
    return ["", *(side.name for side in sides)], rows


def recipe_table(sides: list[RunSummary]) -> tuple[list[str], list[list[str]]]:
    """Columns and rows: the values in which the recipes that are known differ."""
    known = [side for side in sides if side.recipe]
    keys = dict.fromkeys(key for side in known for key in side.recipe)
    rows = []
    for key in keys:
        values = [
            one_line(side.recipe[key]) if key in side.recipe else ABSENT
            for side in known
        ]
        if len(set(values)) > 1:
            rows.append([key, *values])
    return ["key", *(side.name for side in known)], rows


def _side(name: str, path: Path) -> RunSummary:
    if path.is_dir():
        record = Record.read(path)
        report, status = record.report, record.manifest["status"]
        recipe, metrics = recipe_values(record.resolved), record.metrics
    elif path.is_file():
        report, status, recipe, metrics = read_report(path), None, {}, []
    else:
        raise UserError("there is no such run", place=str(path))
    models = report.get("models", {})
    model = [*models][-1] if models else None
    thresholds = report.get("thresholds", [])
    figures = models.get(model, {})
    return RunSummary(name, path, model, figures, thresholds, status, recipe, metrics)


def _names(paths: list[Path]) -> list[str]:
    """The last parts of the paths, as many as tell them apart."""
    own = [p.resolve() for p in paths]
    own = [path.parent if path.name == "report.json" else path for path in own]
    longest = max(len(path.parts) for path in own)
    for count in range(1, longest + 1):
        names = ["/".join(path.parts[-count:]) for path in own]
        if len(set(names)) == len(names):
            return names
    raise UserError("the same run is named twice", hint="name each run once")


def _passed(side: RunSummary) -> str:
    if not side.thresholds:
        return ABSENT
    return f"{sum(threshold['passed'] for threshold in side.thresholds)} of {len(side.thresholds)}"


def _cell(figure: Metric, side: RunSummary, first: RunSummary) -> str:
    text = figure.show(side.figures)
    value, start = figure.value(side.figures), figure.value(first.figures)
    if side is first or value is None or not start or value == start:
        return text
    return f"{text} ({value / start - 1:+.1%})"
