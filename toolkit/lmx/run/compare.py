"""Comparison of runs: their metrics, and the recipe values that differ."""

from dataclasses import dataclass
from pathlib import Path

from ..errors import UserError
from .html.record import Record
from .report import read_report
from .tables import Metric, metrics_of, one_line, recipe_values

ABSENT = "-"


@dataclass(frozen=True)
class RunSummary:
    """One run: the metrics of its last model, and its recipe by dotted key.

    Attributes:
        status: None for a report.json without run directory; its recipe is empty.
        records: the lines of metrics.jsonl.
    """

    name: str
    path: Path
    model: str | None
    metrics: dict
    thresholds: list[dict]
    status: str | None
    recipe: dict
    records: list[dict]

    def to_json(self) -> dict:
        """All fields but the curves, which are in metrics.jsonl."""
        fields = {key: value for key, value in vars(self).items() if key != "records"}
        return fields | {"path": str(self.path)}


def read_runs(paths: list[Path]) -> list[RunSummary]:
    """Read run directories or report.json files, under distinct names.

    Raises:
        UserError: a path does not exist, or is repeated.
    """
    return [
        _summary(name, path) for name, path in zip(_names(paths), paths, strict=True)
    ]


def metrics_table(runs: list[RunSummary]) -> tuple[list[str], list[list[str]]]:
    """Columns and rows; runs after the first also have their change from it."""
    rows = [
        ["model", *(run.model or ABSENT for run in runs)],
        ["status", *(run.status or ABSENT for run in runs)],
        ["thresholds passed", *map(_passed, runs)],
    ]
    for metric in metrics_of([run.metrics for run in runs]):
        if any(metric.value(run.metrics) is not None for run in runs):
            rows.append([metric.label, *(_cell(metric, s, runs[0]) for s in runs)])
    return ["", *(run.name for run in runs)], rows


def recipe_table(runs: list[RunSummary]) -> tuple[list[str], list[list[str]]]:
    """Columns and rows of the values that differ between the known recipes."""
    known = [run for run in runs if run.recipe]
    keys = dict.fromkeys(key for run in known for key in run.recipe)
    rows = []
    for key in keys:
        values = [
            one_line(run.recipe[key]) if key in run.recipe else ABSENT for run in known
        ]
        if len(set(values)) > 1:
            rows.append([key, *values])
    return ["key", *(run.name for run in known)], rows


def _summary(name: str, path: Path) -> RunSummary:
    if path.is_dir():
        record = Record.read(path)
        report, status = record.report, record.manifest["status"]
        recipe, records = recipe_values(record.resolved), record.metrics
    elif path.is_file():
        report, status, recipe, records = read_report(path), None, {}, []
    else:
        raise UserError("no such run", place=str(path))
    models = report.get("models", {})
    model = [*models][-1] if models else None
    thresholds = report.get("thresholds", [])
    metrics = models.get(model, {})
    return RunSummary(name, path, model, metrics, thresholds, status, recipe, records)


def _names(paths: list[Path]) -> list[str]:
    """The last parts of the paths, as many as are needed for distinct names."""
    resolved = [path.resolve() for path in paths]
    resolved = [p.parent if p.name == "report.json" else p for p in resolved]
    longest = max(len(path.parts) for path in resolved)
    for count in range(1, longest + 1):
        names = ["/".join(path.parts[-count:]) for path in resolved]
        if len(set(names)) == len(names):
            return names
    raise UserError("a run is given twice", hint="give each run once")


def _passed(run: RunSummary) -> str:
    if not run.thresholds:
        return ABSENT
    passed = sum(threshold["passed"] for threshold in run.thresholds)
    return f"{passed} of {len(run.thresholds)}"


def _cell(metric: Metric, run: RunSummary, first: RunSummary) -> str:
    text = metric.show(run.metrics)
    value, start = metric.value(run.metrics), metric.value(first.metrics)
    if run is first or value is None or not start or value == start:
        return text
    return f"{text} ({value / start - 1:+.1%})"
