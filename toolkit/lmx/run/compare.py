"""Comparison of runs: their metrics, the recipe values that differ, and means over the
seeds of a sweep."""

import math
from pathlib import Path
from statistics import fmean, stdev

from pydantic import ValidationError

from ..config import yaml_io
from ..config.schema import RecipeConfig
from ..errors import UserError
from . import tables
from .report import REPORT, Record
from .tables import ABSENT, Metric, TableCells, metrics_of, one_line, recipe_values

SEED = "seed"
# The keys of a block that say what it is.
KINDS = (".type", ".method")
SWEEP = "means ± standard errors over the seeds of finished runs"


def read_runs(paths: list[Path]) -> dict[str, Record]:
    """Run directories or report.json files by distinct names.

    A name is the last part of the path, or as many as are needed.

    Raises:
        UserError: a path is no run, is damaged, or is repeated.
    """
    resolved = [path.resolve() for path in paths]
    resolved = [path.parent if path.name == REPORT else path for path in resolved]
    for count in range(1, max(len(path.parts) for path in resolved) + 1):
        names = ["/".join(path.parts[-count:]) for path in resolved]
        if len(set(names)) == len(names):
            runs = (Record(path, is_report=path.is_file()) for path in paths)
            return dict(zip(names, runs, strict=True))
    raise UserError("a run is given twice", hint="give each run once")


def run_values(name: str, run: Record) -> dict:
    """What `lmx compare --json` has of a run. Its curves are in metrics.jsonl."""
    return {
        "name": name,
        "path": str(run.path),
        "model": run.model,
        "metrics": run.figures,
        "thresholds": run.report.get("thresholds", []),
        "status": run.status,
        "recipe": recipe_values(run.resolved) if run.resolved else {},
    }


def comparison_table(runs: dict[str, Record]) -> TableCells:
    """The metrics of the last models, with their changes from the first run."""
    last = {name: run.figures for name, run in runs.items()}
    columns, rows = tables.metrics_table(last, changes=True)
    passed = ["thresholds passed"]
    for run in runs.values():
        results = [limit["passed"] for limit in run.report.get("thresholds", [])]
        passed.append(f"{sum(results)} of {len(results)}" if results else ABSENT)
    models = ["model", *(run.model or ABSENT for run in runs.values())]
    status = ["status", *(run.status or ABSENT for run in runs.values())]
    return columns, [models, status, passed, *rows]


def recipe_table(runs: dict[str, Record]) -> TableCells:
    """The values that differ between the known recipes.

    Of a block that only some of them have, it has the kind and what is not a default.
    """
    known = {n: run.resolved for n, run in runs.items() if run.resolved}
    given = {key for resolved in known.values() for key in _given(resolved)}
    recipes = [recipe_values(resolved) for resolved in known.values()]
    rows = _differing(recipes, [ABSENT] * len(known))
    shown = [
        row
        for row in rows
        if ABSENT not in row or row[0] in given or row[0].endswith(KINDS)
    ]
    return ["key", *known], shown


def _given(resolved: dict) -> dict:
    """The values of a recipe that are not the defaults of their keys."""
    try:
        recipe = RecipeConfig.model_validate(resolved)
    except ValidationError:  # Of another version of lmx.
        return recipe_values(resolved)
    return recipe_values(recipe.values(exclude_defaults=True))


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


def groups_table(runs: list[tuple[dict[str, str], Record | None]]) -> TableCells:
    """One row for all finished runs that differ only in the seed.

    It is turned if it then has fewer columns.

    Args:
        runs: the overrides of every run, and its results; None = it has not started.
    """
    groups: dict[tuple, list[Record | None]] = {}
    for values, run in runs:
        key = tuple(item for item in values.items() if item[0] != SEED)
        groups.setdefault(key, []).append(run)
    done = {
        key: [run.figures | _last_loss(run) for run in group if run and run.is_done]
        for key, group in groups.items()
    }
    metrics = metrics_of(figures for group in done.values() for figures in group)
    keys = dict.fromkeys(name for key in groups for name, _ in key)
    columns = [*keys, "finished", *(metric.label for metric in metrics)]
    rows = [
        [
            *(dict(key).get(name, ABSENT) for name in keys),
            f"{len(done[key])} of {len(group)}",
            *(_mean(metric, done[key]) for metric in metrics),
        ]
        for key, group in groups.items()
    ]
    if len(rows) + 1 >= len(columns):
        return columns, rows
    head, *others = ([*cells] for cells in zip(columns, *rows, strict=True))
    return head, others


def _last_loss(run: Record) -> dict[str, float]:
    losses = [row.get("loss") for row in run.metrics if row["kind"] == "valid"]
    losses = [loss for loss in losses if isinstance(loss, int | float)]
    return {"validation_loss": losses[-1]} if losses else {}


def _mean(metric: Metric, models: list[dict]) -> str:
    """The mean; with several values also its standard error."""
    values = [v for v, _ in map(metric.values, models) if v is not None]
    if len(values) < 2 or not all(map(math.isfinite, values)):
        return metric.show(fmean(values) if values else None)
    return metric.show(fmean(values), stdev(values) / math.sqrt(len(values)))
