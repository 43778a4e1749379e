"""Means and standard errors over the seeds of a sweep."""

import math
from dataclasses import dataclass
from statistics import fmean, stdev

from .compare import ABSENT, RunSummary
from .tables import Metric, metrics_of

SEED = "seed"
LOSS = Metric("validation loss", ("validation_loss",), "{:.4f}")


@dataclass(frozen=True)
class SweepRun:
    """A run of a sweep.

    Attributes:
        values: its overrides.
        summary: None = it has not started.
    """

    values: dict[str, str]
    summary: RunSummary | None

    @property
    def is_done(self) -> bool:
        """Whether all its stages are complete."""
        return self.summary is not None and self.summary.status == "done"

    @property
    def figures(self) -> dict:
        """The metrics of its last model, and its last validation loss."""
        assert self.summary, "the run has started"
        losses = [
            record["loss"]
            for record in self.summary.records
            if record.get("kind") == "valid"
            and isinstance(record.get("loss"), int | float)
        ]
        loss = {"validation_loss": losses[-1]} if losses else {}
        return self.summary.metrics | loss


def groups_table(runs: list[SweepRun]) -> tuple[list[str], list[list[str]]]:
    """Columns and rows: one row for all finished runs that differ only in the seed."""
    groups: dict[tuple, list[SweepRun]] = {}
    for run in runs:
        key = tuple(item for item in run.values.items() if item[0] != SEED)
        groups.setdefault(key, []).append(run)
    done = {key: [r.figures for r in g if r.is_done] for key, g in groups.items()}
    every = [figures for group in done.values() for figures in group]
    metrics = [
        metric
        for metric in [LOSS, *metrics_of(every)]
        if any(metric.value(figures) is not None for figures in every)
    ]
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


def narrower(
    columns: list[str], rows: list[list[str]]
) -> tuple[list[str], list[list[str]]]:
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
