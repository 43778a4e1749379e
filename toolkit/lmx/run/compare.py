"""Comparison of runs: their metrics, the recipe values that differ, and means over the
seeds of a sweep."""

import math
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

from ..config import yaml_io
from ..errors import UserError
from .report import Record, read_report
from .tables import Metric, metrics_of, one_line, recipe_values

ABSENT = "-"
SEED = "seed"
TableCells = tuple[list[str], list[list[str]]]


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

    @property
    def figures(self) -> dict:
        """The metrics of the last model, and the last validation loss."""
        losses = [
            record["loss"]
            for record in self.records
            if record.get("kind") == "valid"
            and isinstance(record.get("loss"), int | float)
        ]
        return self.metrics | ({"validation_loss": losses[-1]} if losses else {})


def read_runs(paths: list[Path]) -> list[RunSummary]:
    """Read run directories or report.json files, under distinct names.

    Raises:
        UserError: a path does not exist, or is repeated.
    """
    return [
        read_run(path, name) for name, path in zip(_names(paths), paths, strict=True)
    ]


def read_run(path: Path, name: str) -> RunSummary:
    """Read a run directory or a report.json file.

    Raises:
        UserError: there is none, or it is damaged.
    """
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
    thresholds, metrics = report.get("thresholds", []), models.get(model, {})
    return RunSummary(name, path, model, metrics, thresholds, status, recipe, records)


def metrics_table(runs: list[RunSummary]) -> TableCells:
    """Columns and rows; runs after the first also have their change from it."""
    rows = [
        ["model", *(run.model or ABSENT for run in runs)],
        ["status", *(run.status or ABSENT for run in runs)],
        ["thresholds passed", *map(_passed, runs)],
    ]
    for metric in metrics_of([run.metrics for run in runs]):
        rows.append([metric.label, *(_cell(metric, run, runs[0]) for run in runs)])
    return ["", *(run.name for run in runs)], rows


def recipe_table(runs: list[RunSummary]) -> TableCells:
    """Columns and rows of the values that differ between the known recipes."""
    known = {run.name: run.recipe for run in runs if run.recipe}
    return ["key", *known], _differing([*known.values()], [ABSENT] * len(known))


def difference(old: str, new: str) -> str:
    """The values in which two resolved recipes differ, one override per line."""
    data = [yaml_io.read_shared(text).data for text in (old, new)]
    if not isinstance(data[0], dict):
        return "the values before are unknown: resolved.yaml is missing or damaged"
    rows = _differing([*map(recipe_values, data)], ["(added)", "(removed)"])
    return "\n".join(f"{key}: {before} -> {after}" for key, before, after in rows)


def _differing(recipes: list[dict], absent: list[str]) -> list[list[str]]:
    """Keys whose values differ, and the values: `absent` where a recipe has none."""
    rows = []
    for key in dict.fromkeys(key for recipe in recipes for key in recipe):
        values = [
            one_line(recipe[key]) if key in recipe else word
            for recipe, word in zip(recipes, absent, strict=True)
        ]
        if len(set(values)) > 1:
            rows.append([key, *values])
    return rows


def groups_table(runs: list[tuple[dict[str, str], RunSummary | None]]) -> TableCells:
    """Columns and rows: one row for all finished runs that differ only in the seed.

    Args:
        runs: the overrides of every run, and its results; None = it has not started.
    """
    groups: dict[tuple, list[RunSummary | None]] = {}
    for values, summary in runs:
        key = tuple(item for item in values.items() if item[0] != SEED)
        groups.setdefault(key, []).append(summary)
    done = {
        key: [s.figures for s in group if s and s.status == "done"]
        for key, group in groups.items()
    }
    metrics = metrics_of([figures for group in done.values() for figures in group])
    keys = dict.fromkeys(name for key in groups for name, _ in key)
    rows = [
        [
            *(dict(key).get(name, ABSENT) for name in keys),
            f"{len(done[key])} of {len(group)}",
            *(_mean(metric, done[key]) for metric in metrics),
        ]
        for key, group in groups.items()
    ]
    return [*keys, "finished", *(metric.label for metric in metrics)], rows


def narrower(columns: list[str], rows: list[list[str]]) -> TableCells:
    """A table, turned if it then has fewer columns."""
    if len(rows) + 1 >= len(columns):
        return columns, rows
    head, *others = ([*cells] for cells in zip(columns, *rows, strict=True))
    return head, others


def _mean(metric: Metric, models: list[dict]) -> str:
    """The mean; with several values also its standard error."""
    values = [v for v in map(metric.value, models) if v is not None]
    if not values:
        return ABSENT
    text = metric.form.format(fmean(values))
    if len(values) < 2 or not all(map(math.isfinite, values)):
        return text
    return f"{text} ± {metric.form.format(stdev(values) / math.sqrt(len(values)))}"


def _names(paths: list[Path]) -> list[str]:
    """The last parts of the paths, as many as are needed for distinct names."""
    resolved = [path.resolve() for path in paths]
    resolved = [p.parent if p.name == "report.json" else p for p in resolved]
    for count in range(1, max(len(path.parts) for path in resolved) + 1):
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
